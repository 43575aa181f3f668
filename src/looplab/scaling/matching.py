"""Compute matching as Loopie does it (arXiv:2607.16051): a looped shape that costs what a reference costs.

    nominal FLOPs  C-hat = L R D^2 / (L0 R0 D0^2)         activations  M-hat = D L / (D0 L0)

L stored layers, R loops, D width. The seed has L / R stored layers; all R applications of a stored layer are
checkpointed as one unit, so activations follow stored layers. Candidates have widths in multiples of 128 and
`floor(L_seed D / D_seed)` layers, which gives the three published depths. Equal nominal FLOPs, equal step time and
equal memory are different matches: the published pick takes 1.42 x nominal FLOPs at equal step time.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

By = Literal["flops", "step-time", "memory"]
STEP = 128
SAME = ("hardware", "seq_len", "tokens_per_step", "optimizer", "checkpointing", "data")
"""What measurements must share before they are compared."""
NOTE = "A layer-loop led a model-loop only after about 1.2 T tokens (6B): a short run can show the opposite order."


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Median of at least 20 steps after warm-up."""

    width: int
    layers: int
    loops: int
    step_seconds: float
    quartiles: tuple[float, float]
    peak_bytes: int
    steps: int
    conditions: Mapping[str, str]
    """What stands in `SAME`."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One shape beside the reference."""

    name: str
    width: int
    layers: int
    """Stored."""
    loops: int
    flops: float
    """C-hat."""
    memory: float
    """M-hat."""
    step_seconds: float | None = None
    peak_bytes: int | None = None
    matched: bool = False
    tied: bool = False
    """Inside the interquartile range of the matched one."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """Candidates with the quantity that was matched; the other two stand beside it."""

    by: By
    rows: tuple[Candidate, ...]

    def __str__(self) -> str:
        head = (
            f"{'config':<11}{'width':>7}{'layers':>8}{'loops':>7}{'C-hat':>8}{'M-hat':>8}{'step s':>14}{'peak GB':>14}"
        )
        lines = [f"matched by {self.by}", head]
        for row in self.rows:
            step = "not measured" if row.step_seconds is None else f"{row.step_seconds:.3f}"
            peak = "not measured" if row.peak_bytes is None else f"{row.peak_bytes / 1e9:.1f}"
            mark = f"  <- matched by {self.by}" if row.matched else "  tied with the match" if row.tied else ""
            lines.append(
                f"{row.name:<11}{row.width:>7}{row.layers:>8}{row.loops:>7}{row.flops:>8.2f}{row.memory:>8.2f}"
                f"{step:>14}{peak:>14}{mark}"
            )
        return "\n".join([*lines, NOTE])


def match(
    reference: tuple[int, int],
    *,
    loops: int,
    widths: Sequence[int],
    by: By = "flops",
    measurements: Sequence[Measurement] = (),
) -> Match:
    """The table of candidates, the one nearest to the reference marked.

    Args:
        reference: (width, layers) of the model without loops.
        widths: Of the candidates, multiples of 128.
        measurements: Needed for step-time and memory.

    Raises:
        ValueError: Layers that loops do not divide, a width that is no multiple of 128, missing measurements, or
            measurements under different conditions.
    """
    width, layers = reference
    if loops < 1 or layers % loops:
        raise ValueError(f"loops must divide the {layers} layers of the reference. Got {loops}. Choose a divisor.")
    for candidate in widths:
        if candidate < STEP or candidate % STEP:
            near = max(STEP, round(candidate / STEP) * STEP)
            raise ValueError(f"widths must be multiples of {STEP}. Got {candidate}. Take {near}.")
    seed = layers // loops
    shapes = [("reference", width, layers, 1), ("seed", width, seed, loops)]
    shapes += [(f"cand. {i}", d, seed * d // width, loops) for i, d in enumerate(widths, 1)]
    known = {(m.width, m.layers, m.loops): m for m in _alike(measurements)}
    rows = []
    for name, d, own, r in shapes:
        found = known.get((d, own, r))
        rows.append(
            Candidate(
                name=name,
                width=d,
                layers=own,
                loops=r,
                flops=own * r * d * d / (layers * width * width),
                memory=d * own / (width * layers),
                step_seconds=found.step_seconds if found else None,
                peak_bytes=found.peak_bytes if found else None,
            )
        )
    return Match(by=by, rows=_marked(rows, by, known))


def _alike(measurements: Sequence[Measurement]) -> Sequence[Measurement]:
    for other in measurements:
        if other.steps < 20:
            raise ValueError(
                f"measurements must be medians of 20 steps or more. Got {other.steps} of {other.width}x{other.layers}. "
                "Measure longer."
            )
        for name in SAME:
            one, two = measurements[0].conditions.get(name, ""), other.conditions.get(name, "")
            if one != two:
                raise ValueError(
                    f"measurements must have one {name}. Got {one or 'none'} for {measurements[0].width}x"
                    f"{measurements[0].layers} and {two or 'none'} for {other.width}x{other.layers}: not matched. "
                    "Measure all on the same."
                )
    return measurements


def _marked(rows: list[Candidate], by: By, known: Mapping[tuple[int, int, int], Measurement]) -> tuple[Candidate, ...]:

    def quantity(row: Candidate) -> float | int | None:
        return {"flops": row.flops, "step-time": row.step_seconds, "memory": row.peak_bytes}[by]

    missing = [f"{row.width}x{row.layers}" for row in rows if row.name != "seed" and quantity(row) is None]
    if missing:
        raise ValueError(
            f"matching by {by} needs measurements. Got none for {', '.join(missing)}. Measure, or use flops."
        )
    target = quantity(rows[0]) or 0.0
    looped = [row for row in rows[1:] if quantity(row) is not None]
    best = min(looped, key=lambda row: abs((quantity(row) or 0.0) - target))
    low, high = best.step_seconds or 0.0, best.step_seconds or 0.0
    if by == "step-time":
        low, high = known[best.width, best.layers, best.loops].quartiles
    return tuple(
        dataclasses.replace(
            row,
            matched=row is best,
            tied=by == "step-time" and row in looped and row is not best and low <= (row.step_seconds or 0.0) <= high,
        )
        for row in rows
    )
