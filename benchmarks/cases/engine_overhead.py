"""What the scheduler itself costs: `overhead`.

Microseconds of processor time per launch over a runner that computes nothing, by rows of a launch. Depths are uniform
over four steps, and half again as many requests are resident as a launch has rows.
"""

import random
import time
from collections.abc import Sequence
from typing import Any

from looplab.engine.config import EngineConfig
from looplab.engine.request import DepthParams, Request, SamplingParams
from looplab.engine.scheduler import Scheduler
from looplab.engine.stages import Decision, Drawn, Facts, Job, Prefilled, Row, Span

TARGET_BASE, TARGET_ROW = 36.0, 2.0


class IdleRunner:
    """Draws depths and ends in advance, and answers at once."""

    def __init__(self, steps: int, rng: random.Random):
        self.facts = Facts(
            blocks=1,
            max_steps=(steps,),
            whole=False,
            pages=8192,
            page_tokens=16,
            max_tokens=4096,
            depth_causal=True,
        )
        stay, leave = Decision(0), [Decision(step) for step in range(steps + 1)]
        self.decisions = [
            [leave[done] if done == steps or rng.random() < 1 / (steps + 1 - done) else stay for _ in range(997)]
            for done in range(steps + 1)
        ]
        self.at, self.tickets, self.inside = 0, 0, 0.0
        self.results: dict[int, Any] = {}

    def open(self, seat: int, job: Job) -> None:
        """Nothing is kept."""

    def close(self, seat: int) -> None:
        """Nothing is kept."""

    def copy_page(self, source: int, target: int) -> None:
        """Nothing is stored."""

    def prefill(self, spans: Sequence[Span]) -> int:
        """Draws zeros."""
        return self._answer([Prefilled((Drawn(0),) * len(span.seats)) for span in spans])

    def encode(self, rows: Sequence[Row], tokens: Sequence[int]) -> None:
        """Nothing is computed."""

    def core(self, block: int, rows: Sequence[Row]) -> Sequence[Decision]:
        """Depths by chance, uniform over the steps."""
        start = time.process_time()
        self.at += 1
        found = [self.decisions[row.steps + 1][(self.at + row.seat) % 997] for row in rows]
        self.inside += time.process_time() - start
        return found

    def coda(self, rows: Sequence[Row]) -> int:
        """Draws zeros."""
        return self._answer([Drawn(0)] * len(rows))

    def poll(self, ticket: int, *, wait: bool) -> Any:
        """Results are there at once."""
        return self.results.pop(ticket)

    def _answer(self, results: list[Any]) -> int:
        self.tickets += 1
        self.results[self.tickets] = tuple(results)
        return self.tickets


def cost(rows: int, *, steps: int, tokens: int, seed: int) -> dict[str, Any]:
    """Processor time of a scheduler per launch and per core row, at full launches."""
    runner = IdleRunner(steps, random.Random(seed))
    residents = rows + max(1, rows // 2)
    config = EngineConfig(launch_rows=rows, max_resident=residents, min_coda_rows=max(1, rows // 2))
    scheduler = Scheduler(
        config, runner.facts, runner, on_event=lambda request, report: None, judge=lambda request, choice, token: None
    )
    for index in range(3 * residents):
        request = Request(id=str(index), tokens=(1,) * 32, sampling=SamplingParams(max_tokens=tokens))
        depth = DepthParams(exit_rule="drawn", min_steps=1, max_steps=steps)
        scheduler.add(request, depth=depth, seed=index, prefill_steps=steps)
    start = time.process_time()
    while scheduler.tick():
        pass
    seconds = time.process_time() - start - runner.inside
    stats = scheduler.stats()
    launches = sum(stats.launches[stage] for stage in ("prefill", "core", "coda"))
    return {
        "rows": rows,
        "launches": launches,
        "core_rows_per_launch": stats.launch_rows["core"] / stats.launches["core"],
        "microseconds_per_launch": 1e6 * seconds / launches,
        "target": TARGET_BASE + TARGET_ROW * rows,
    }


def overhead(options: Any) -> list[dict[str, Any]]:
    """The scheduler alone, per launch: the least of five runs, as others use the processor's caches too."""
    found = []
    for rows in (1, 8, 16, 32, 64):
        runs = [cost(rows, steps=4, tokens=200, seed=seed) for seed in range(5)]
        found.append(min(runs, key=lambda run: run["microseconds_per_launch"]))
    return found


CASES = {"overhead": overhead}
