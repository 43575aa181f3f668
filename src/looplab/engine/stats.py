"""Counters of an engine, and the identities that they obey. No torch.

core applications = depths the rule chose + wasted (delayed, late, cancelled, replay, draft) + those of tokens under way
coda rows         = decoded tokens + discarded + replayed + drafted + those under way
output tokens     = decoded tokens + first tokens, which come from the prompt pass
prefill applications = sum over prompt passes of (tokens - cached tokens) * prefill steps
pages             = free + active + cached + quarantined + 1
"""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

WASTES = ("delayed", "late", "cancelled", "replay", "draft")
"""late: of a successor that was started before its predecessor was seen to be the last. cancelled: of tokens under way
when their request ended by cancel, deadline or failure. replay: of tokens that were known, or lost, at a preemption.
draft: of tokens after a wrong guess, or after an end of text among the guesses; and the steps of all guesses where full
depth cannot go on from them but begins anew (several blocks, whole plans, ids of a grid)."""

COUNTERS = (
    "accepted prompt_tokens cached_tokens output_tokens first_tokens decode_tokens discarded_tokens replayed_tokens "
    "applications chosen prefill_applications prefill_tokens refills preemptions numeric_errors "
    "drafted_tokens accepted_tokens draft_rounds"
).split()
"""Fields of EngineStats that only grow, one by one."""

STAGES = ("prefill", "encode", "core", "coda")
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """Numbers by upper bounds; `counts` has one more entry, of what lies above the last bound."""

    bounds: tuple[float, ...] = SECONDS
    counts: tuple[int, ...] = (0,) * (len(SECONDS) + 1)
    sum: float = 0.0

    @property
    def count(self) -> int:
        """How many numbers there were."""
        return sum(self.counts)


