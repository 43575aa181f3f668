"""The scheduler against a clock that only launches move: what refills, residents and thin readouts come to.

    T(n) = a (h + n) per launch of n rows, for core and readout; prompts are free

`simulate` runs the real scheduler over requests of recorded depths and says which share of S_max is left in the steady
window (after 2 R requests have ended, while others still wait); `fit_coda_rows` chooses with it how many rows a readout
waits for. No torch. Reference: the workload is that of continuous depth batching, arXiv:2608.09444; the model is ours.
"""

import bisect
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from looplab.engine.bound import LaunchCost
from looplab.engine.config import EngineConfig
from looplab.engine.reports import Report
from looplab.engine.request import DepthParams, Request, RequestFailed, SamplingParams, TokenSaid
from looplab.engine.scheduler import Scheduler
from looplab.engine.stages import Decision, Drawn, Facts, Job, Prefilled, Row, Span

CLOSE = 0.01
"""Of two numbers of rows whose rates differ by less, the smaller is taken: its tokens wait less."""
PROMPT = 4
"""Tokens of a prompt."""


class CostRunner:
    """A runner whose launches take the time of the cost model. Depths are those of `Job.depth.replay`, tokens are 0.

    Attributes:
        now: Seconds so far.
        opened: Choices that got a seat.
        rows, launches: Counts by stage.
    """

    def __init__(self, facts: Facts, *, core: LaunchCost, coda: LaunchCost):
        self.facts, self._core, self._coda = facts, core, coda
        self.now, self.opened = 0.0, 0
        self.rows, self.launches = {"core": 0, "coda": 0}, {"core": 0, "coda": 0}
        self._jobs: dict[int, Job] = {}
        self._results: dict[int, tuple[Prefilled, ...] | tuple[Drawn, ...]] = {}

    def open(self, seat: int, job: Job) -> None:
        """Puts a choice into a seat."""
        self.opened += 1
        self._jobs[seat] = job

    def close(self, seat: int) -> None:
        """Frees a seat."""
        del self._jobs[seat]

    def copy_page(self, source: int, target: int) -> None:
        """Costs nothing."""

    def prefill(self, spans: Sequence[Span]) -> int:
        """Costs nothing."""
        return self._result(tuple(Prefilled(tuple(Drawn(0) for _ in span.seats)) for span in spans))

    def encode(self, rows: Sequence[Row], tokens: Sequence[int]) -> None:
        """Costs nothing: part of the readout before."""

    def core(self, block: int, rows: Sequence[Row]) -> Sequence[Decision]:
        """One iteration, or all of them where a launch is the whole plan."""
        iterations = max(self.facts.max_steps) if self.facts.whole else 1
        for _ in range(iterations):
            self._count("core", self._core, len(rows))
        if self.facts.whole:
            return [Decision(iterations)] * len(rows)
        return [Decision(self._depth(row) if row.steps + 1 >= self._depth(row) else 0) for row in rows]

    def coda(self, rows: Sequence[Row]) -> int:
        """Coda, head and encoding."""
        self._count("coda", self._coda, len(rows))
        return self._result((Drawn(0),) * len(rows))

    def poll(self, ticket: int, *, wait: bool) -> tuple[Prefilled, ...] | tuple[Drawn, ...] | None:
        """All results are there at once."""
        return self._results.pop(ticket)

    def _depth(self, row: Row) -> int:
        job = self._jobs[row.seat]
        if job.depth.replay is None:
            return max(self.facts.max_steps)
        return job.depth.replay[job.choice][row.position - len(job.tokens)]

    def _count(self, stage: str, cost: LaunchCost, rows: int) -> None:
        self.now += cost.seconds(rows)
        self.rows[stage] += rows
        self.launches[stage] += 1

    def _result(self, result: tuple[Prefilled, ...] | tuple[Drawn, ...]) -> int:
        ticket = self.launches["coda"] + self.opened + len(self._results)
        while ticket in self._results:
            ticket += 1
        self._results[ticket] = result
        return ticket


class Window(NamedTuple):
    """What the steady window held."""

    tokens: int
    """Decoded tokens."""
    mean_depth: float
    seconds: float
    coda_rows: float
    """Mean rows of a readout."""
    core_rows: float
    """Mean rows of a core launch."""


@dataclass(frozen=True, kw_only=True)
class DepthLaw:
    """Depths of decoded tokens: `chances[t - 1]` of depth t."""

    chances: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.chances or min(self.chances) < 0 or abs(sum(self.chances) - 1) > 1e-6:
            raise ValueError(
                f"DepthLaw.chances must be at least 0 and sum to 1. Got {self.chances}. Divide them by their sum."
            )

    @property
    def mean(self) -> float:
        """Mean depth."""
        return sum(t * chance for t, chance in enumerate(self.chances, 1))

    def draw(self, count: int, generator: random.Random) -> tuple[int, ...]:
        """Depths of so many tokens."""
        reached = list(itertools.accumulate(self.chances))
        last = len(self.chances) - 1
        return tuple(1 + min(last, bisect.bisect_right(reached, generator.random())) for _ in range(count))


