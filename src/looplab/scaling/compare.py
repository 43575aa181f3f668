"""Which law do the runs prefer: AICc, held-out error, lack of fit against the saturated table, and residuals by cell.

AICc is that of the density which the fit maximises. Held out are each budget, the largest budget, and each cell. Where
residuals of a cell go together (intraclass correlation above 0.1), runs are not independent, and the leave-one-cell-out
score replaces AICc in the verdict.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from looplab.intervals import mean_interval
from looplab.records import Finding
from looplab.scaling.fit import Fit, FitRefused, fit
from looplab.scaling.laws.base import Law
from looplab.scaling.laws.forward_backward import ForwardBackward
from looplab.scaling.laws.gains.table import Table
from looplab.scaling.laws.points import Array, Points
from looplab.scaling.runs import Runs
from looplab.scaling.solver import Problem, minimise

CLEAR, TIED = 10.0, 4.0
"""Differences of AICc: at least the first is a preference, below the second is a tie."""
CORRELATED = 0.1
SCREEN = 16
"""Starts that descend, the best once projected: a comparison needs the minimum, not the share of starts."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One law beside the others. Errors are root mean squares in nats."""

    name: str
    parameters: int
    aicc: float
    delta: float
    """AICc above the least among laws that are no table."""
    residual: float
    held_budget: float | None
    held_top: float | None
    held_cell: float | None
    correlation: float
    """Intraclass correlation of residuals within cells."""
    behind: tuple[float, float] | None
    """95 % interval over cells of its squared leave-one-cell-out error above the best law's, nats^2."""
    word: str


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All laws, best first; those that the runs do not identify with the reason."""

    rows: tuple[Compared, ...]
    refused: dict[str, str]
    verdict: str
    sigma: float | None

    def __str__(self) -> str:
        head = f"{'law':<12}{'k':>4}{'AICc':>12}{'delta':>9}{'RMSE':>9}{'budget':>9}{'top':>9}{'cell':>9}{'ICC':>7}  "
        lines = [head + "verdict"]
        for row in self.rows:
            held = "".join(f"{'-' if v is None else f'{v:.5f}':>9}" for v in _errors(row))
            lines.append(
                f"{row.name:<12}{row.parameters:>4}{row.aicc:>12.1f}{row.delta:>9.1f}{held}"
                f"{row.correlation:>7.2f}  {row.word}"
            )
        lines += [f"{name:<12} refused: {reason}" for name, reason in self.refused.items()]
        noise = "noise between seeds unknown" if self.sigma is None else f"noise between seeds {self.sigma:.4f} nats"
        return "\n".join([*lines, f"{self.verdict} ({noise})"])


def _errors(row: Compared) -> tuple[float | None, ...]:
    return row.residual, row.held_budget, row.held_top, row.held_cell


def compare(
    runs: Runs,
    laws: Sequence[Law],
    *,
    starts: int = 500,
    seed: int = 0,
    watch: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Fits every law and puts them in order. A law that the runs do not identify is listed, not fitted.

    Raises:
        FitRefused: The table is refused, or no law can be fitted.
    """
    if runs.refused:
        raise FitRefused(runs.refused)
    points, cells = runs.points(), runs.cell_index
    fits: dict[str, Fit] = {}
    refused: dict[str, str] = {}
    reasons: list[Finding] = []
    errors: dict[str, dict[str, Array]] = {}
    for law in laws:
        try:
            found = fit(runs, law, starts=starts, replicates=0, screen=SCREEN, seed=seed)
        except FitRefused as refusal:
            refused[law.title] = str(refusal)
            reasons += refusal.findings
            continue
        fits[law.title] = found
        errors[law.title] = _held_out(found, runs, points, cells)
        watch(f"compare {law.title}  AICc {found.aicc:.1f}")
    if not fits:
        raise FitRefused(reasons)
    forms = [name for name, found in fits.items() if not _is_table(found.law)] or list(fits)
    residuals = {name: np.exp(f.law.log_loss(f.theta, points)) - points.loss for name, f in fits.items()}
    correlation = {name: intraclass(r, cells) for name, r in residuals.items()}
    by_aicc = min(forms, key=lambda name: fits[name].aicc)
    dependent = correlation[by_aicc] > CORRELATED
    best = min(forms, key=lambda name: _rms(errors[name]["cell"]) or math.inf) if dependent else by_aicc
    rows = []
    for name, found in fits.items():
        behind = None if name == best else _behind(errors[name]["cell"], errors[best]["cell"], cells)
        delta = found.aicc - fits[best].aicc
        word = "best" if name == best else _word(delta, behind, dependent)
        rows.append(
            Compared(
                name=name,
                parameters=len(found.names),
                aicc=found.aicc,
                delta=delta,
                residual=found.residual,
                held_budget=_rms(errors[name]["budget"]),
                held_top=_rms(errors[name]["top"]),
                held_cell=_rms(errors[name]["cell"]),
                correlation=correlation[name],
                behind=behind,
                word=word,
            )
        )
    rows.sort(key=lambda row: (row.name != best, row.aicc))
    return Comparison(
        rows=tuple(rows), refused=refused, verdict=_verdict(rows, best, fits, dependent), sigma=runs.sigma
    )