class Tally:
    """A histogram that is being filled."""

    def __init__(self, bounds: tuple[float, ...] = SECONDS):
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        """Counts one more number."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def read(self) -> Histogram:
        """As of now."""
        return Histogram(bounds=self.bounds, counts=tuple(self.counts), sum=self.sum)


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """An engine as of now. Counters run from its start."""

    # Queues, by length now.
    waiting: int = 0
    waiting_tokens: int = 0
    """Prompt tokens of the requests that wait."""
    residents: int = 0
    """Seats in use."""
    prefill: int = 0
    """Prompts that have been started."""
    ready: int = 0
    coda: int = 0
    replay: int = 0
    """Choices that were put back and wait for their return."""
    stalled: int = 0
    in_flight: int = 0
    """Launches whose results have not been seen."""

    # Requests and tokens.
    accepted: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    """Choices by reason: stop, length."""
    failed: dict[str, int] = field(default_factory=dict)
    """Requests by code."""
    prompt_tokens: int = 0
    """Of prompts that have been admitted."""
    cached_tokens: int = 0
    """Of these, tokens that the prefix cache held."""
    output_tokens: int = 0
    first_tokens: int = 0
    decode_tokens: int = 0
    discarded_tokens: int = 0
    """Drawn, but their request had ended."""
    replayed_tokens: int = 0
    drafted_tokens: int = 0
    """Guessed at few steps."""
    accepted_tokens: int = 0
    """Guesses that full depth said too; they are decoded tokens."""
    draft_rounds: int = 0
    pending_tokens: int = 0
    """Coda rows under way."""

    # Applications.
    applications: int = 0
    """Core applications of decoding, all of them."""
    chosen: int = 0
    """The part that the exit rules chose, of tokens that were accepted."""
    wasted: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WASTES, 0))
    pending_applications: int = 0
    prefill_applications: int = 0
    prefill_tokens: int = 0
    """Prompt tokens computed, by all passes."""
    exit_steps: tuple[tuple[int, int], ...] = ()
    """(steps run, decoded tokens), by steps."""

    # Launches.
    launches: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STAGES, 0))
    launch_rows: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STAGES, 0))
    """prefill: tokens."""
    launch_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    """Inside the runner, waiting for results included."""
    refills: int = 0
    """Rows at their first iteration that joined a queue with rows in it."""
    preemptions: int = 0
    numeric_errors: int = 0

    # Pages.
    pages: int = 0
    """All of them, the sink included."""
    free_pages: int = 0
    active_pages: int = 0
    cached_pages: int = 0
    quarantined_pages: int = 0
    evicted_pages: int = 0

    # Seconds.
    ttft_seconds: Histogram = field(default_factory=Histogram)
    tpot_seconds: Histogram = field(default_factory=Histogram)
    """Per choice: from its first token to its last, per token."""
    request_seconds: Histogram = field(default_factory=Histogram)
    queue_seconds: Histogram = field(default_factory=Histogram)

    # What the engine adds.
    kv_bytes: int = 0
    padding: int = 0
    """Rows, and tokens of prompts, that were computed only to fill up launches; no application counts them."""
    bound_ratio: float | None = None
    realised_fraction: float | None = None
    graph_fallbacks: int = 0


class Book:
    """Counters that are being filled."""

    def __init__(self) -> None:
        self.total = dict.fromkeys(COUNTERS, 0)
        self.wasted = dict.fromkeys(WASTES, 0)
        self.launches = dict.fromkeys(STAGES, 0)
        self.launch_rows = dict.fromkeys(STAGES, 0)
        self.launch_seconds = dict.fromkeys(STAGES, 0.0)
        self.finished: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.exit_steps: Counter[int] = Counter()
        self.seconds = {name: Tally() for name in ("ttft", "tpot", "request", "queue")}

    def launch(self, stage: str, rows: int, seconds: float) -> None:
        """A launch of so many rows."""
        self.launches[stage] += 1
        self.launch_rows[stage] += rows
        self.launch_seconds[stage] += seconds

    def read(self, **lengths: int) -> EngineStats:
        """All counters, beside the lengths of queues."""
        return EngineStats(
            **self.total,
            **lengths,
            wasted=dict(self.wasted),
            launches=dict(self.launches),
            launch_rows=dict(self.launch_rows),
            launch_seconds=dict(self.launch_seconds),
            finished=dict(self.finished),
            failed=dict(self.failed),
            exit_steps=tuple(sorted(self.exit_steps.items())),
            ttft_seconds=self.seconds["ttft"].read(),
            tpot_seconds=self.seconds["tpot"].read(),
            request_seconds=self.seconds["request"].read(),
            queue_seconds=self.seconds["queue"].read(),
        )


def check_ledger(stats: EngineStats) -> None:
    """Raises ValueError with both sides of every identity that does not hold."""
    sides = {
        "core applications": (
            stats.applications,
            stats.chosen + sum(stats.wasted.values()) + stats.pending_applications,
        ),
        "coda rows": (
            stats.launch_rows["coda"],
            stats.decode_tokens
            + stats.discarded_tokens
            + stats.replayed_tokens
            + stats.drafted_tokens
            + stats.pending_tokens,
        ),
        "output tokens": (stats.output_tokens, stats.decode_tokens + stats.first_tokens),
        "prefilled tokens": (stats.prefill_tokens, stats.launch_rows["prefill"]),
        "tokens by depth": (sum(tokens for _, tokens in stats.exit_steps), stats.decode_tokens),
        "steps of decoded tokens": (
            sum(steps * tokens for steps, tokens in stats.exit_steps),
            stats.chosen + stats.wasted["delayed"],
        ),
        "pages": (
            stats.pages,
            stats.free_pages + stats.active_pages + stats.cached_pages + stats.quarantined_pages + 1,
        ),
    }
    wrong = [f"{name}: {left} != {right}" for name, (left, right) in sides.items() if left != right]
    if wrong:
        raise ValueError("ledger: " + "; ".join(wrong))
