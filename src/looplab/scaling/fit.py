"""`fit(runs, law)`: estimates with intervals, how sure the search is of its minimum, and what the runs cannot tell."""

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy
from scipy.optimize import minimize_scalar

import looplab
from looplab._config import from_dict, to_dict
from looplab.records import SCHEMA_VERSION, Finding, Level, encode_json
from looplab.scaling.bootstrap import bootstrap, percentiles, sandwich
from looplab.scaling.identify import in_practice, predicted_sd, structure
from looplab.scaling.laws.base import Law
from looplab.scaling.laws.points import Array
from looplab.scaling.runs import Runs
from looplab.scaling.solver import CHUNK, DELTA, Minima, Problem, draw_starts, minimise, project

FINALISTS = 4
NEAR = 1e-3
"""Starts whose Q is within this share of the least count as having reached it."""
LEAST_SHARE = 0.2
CELLS, RUNS_PER_PARAMETER = 8, 3
"""Least cells, and runs per parameter, for intervals."""
FEW_CONVERGED = 0.99
MOST_REDRAWN = 0.05
BOOTSTRAP, SANDWICH = "cell bootstrap", "clustered sandwich"


class FitRefused(ValueError):
    """The runs cannot be fitted by this law; the message holds every reason."""

    def __init__(self, findings: list[Finding]):
        super().__init__("\n".join(f"{f.message} {f.remedy}".strip() for f in findings))
        self.findings = tuple(findings)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A fitted law, without times: equal inputs give equal bytes."""

    law: Law
    names: tuple[str, ...]
    estimates: tuple[float, ...]
    """In the order of `names`; amplitudes are logarithms."""
    box: tuple[tuple[float, float], ...]
    objective: float
    """Q: the summed Huber loss of ln L."""
    scale: float
    """s of the density exp(-H/s^2), by maximum likelihood."""
    aicc: float
    residual: float
    """Root mean square of the residuals in nats."""
    sigma: float | None
    """Deviation between seeds, nats; None: unknown."""
    runs: int
    cells: int
    starts: int
    start_share: float
    """Share of starts that reached the least Q within 0.1 %."""
    gap: float
    """max |g_i| / sqrt(H_ii Q) over free parameters."""
    condition: float
    predicted: tuple[float, ...]
    """Standard errors that independent noise of `sigma` (else `residual`) gives."""
    intervals: dict[str, tuple[tuple[float, float], ...]]
    """Method -> 95 % interval of every parameter; the first is the headline."""
    replicates: tuple[tuple[float, ...], ...]
    converged: int
    redrawn: int
    improved: float
    findings: tuple[Finding, ...]
    dropped: dict[str, int]
    cell_table: tuple[tuple[str, str, str, int], ...]
    """Budget, family, pair, runs."""
    data: str
    """Hash of the rows."""
    largest_flops: float | None
    split: str
    seed: int
    settings: dict[str, float | int]
    versions: dict[str, str]
    schema: int = SCHEMA_VERSION

    @property
    def theta(self) -> Array:
        """[p]"""
        return np.array(self.estimates)

    def value(self, name: str) -> float:
        """One estimate; amplitudes also under their capital letter, as they are.

        Raises:
            KeyError: An unknown name.
        """
        if name in self.names:
            return self.estimates[self.names.index(name)]
        place = self.names.index(name.lower()) if name.lower() in self.names else -1
        if place not in self.law.linear:
            raise KeyError(f"{self.law.title} has no parameter {name!r}. Known: {', '.join(self.names)}.")
        return math.exp(self.estimates[place])

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        data = {field.name: encode_json(getattr(self, field.name)) for field in dataclasses.fields(self)}
        return {**data, "law": to_dict(self.law)}

    @classmethod
    def from_json(cls, text: str) -> "Fit":
        """The fit that `dump_json(fit.to_dict())` wrote.

        Raises:
            ValueError: A schema that this version does not know.
        """
        data = json.loads(text)
        if data.get("schema") != SCHEMA_VERSION:
            raise ValueError(f"fit: fit.json must have schema {SCHEMA_VERSION}. Got {data.get('schema')!r}.")
        findings = tuple(Finding.from_dict(finding) for finding in data.pop("findings"))
        data["law"] = from_dict(Law, data["law"])  # type: ignore[type-abstract]
        tuples = {"box", "replicates", "cell_table"}
        for name in ("names", "estimates", "predicted", *tuples):
            data[name] = tuple(map(tuple, data[name])) if name in tuples else tuple(data[name])
        data["intervals"] = {method: tuple(map(tuple, rows)) for method, rows in data["intervals"].items()}
        return cls(**data, findings=findings)

    def rows(self) -> list[tuple[str, float, list[tuple[float, float]]]]:
        """(name, value, intervals by method) as they are printed: amplitudes as A, B, E, no longer logarithms."""
        found = []
        for place, name in enumerate(self.names):
            log = place in self.law.linear
            turn: Callable[[float], float] = math.exp if log else float
            ends = [(turn(rows[place][0]), turn(rows[place][1])) for rows in self.intervals.values()]
            found.append((name.upper() if log else name, turn(self.estimates[place]), ends))
        return found

    def __str__(self) -> str:
        methods = list(self.intervals)
        lines = [
            f"{self.law.title} ({self.law.reference}) on {self.runs} runs in {self.cells} cells",
            f"best Q {1e6 * self.objective:.5f}e-6, reached by {self.start_share:.2f} of {self.starts} starts; "
            f"RMSE {self.residual:.4f} nats; AICc {self.aicc:.1f}",
            f"{'':<10}{'estimate':>12}" + "".join(f"{method:>26}" for method in methods),
        ]
        for name, value, ends in self.rows():
            cells = "".join(f"{f'[{low:.4g}, {high:.4g}]':>26}" for low, high in ends)
            lines.append(f"{name:<10}{value:>12.5g}{cells}")
        if self.replicates:
            lines.append(f"{self.converged} of {len(self.replicates)} replicates converged, {self.redrawn} redrawn")
        return "\n".join([*lines, *map(str, self.findings)])


def fit(
    runs: Runs,
    law: Law,
    *,
    starts: int = 500,
    replicates: int = 200,
    restarts: int = 8,
    screen: int = 0,
    seed: int = 0,
    fixed: Mapping[str, float | int] | None = None,
    chunk: int = CHUNK,
    watch: Callable[[str], None] = lambda line: None,
) -> Fit:
    """Fits `law` to `runs`.

    Args:
        starts: Points of the box that are projected and descended.
        replicates: Of the bootstrap over cells; 0: none.
        restarts: Projected starts of every tenth replicate, as an alarm.
        screen: Descend only that many starts, those of least Q once projected; 0: all.
        seed: Decides starts and draws, whatever `chunk` is.
        fixed: Parameters that are held at a value.
        watch: Called with one line per stage.

    Raises:
        FitRefused: The table is refused, has too few runs, or does not identify the law.
        KeyError: An unknown name in `fixed`.
    """
    if runs.refused:
        raise FitRefused(runs.refused)
    points = runs.points()
    law = law.on(points)
    held = dict(fixed or {})
    for name in held:
        if name not in law.names:
            raise KeyError(f"fixed: {law.title} has no parameter {name!r}. Known: {', '.join(law.names)}.")
    cells, size = runs.cell_index, len(law.names) - len(held)
    findings = [*runs.findings, *(f for f in structure(law, points, runs.cells) if not _about(f, held))]
    if len(runs) < size + 2:
        message = f"{len(runs)} runs for {size} parameters: no fit (needs {size + 2} runs)."
        findings.append(Finding(kind="scaling.few_runs", level=Level.FAILURE, message=message))
    refusals = [finding for finding in findings if finding.level is Level.FAILURE]
    if refusals:
        raise FitRefused(refusals)
    box = law.box(points)
    for name, value in held.items():
        box[law.names.index(name)] = value
    problem = Problem(law, points, box)
    for_starts, for_draws = (np.random.Generator(np.random.PCG64(s)) for s in np.random.SeedSequence(seed).spawn(2))
    found, best = _search(problem, starts, screen, for_starts, chunk)
    share = float((found.loss <= best.loss[0] * (1 + NEAR) + 1e-300).mean())
    watch(f"starts {starts}/{starts}  best {1e6 * best.loss[0]:.5f}e-6  at best {share:.2f}")
    theta = best.theta[0]
    residuals = np.exp(law.log_loss(theta, points)) - points.loss
    rmse = float(np.sqrt(np.mean(residuals**2)))
    scale, nll = huber_likelihood(float(best.loss[0]), len(runs))
    noise = runs.sigma or max(rmse, 1e-12)
    errors, condition, _ = predicted_sd(law, theta, points, noise, tuple(held))
    findings += _search_findings(problem, found, best, share, starts)
    findings += in_practice(law, theta, points, noise, tuple(held))
    intervals: dict[str, Array] = {}
    copies, converged, redrawn, improved = np.zeros((0, len(theta))), 0, 0, 0.0
    enough = len(runs) >= RUNS_PER_PARAMETER * size and cells.max() + 1 >= CELLS
    if not enough:
        message = (
            f"{len(runs)} runs in {cells.max() + 1} cells for {size} parameters: point estimates only, no intervals "
            f"(needs {RUNS_PER_PARAMETER * size} runs and {CELLS} cells)."
        )
        findings.append(Finding(kind="scaling.few_runs", level=Level.WARNING, message=message))
    elif replicates:
        drawn = bootstrap(problem, theta, cells, replicates=replicates, draws=for_draws, restarts=restarts, chunk=chunk)
        copies, converged, redrawn = drawn.theta, int(drawn.converged.sum()), drawn.redrawn
        improved = drawn.improved
        watch(f"bootstrap {converged}/{replicates} converged, {redrawn} redrawn")
        findings += _bootstrap_findings(converged, replicates, redrawn, improved)
        if converged >= FEW_CONVERGED * replicates:
            intervals[BOOTSTRAP] = percentiles(copies[drawn.converged])
    if enough:
        covariance = sandwich(problem, theta, cells)
        if covariance is not None:
            half = 1.959963984540054 * np.sqrt(np.diag(covariance))
            intervals[SANDWICH] = np.stack([theta - half, theta + half], axis=1)
    flops = [row["train_flops"] for row in runs.rows if "train_flops" in row]
    table: dict[tuple[str, str, str], int] = {}
    for cell in runs.cells:
        table[cell] = table.get(cell, 0) + 1
    return Fit(
        law=law,
        names=law.names,
        estimates=tuple(theta.tolist()),
        box=tuple((float(low), float(high)) for low, high in box),
        objective=float(best.loss[0]),
        scale=scale,
        aicc=corrected(nll, size + 1, len(runs)),
        residual=rmse,
        sigma=runs.sigma,
        runs=len(runs),
        cells=int(cells.max()) + 1,
        starts=starts,
        start_share=share,
        gap=float(best.gap[0]),
        condition=condition,
        predicted=tuple(errors.tolist()),
        intervals={m: tuple((float(low), float(high)) for low, high in rows) for m, rows in intervals.items()},
        replicates=tuple(map(tuple, copies.tolist())),
        converged=converged,
        redrawn=redrawn,
        improved=improved,
        findings=tuple(findings),
        dropped=runs.dropped,
        cell_table=tuple((*cell, count) for cell, count in sorted(table.items())),
        data=runs.data_hash,
        largest_flops=float(max(flops)) if flops else None,
        split=str(runs.rows[0].get("loss_split", "")),
        seed=seed,
        settings={
            "replicates": replicates,
            "restarts": restarts,
            "screen": screen,
            "delta": DELTA,
            **{f"fixed {name}": value for name, value in held.items()},
        },
        versions={
            "looplab": looplab.__version__,
            "numpy": np.__version__,
            "scipy": scipy.__version__,
            "python": ".".join(map(str, sys.version_info[:3])),
        },
    )


def _about(finding: Finding, held: Mapping[str, float]) -> bool:
    """Whether a refusal only concerns parameters that are held."""
    names = {"scaling.one_depth": ("phi", "phi_b"), "scaling.no_truncation": ("phi_f", "psi", "kappa", "c")}
    return (finding.kind == "scaling.rank" and bool(held)) or any(n in held for n in names.get(finding.kind, ()))


def _search(
    problem: Problem, starts: int, screen: int, draws: np.random.Generator, chunk: int
) -> tuple[Minima, Minima]:
    """Ends of the descents, and the finalists after Newton, the best first."""
    if starts < 1:
        raise ValueError(f"fit: starts must be 1 or more. Got {starts}.")
    one = np.ones(len(problem.points))
    first = project(problem, draw_starts(problem, starts, draws), one, chunk)
    if screen:
        first = first[np.argsort(_losses(problem, first, chunk), kind="stable")[:screen]]
    found = minimise(problem, first, one, exact=False, tolerance=1e-6, chunk=chunk)
    order = np.argsort(found.loss, kind="stable")[:FINALISTS]
    best = minimise(problem, found.theta[order], one, exact=True, chunk=chunk)
    order = np.argsort(np.where(best.converged, best.loss, best.loss * (1 + 1e-12)), kind="stable")
    return found, Minima(best.theta[order], best.loss[order], best.gap[order], best.iterations[order])


def _losses(problem: Problem, theta: Array, chunk: int) -> Array:
    one = np.ones((1, len(problem.points)))
    parts = [problem.state(theta[at : at + chunk], one, False).loss for at in range(0, len(theta), chunk)]
    return np.concatenate(parts)


def _search_findings(problem: Problem, found: Minima, best: Minima, share: float, starts: int) -> list[Finding]:
    findings = []
    if share < LEAST_SHARE:
        message = f"best optimum reached by {round(share * len(found.loss))} of {starts} starts."
        findings.append(
            Finding(
                kind="scaling.starts",
                level=Level.WARNING,
                message=message,
                value=share,
                threshold=LEAST_SHARE,
                remedy="Take more starts, or a law that the runs identify.",
            )
        )
    if not best.converged[0]:
        message = f"the search did not converge: its gradient is {best.gap[0]:.1e} of its scale."
        findings.append(Finding(kind="scaling.not_converged", level=Level.WARNING, message=message))
    theta = best.theta[0]
    names = problem.law.names
    for name, value, (low, high) in zip(names, theta, problem.box, strict=True):
        if low < high and (value <= low or value >= high):
            message = f"{name} = {value:g} is at its bound: a fit artefact, not a finding."
            findings.append(Finding(kind="scaling.bound", level=Level.WARNING, message=message, value=float(value)))
    spread = problem.box[:, 1] - problem.box[:, 0]
    near = (found.loss <= best.loss[0] * 1.01) & (found.loss > best.loss[0] * (1 + NEAR))
    apart = np.abs(found.theta - theta).max(axis=0, where=near[:, None], initial=0.0) > 0.1 * spread
    if apart.any() and near.sum() > 0.02 * len(near):
        which = ", ".join(n for n, a, s in zip(names, apart, spread, strict=True) if a and s > 0)
        if which:
            message = f"another optimum within 1 % of the best Q has other values of {which}."
            findings.append(Finding(kind="scaling.two_optima", level=Level.WARNING, message=message))
    return findings


def _bootstrap_findings(converged: int, replicates: int, redrawn: int, improved: float) -> list[Finding]:
    findings = []
    if converged < FEW_CONVERGED * replicates:
        message = f"{converged} of {replicates} replicates converged: intervals withheld."
        findings.append(
            Finding(kind="scaling.replicates", level=Level.WARNING, message=message, value=float(converged))
        )
    if redrawn > MOST_REDRAWN * replicates:
        message = f"{redrawn} draws of cells did not identify the law and were drawn again, for {replicates} kept."
        findings.append(Finding(kind="scaling.redrawn", level=Level.WARNING, message=message, value=float(redrawn)))
    if improved > 1e-6:
        message = f"other starts lowered Q of a replicate by {improved:.1e} of itself: intervals may be too narrow."
        findings.append(Finding(kind="scaling.restarts", level=Level.WARNING, message=message, value=improved))
    return findings


def huber_likelihood(objective: float, runs: int, delta: float = DELTA) -> tuple[float, float]:
    """(s, negative log-likelihood) of residuals with density exp(-H/s^2) / Z(s), s by maximum likelihood.

    Z = s sqrt(2 pi) erf(delta / (s sqrt 2)) + (2 s^2 / delta) exp(-delta^2 / (2 s^2)); delta is held.
    """

    def value(log_s: float) -> float:
        s = math.exp(log_s)
        inside = s * math.sqrt(2 * math.pi) * math.erf(delta / (s * math.sqrt(2)))
        tails = 2 * s * s / delta * math.exp(-min(delta * delta / (2 * s * s), 700.0))
        return runs * math.log(inside + tails) + objective / (s * s)

    found = minimize_scalar(value, bounds=(math.log(1e-9), math.log(10.0)), method="bounded", options={"xatol": 1e-12})
    return math.exp(found.x), float(found.fun)


def corrected(nll: float, parameters: int, runs: int) -> float:
    """AICc; the scale s counts as a parameter. Infinite with too few runs."""
    left = runs - parameters - 1
    return 2 * nll + 2 * parameters + (2 * parameters * (parameters + 1) / left if left > 0 else math.inf)