def simulate(
    config: EngineConfig,
    law: DepthLaw,
    *,
    core: LaunchCost,
    coda: LaunchCost,
    tokens: int = 40,
    requests: int | None = None,
    seed: int = 0,
) -> Window:
    """Runs the scheduler on the cost model.

    Args:
        config: With W, R and m as numbers.
        tokens: Decoded tokens of a request.
        requests: How many; None: eight for every resident.
    """
    assert config.max_resident is not None
    count = 8 * config.max_resident if requests is None else requests
    pages = 2 + config.max_resident * (1 + (PROMPT + tokens + 1) // config.page_tokens)
    facts = Facts(
        blocks=1,
        max_steps=(len(law.chances),),
        whole=config.segments == "plan",
        pages=4 * pages,
        page_tokens=config.page_tokens,
        max_tokens=PROMPT + tokens + 1,
        depth_causal=True,
    )
    runner, said = CostRunner(facts, core=core, coda=coda), _Said()
    plain = replace(config, prefix_cache=False, admit="optimistic", preempt="replay", token_budget=2**20)
    scheduler = Scheduler(plain, facts, runner, on_event=said.hear, judge=lambda *_: None, clock=lambda: runner.now)
    generator = random.Random(seed)
    for number in range(count):
        # Requests of one length would end together, wave after wave.
        length = tokens if number >= config.max_resident else 1 + number % tokens
        scheduler.add(
            Request(
                id=str(number),
                tokens=(0,) * PROMPT,
                sampling=SamplingParams(max_tokens=1 + length),
            ),
            depth=DepthParams(replay=(law.draw(tokens, generator),)),
            seed=0,
            prefill_steps=1,
        )
    start: tuple[int, int, float, dict[str, int], dict[str, int]] | None = None
    warm = min(2 * config.max_resident, count // 3)
    while not scheduler.idle and (runner.opened < count or start is None):
        scheduler.tick()
        if start is None and said.ended >= warm:
            start = (said.tokens, said.steps, runner.now, dict(runner.rows), dict(runner.launches))
    assert start is not None
    decoded, steps, began, rows, launches = start
    made = said.tokens - decoded
    return Window(
        tokens=made,
        mean_depth=(said.steps - steps) / made,
        seconds=runner.now - began,
        coda_rows=_mean(runner, "coda", rows, launches),
        core_rows=_mean(runner, "core", rows, launches),
    )


def realised_of(window: Window, *, core: LaunchCost, coda: LaunchCost, width: int) -> float:
    """Share of S_max: seconds that full launches would have taken, over those that it took."""
    ideal = coda.seconds(width) / width + window.mean_depth * core.seconds(width) / width
    return ideal * window.tokens / window.seconds


class CodaRows(NamedTuple):
    """What a number of rows that a readout waits for comes to."""

    rows: int
    """m."""
    realised: float
    delay: float
    """Core launches that a token waits for its readout, about: m * mean depth / (2 W)."""


def fit_coda_rows(
    config: EngineConfig, law: DepthLaw, *, core: LaunchCost, coda: LaunchCost, among: Sequence[int] | None = None
) -> tuple[int, tuple[CodaRows, ...]]:
    """The best m, the smallest within 1 % of the fastest; and what all of them come to.

    Args:
        among: Values of m to try. None: 1, R/8, R/4, R/2 and R.
    """
    width, residents = config.launch_rows, config.max_resident
    if width is None or residents is None:
        raise ValueError(
            "fit_coda_rows: config.launch_rows and max_resident must be numbers. "
            f"Got {width} and {residents}. Resolve them first."
        )
    tried = []
    for rows in among or sorted({max(1, residents // part) for part in (8, 4, 2, 1)} | {1}):
        asked = replace(config, min_coda_rows=rows)
        window = simulate(asked, law, core=core, coda=coda, tokens=24, requests=5 * residents)
        share = realised_of(window, core=core, coda=coda, width=width)
        tried.append(CodaRows(rows, share, rows * law.mean / (2 * width)))
    best = max(one.realised for one in tried)
    return next(one.rows for one in tried if one.realised >= (1 - CLOSE) * best), tuple(tried)


class _Said:
    """Counts what a scheduler reports."""

    def __init__(self) -> None:
        self.tokens = self.steps = self.ended = 0
        self._begun: set[str] = set()

    def hear(self, request: str, report: Report) -> None:
        if isinstance(report, RequestFailed):
            raise RuntimeError(f"cost model: request {request} failed: {report.message}")
        if not isinstance(report, TokenSaid):
            self.ended += type(report).__name__ == "Finished"
        elif request not in self._begun:
            self._begun.add(request)  # the first token comes from the prompt
        else:
            self.tokens, self.steps = self.tokens + 1, self.steps + report.steps


def _mean(runner: CostRunner, stage: str, rows: dict[str, int], launches: dict[str, int]) -> float:
    made = runner.launches[stage] - launches[stage]
    return (runner.rows[stage] - rows[stage]) / made if made else 0.0