def _is_table(law: Law) -> bool:
    return isinstance(law, ForwardBackward) and isinstance(law.gain, Table)


def _held_out(found: Fit, runs: Runs, points: Points, cells: NDArray[np.int64]) -> dict[str, Array]:
    """Errors in nats of every run when its budget, or its cell, was left out, and those of the top budget."""
    problem = Problem(found.law, points, np.array(found.box))
    budgets = np.array([row["budget"] for row in runs.rows])
    cost = np.array([row.get("train_flops", math.nan) for row in runs.rows], dtype=np.float64)
    names = sorted(set(budgets.tolist()))
    groups = {
        "budget": np.array([budgets == name for name in names]) if len(names) > 1 else np.zeros((0, len(points)), bool),
        "cell": cells == np.arange(cells.max() + 1)[:, None],
    }
    errors = {}
    for group, left in groups.items():
        out = np.full(len(points), np.nan)
        if len(left):
            ends = minimise(problem, np.repeat(found.theta[None], len(left), axis=0), 1.0 - left, exact=True)
            losses = np.exp(np.concatenate([found.law.log_loss(theta[None], points) for theta in ends.theta]))
            for row, mask in enumerate(left):
                out[mask] = losses[row, mask] - points.loss[mask]
        errors[group] = out
    top = budgets == budgets[np.nanargmax(cost)] if np.isfinite(cost).any() else np.zeros(len(points), bool)
    return {**errors, "top": errors["budget"][top]}


def _rms(errors: Array) -> float | None:
    known = errors[np.isfinite(errors)]
    return float(np.sqrt(np.mean(known**2))) if len(known) else None


def _behind(own: Array, best: Array, cells: NDArray[np.int64]) -> tuple[float, float] | None:
    """Interval over cells of the difference of squared errors."""
    size = np.bincount(cells)
    if len(size) < 2:
        return None
    difference = np.bincount(cells, weights=own**2 - best**2) / size
    interval = mean_interval(difference)
    return interval.low, interval.high


def _word(delta: float, behind: tuple[float, float] | None, dependent: bool) -> str:
    unclear = behind is None or behind[0] <= 0
    if dependent:
        return "indistinguishable" if unclear else "worse"
    if delta < TIED or (delta < CLEAR and unclear):
        return "indistinguishable"
    return "worse"


def _verdict(rows: Sequence[Compared], best: str, fits: dict[str, Fit], dependent: bool) -> str:
    why = "by leave-one-cell-out, since runs of a cell go together" if dependent else "by AICc"
    tables = [row for row in rows if _is_table(fits[row.name].law)]
    if any(row.delta <= -CLEAR for row in tables) and not dependent:
        return f"all misfit: the table of pairs is better than {best} by {-tables[0].delta:.1f} in AICc"
    tied = [row.name for row in rows if row.word == "indistinguishable" and row not in tables]
    if tied:
        return f"indistinguishable {why}: {', '.join([best, *tied])}"
    return f"preferred {why}: {best}"


def intraclass(residuals: Array, cells: NDArray[np.int64]) -> float:
    """One-way intraclass correlation, 0 where no cell has two runs; not below 0."""
    size = np.bincount(cells)
    many = len(residuals) - len(size)
    if many < 1 or len(size) < 2:
        return 0.0
    means = np.bincount(cells, weights=residuals) / size
    within = float(((residuals - means[cells]) ** 2).sum()) / many
    between = float((size * (means - residuals.mean()) ** 2).sum()) / (len(size) - 1)
    usual = (len(residuals) - float((size**2).sum()) / len(residuals)) / (len(size) - 1)
    spread = between + (usual - 1) * within
    return max(0.0, (between - within) / spread) if spread > 0 else 0.0
