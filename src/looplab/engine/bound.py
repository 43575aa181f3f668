"""What early exits can gain at most, what thin launches take back, and how many rows a readout should wait for.

    S_max   = (F0 + r Fr) / (F0 + d Fr)              F0 outside the loop, Fr one step, r all steps, d the mean depth
    S_exact = sum_i (F0(L_i) + r Fr(L_i)) / sum_i (F0(L_i) + d_i Fr(L_i))      attention at the true lengths
    S_adj   = (prefill + decode) / (prefill + decode / S_max)                  seconds of the run at full depth
    costly  = (F0 + r Fr) / (d (F0 + Fr))            rules that read the logits pay coda and head at every step

    T(n) = a (h + n)                                 seconds of a launch of n rows
    realised = (k + d) / (k g + d),  g = [(h + c) / c] / [(h + W) / W],  k = F0 / Fr     full cores, c rows a readout

Work that is saved is saved exactly, so what is lost is lost in readouts of few rows; h is the number of rows whose
arithmetic takes as long as reading the weights. `cost_model` runs the scheduler against this model.
No PyTorch. Reference: S_max is equation 1 of continuous depth batching, arXiv:2608.09444; the rest is ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from looplab.nn.cost import CostSpec, Group

Number = float | int
WORTH = 1.02
"""Least bound of a rule that reads the logits, for it to be loaded unasked."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a token costs, in any one unit: multiply-adds, FLOPs, parameters."""

    outside: float
    """F0: prelude, coda and head."""
    blocks: tuple[float, ...]
    """Fr: one iteration of every looped block, its injection included."""

    @property
    def ratio(self) -> float:
        """k = F0 / Fr, Fr being one iteration of every block."""
        return self.outside / sum(self.blocks)

    def at(self, depth: Sequence[Number], *, readouts: float = 1.0) -> float:
        """Cost of a token that runs `depth[b]` iterations of block b and is read out so many times."""
        loop = sum(work * steps for work, steps in zip(self.blocks, depth, strict=True))
        return readouts * self.outside + loop


def work_of(cost: CostSpec, past: int | None = None) -> Work:
    """Multiply-adds of one token, times 2.

    Args:
        past: Tokens before it, whose attention is counted; None: matrices alone, as published bounds count.
    """

    def one(group: Group) -> float:
        return float(2 * group.matmul if past is None else group.forward(tokens=1, past=past))

    outside = one(cost.prelude) + one(cost.coda) + one(cost.head)
    return Work(outside=float(outside), blocks=tuple(float(one(block)) for block in cost.blocks))


def speedup_bound(work: Work, steps: Sequence[Number], depth: Sequence[Number]) -> float:
    """S_max.

    Args:
        steps: Iterations of every block at full depth.
        depth: Mean iterations of every block.
    """
    _check_depth("speedup_bound", steps, depth)
    return work.at(steps) / work.at(depth)


def exact_bound(cost: CostSpec, steps: Sequence[int], tokens: Sequence[tuple[int, Sequence[int]]]) -> float:
    """S_exact over decoded tokens, each (tokens before it, its iterations of every block)."""
    if not tokens:
        raise ValueError("exact_bound: tokens must hold at least one. Got none. Decode something first.")
    full = early = 0.0
    for past, depth in tokens:
        _check_depth("exact_bound", steps, depth)
        work = work_of(cost, past)
        full, early = full + work.at(steps), early + work.at(depth)
    return full / early


def adjusted_bound(bound: float, *, prefill_seconds: float, decode_seconds: float) -> float:
    """S_adj: the same for a whole run, whose prompts are read at full depth. Times are those of the full-depth run."""
    if prefill_seconds < 0 or decode_seconds <= 0 or bound <= 0:
        raise ValueError(
            "adjusted_bound: bound and decode_seconds must be above 0, prefill_seconds at least 0. "
            f"Got {bound}, {decode_seconds} and {prefill_seconds}. Measure the full-depth run."
        )
    return (prefill_seconds + decode_seconds) / (prefill_seconds + decode_seconds / bound)


def rule_bound(work: Work, steps: Sequence[Number], depth: Sequence[Number], *, reads_logits: bool) -> float:
    """The bound under an exit rule: S_max, or less where the rule pays a readout at every step."""
    _check_depth("rule_bound", steps, depth)
    # A rule decides after every iteration, of whichever block; the last readout is the token's own.
    return work.at(steps) / work.at(depth, readouts=float(sum(depth)) if reads_logits else 1.0)


def check_rule(name: str, work: Work, steps: Sequence[Number], *, reads_logits: bool, allow_costly: bool) -> float:
    """The bound of a rule at half the depth, refused where a rule that reads the logits cannot pay.

    Raises:
        ValueError: The bound is below `WORTH` and `allow_costly` is not set.
    """
    half = [max(1.0, count / 2) for count in steps]
    bound = rule_bound(work, steps, half, reads_logits=reads_logits)
    if reads_logits and bound < WORTH and not allow_costly:
        raise ValueError(f"{name} needs coda and head every step: bound {bound:.2f}x; start with --allow-costly-exit")
    return bound


@dataclass(frozen=True, kw_only=True)
class LaunchCost:
    """T(n) = a (h + n)."""

    per_row: float
    """a, seconds."""
    rows: float
    """h, rows."""

    def __post_init__(self) -> None:
        if self.per_row < 0 or self.rows < 0:
            raise ValueError(
                f"LaunchCost.per_row and rows must be at least 0. Got {self.per_row} and {self.rows}. Probe again."
            )

    def seconds(self, rows: int) -> float:
        """Time of a launch."""
        return self.per_row * (self.rows + rows) if rows else 0.0


def fit_launch(small: tuple[int, float], large: tuple[int, float]) -> LaunchCost:
    """a and h from two probes, each (rows, seconds).

    A larger launch that took no longer is taken for one whose rows cost a thousandth of it.
    """
    (few, short), (many, long) = small, large
    if not (0 < few < many and short > 0 and long > 0):
        raise ValueError(
            "fit_launch: probes must have rows 0 < few < many, and seconds above 0. "
            f"Got {small} and {large}. Probe again."
        )
    per_row = max((long - short) / (many - few), long / (1000 * many))
    return LaunchCost(per_row=per_row, rows=max(0.0, long / per_row - many))


def realised(ratio: Number, depth: Number, *, width: int, coda_rows: Number, rows: Number) -> float:
    """Share of S_max that is left where core launches are full (residents >= width + rows of a readout).

    Args:
        ratio: k.
        depth: Mean depth.
        width: W.
        coda_rows: c, mean rows of a readout.
        rows: h.
    """
    if min(ratio, depth, width, coda_rows) <= 0 or rows < 0:
        raise ValueError(
            "realised: ratio, depth, width and coda_rows must be above 0, rows at least 0. "
            f"Got {ratio}, {depth}, {width}, {coda_rows} and {rows}. Count and probe first."
        )
    thin = ((rows + coda_rows) / coda_rows) / ((rows + width) / width)
    return (ratio + depth) / (ratio * thin + depth)


def _check_depth(caller: str, steps: Sequence[Number], depth: Sequence[Number]) -> None:
    if len(steps) != len(depth) or any(not 0 < d <= r for r, d in zip(steps, depth, strict=False)):
        raise ValueError(
            f"{caller}: depth must have one number per block, above 0 and at most {', '.join(map(str, steps))}. "
            f"Got {', '.join(map(str, depth))}. Count steps from 1."
        )
