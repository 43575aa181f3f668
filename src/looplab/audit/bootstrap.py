"""Bootstrap of losses over documents in which the temperature is fitted again in every replicate.

    f(beta) = mean_i [ logsumexp(beta z_i) - beta z_{i, y_i} ]                 beta = 1 / T
    step    = -2 g h / (2 h^2 - g k)                                           (Halley)
    Q       = sum_d w_d (F_d + step G_d + step^2/2 H_d + step^3/6 K_d) / sum_d w_d n_d

F, G, H, K are the per-document sums of f and its first three derivatives at the fitted beta; g, h, k are their weighted
sums over the calibration documents of a replicate, and Q is the loss on its evaluation documents. Two matrix products
replace all the refits.

Where the step is not safe (2 h^2 <= g k, or |step| > 0.2 beta) the replicate is refitted exactly. So are the five
replicates with the largest safe steps, where the expansion is worst: a difference above 1e-4 nats there, or more than
200 unsafe replicates, leaves the expansion aside and refits the first 200 replicates exactly. That is decided on
calibration documents, while their logits are at hand; the same five are compared again on evaluation documents.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from looplab._types import Float, Integer
from looplab.audit.result import RAW, Estimate
from looplab.intervals import Draws, expanded_tail
from looplab.records import Finding, Level

TEMPERATURE = "temperature"
SENTINELS = 5
EXACT_ONLY = 200
MAX_DIFFERENCE = 1e-4
MAX_STEP = 0.2


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DocumentSums:
    """Per-document sums of the loss in nats and its derivatives in beta, at one beta, and token counts."""

    loss: Float[np.ndarray, " documents"]
    first: Float[np.ndarray, " documents"]
    second: Float[np.ndarray, " documents"]
    third: Float[np.ndarray, " documents"]
    tokens: Float[np.ndarray, " documents"]

    @classmethod
    def join(cls, parts: Sequence["DocumentSums"]) -> "DocumentSums":
        """The documents of all parts, in order: shards of one split."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})

    @property
    def documents(self) -> int:
        return len(self.tokens)

    def columns(self) -> Float[np.ndarray, "documents 4"]:
        """loss, first, second, third as one matrix."""
        return np.stack([self.loss, self.first, self.second, self.third], axis=1)


@runtime_checkable
class Fit(Protocol):
    """What the bootstrap needs of a temperature fit (`probes.Temperature`)."""

    @property
    def beta(self) -> float: ...
    @property
    def status(self) -> str: ...
    @property
    def sums(self) -> DocumentSums: ...
    @property
    def boundary(self) -> bool: ...


ExactRefit = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""(weights "refits documents", start "refits") to (beta "refits", loss sums at it "documents refits"), on the
calibration documents."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TemperatureReplicates:
    """Fitted beta of every replicate. Fewer than the draws have: only the leading ones, all refitted exactly."""

    beta: float
    status: str
    betas: Float[np.ndarray, " replicates"]
    exact: Integer[np.ndarray, " refits"]
    """Replicates refitted exactly; evaluation needs document losses at `exact_betas`."""
    difference: float
    """Largest difference in nats between expansion and exact refit over the sentinels; 0 where none were needed."""

    @property
    def exact_betas(self) -> Float[np.ndarray, " refits"]:
        return self.betas[self.exact]


def halley_steps(weighted: Float[np.ndarray, "replicates 4"]) -> Float[np.ndarray, " replicates"]:
    """Halley steps from weighted sums (loss, first, second, third); NaN where the denominator is not positive."""
    _, g, h, k = weighted.T
    denominator = 2 * h * h - g * k
    safe = denominator > 0
    return np.where(safe, -2 * g * h / np.where(safe, denominator, 1.0), np.nan)


def _taylor(weighted: Float[np.ndarray, "rows 4"], step: Float[np.ndarray, " rows"]) -> Float[np.ndarray, " rows"]:
    loss, first, second, third = weighted.T
    return loss + step * (first + step / 2 * (second + step / 3 * third))


def refit_replicates(fit: Fit, draws: Draws, exact: ExactRefit) -> TemperatureReplicates:
    """The temperature of every replicate of the calibration documents.

    Args:
        fit: The fit on all calibration documents; at a boundary its beta stays fixed in every replicate.
        draws: Draws of the calibration documents, shared by all schedules of a domain.
        exact: Refits on the calibration logits, called once or twice (`probes.exact_refit`).
    """
    if draws.documents != fit.sums.documents:
        raise ValueError(
            f"refit_replicates: draws must be of the {fit.sums.documents} documents of the fit. "
            f"Got draws of {draws.documents}. Draw again for the documents that were fitted."
        )
    if fit.boundary:
        return _replicates(fit, np.full(draws.replicates, fit.beta), np.empty(0, dtype=np.int64), 0.0)
    weighted = draws.sums(fit.sums.columns())
    steps = halley_steps(weighted)
    unsafe = ~(np.abs(steps) <= MAX_STEP * fit.beta)
    if unsafe.sum() > EXACT_ONLY:
        return _all_exact(fit, draws, exact, float("nan"))
    betas = np.where(unsafe, fit.beta, fit.beta + np.where(unsafe, 0.0, steps))
    safe = np.flatnonzero(~unsafe)
    sentinels = safe[np.argsort(-np.abs(steps[safe]), kind="stable")[:SENTINELS]]
    rows = np.sort(np.concatenate([np.flatnonzero(unsafe), sentinels]))
    weights = draws.counts[rows].astype(np.float64)
    refitted, losses = exact(weights, betas[rows])
    expanded = _taylor(weighted[rows], betas[rows] - fit.beta)
    apart = np.abs(expanded - (weights * losses.T).sum(axis=1)) / (weights @ fit.sums.tokens)
    difference = float(np.max(apart[~unsafe[rows]], initial=0.0))
    if difference > MAX_DIFFERENCE:
        return _all_exact(fit, draws, exact, difference)
    betas[rows] = refitted
    return _replicates(fit, betas, rows, difference)


def _all_exact(fit: Fit, draws: Draws, exact: ExactRefit, difference: float) -> TemperatureReplicates:
    leading = draws.first(EXACT_ONLY).counts.astype(np.float64)
    betas, _ = exact(leading, np.full(len(leading), fit.beta))
    return _replicates(fit, betas, np.arange(len(leading)), difference)


def _replicates(
    fit: Fit, betas: Float[np.ndarray, " replicates"], exact: Integer[np.ndarray, " refits"], difference: float
) -> TemperatureReplicates:
    return TemperatureReplicates(beta=fit.beta, status=fit.status, betas=betas, exact=exact, difference=difference)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TemperatureSums:
    """What the temperature-calibrated loss of one schedule needs of its evaluation documents."""

    at_fit: DocumentSums
    """Sums at the fitted beta."""
    exact: Float[np.ndarray, "documents refits"]
    """Loss sums at each of `replicates.exact_betas`."""
    replicates: TemperatureReplicates


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ScheduleSums:
    """Per-document loss sums in nats of one schedule on the evaluation documents.

    `fixed` holds readouts whose fit is not resampled (affine). `seeds` holds, per readout, the loss of each noise seed.
    With several noise seeds, the sums and the token counts of a document run over the tokens of all seeds.
    """

    raw: Float[np.ndarray, " documents"]
    fixed: Mapping[str, Float[np.ndarray, " documents"]] = dataclasses.field(default_factory=dict)
    temperature: TemperatureSums | None = None
    seeds: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)

    def documents(self, readout: str) -> Float[np.ndarray, " documents"]:
        """Loss sums under one readout, temperature at its fit on all calibration documents."""
        if readout == RAW:
            return self.raw
        if readout == TEMPERATURE and self.temperature is not None:
            return self.temperature.at_fit.loss
        return self.fixed[readout]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Losses:
    """The loss of every schedule under every readout, in nats per token: point values and shared replicates."""

    tables: Mapping[str, ScheduleSums]
    readouts: tuple[str, ...]
    documents: int
    points: Mapping[tuple[str, str], float]
    """(readout, schedule) -> loss with every document once."""
    replicates: Mapping[tuple[str, str], Float[np.ndarray, " replicates"]]
    tokens: float
    num_bytes: int | None
    findings: tuple[Finding, ...]

    def point(self, combination: Mapping[tuple[str, str], float]) -> float:
        """A weighted sum of losses, keyed by (readout, schedule)."""
        return sum(weight * self.points[key] for key, weight in combination.items())

    def rows(self, combination: Mapping[tuple[str, str], float]) -> Float[np.ndarray, " replicates"]:
        """The same sum in every replicate that all its losses have; losses share their draws, row by row."""
        shared = min(len(self.replicates[key]) for key in combination)
        return np.sum([weight * self.replicates[key][:shared] for key, weight in combination.items()], axis=0)

    def seeds(self, combination: Mapping[tuple[str, str], float]) -> list[float] | None:
        """The same sum for each noise seed; None unless every loss has at least two seeds."""
        lists = [
            (weight, self.tables[schedule].seeds.get(readout, ()))
            for (readout, schedule), weight in combination.items()
        ]
        if any(len(values) < 2 for _, values in lists):
            return None
        return [sum(w * values[j] for w, values in lists) for j in range(len(lists[0][1]))]

    def bitwise_equal(self, readout: str, plus: str, minus: str) -> bool:
        """Every document's loss sum is the same number."""
        return np.array_equal(self.tables[plus].documents(readout), self.tables[minus].documents(readout))

    def estimate(self, combination: Mapping[tuple[str, str], float], level: float) -> Estimate:
        """Point value with document intervals."""
        return estimate(self.point(combination), self.rows(combination), units=self.documents, level=level)


def estimate(point: float, replicates: Float[np.ndarray, " replicates"], *, units: int, level: float) -> Estimate:
    """Expanded percentile interval, the 90 % one of the equivalence test, and the plain one, in one pass."""
    wide, test, plain = expanded_tail(units, level), expanded_tail(units, 0.9), (1 - level) / 2
    tails = [wide, 1 - wide, test, 1 - test, plain, 1 - plain]
    low, high, low90, high90, plain_low, plain_high = (float(q) for q in np.quantile(replicates, tails))
    return Estimate(
        value=float(point), low=low, high=high, low90=low90, high90=high90, plain_low=plain_low, plain_high=plain_high
    )


def bootstrap_losses(
    tables: Mapping[str, ScheduleSums],
    draws: Draws,
    *,
    tokens: Float[np.ndarray, " documents"],
    num_bytes: int | None = None,
    weighting: str = "token",
) -> Losses:
    """Point losses and replicates of every schedule and readout, all from one matrix of draws.

    Args:
        tables: Schedule name to its sums. One that equals another is the same object and costs nothing.
        draws: Draws of the evaluation documents.
        tokens: Scored tokens per evaluation document (times noise seeds).
        num_bytes: Bytes of the scored text, for nats per byte.
        weighting: "token", or "document": every document counts alike.

    Raises:
        ValueError: Sums and draws of different documents.
    """
    for name, table in tables.items():
        if len(table.raw) != draws.documents or len(tokens) != draws.documents:
            raise ValueError(
                f"bootstrap_losses: draws must be of the documents in the tables. Got {draws.documents} in the draws, "
                f"{len(table.raw)} in {name}, {len(tokens)} in tokens. Draw for the evaluation documents."
            )
    share = tokens if weighting == "document" else np.ones(len(tokens))
    counts = tokens / share
    total, drawn = counts.sum(), draws.sums(counts[:, None])[:, 0]
    points: dict[tuple[str, str], float] = {}
    replicates: dict[tuple[str, str], np.ndarray] = {}
    findings: list[Finding] = []
    done: dict[int, str] = {}
    for name, table in tables.items():
        readouts = (RAW, *table.fixed, *([TEMPERATURE] if table.temperature else []))
        if id(table) in done:
            for readout in readouts:
                points[readout, name] = points[readout, done[id(table)]]
                replicates[readout, name] = replicates[readout, done[id(table)]]
            continue
        done[id(table)] = name
        for readout in (RAW, *table.fixed):
            sums = table.documents(readout) / share
            points[readout, name] = float(sums.sum() / total)
            replicates[readout, name] = draws.sums(sums[:, None])[:, 0] / drawn
        if table.temperature is not None:
            points[TEMPERATURE, name] = float((table.temperature.at_fit.loss / share).sum() / total)
            values, difference = _temperature_losses(table.temperature, draws, share, drawn)
            replicates[TEMPERATURE, name] = values
            findings += _refit_findings(name, table.temperature.replicates, difference, draws.replicates)
    names = dict.fromkeys(readout for readout, _ in points)
    order = (RAW, *([TEMPERATURE] if TEMPERATURE in names else []), *(n for n in names if n not in (RAW, TEMPERATURE)))
    return Losses(
        tables=tables,
        readouts=order,
        documents=draws.documents,
        points=points,
        replicates=replicates,
        tokens=float(tokens.sum()),
        num_bytes=num_bytes,
        findings=tuple(findings),
    )


def _temperature_losses(
    sums: TemperatureSums,
    draws: Draws,
    share: Float[np.ndarray, " documents"],
    drawn: Float[np.ndarray, " replicates"],
) -> tuple[Float[np.ndarray, " refitted"], float]:
    """Losses of every replicate with a temperature, and the largest error of the expansion where it is in use."""
    replicates = sums.replicates
    used = draws.first(len(replicates.betas))
    steps = replicates.betas - replicates.beta
    losses = _taylor(used.sums(sums.at_fit.columns() / share[:, None]), steps)
    rows = replicates.exact
    exact = (used.counts[rows] * (sums.exact / share[:, None]).T).sum(axis=1)
    expandable = np.abs(steps[rows]) <= MAX_STEP * replicates.beta
    apart = np.abs(losses[rows] - exact) / drawn[rows]
    losses[rows] = exact
    return losses / drawn[: len(losses)], float(np.max(apart[expandable], initial=0.0))


def _refit_findings(name: str, replicates: TemperatureReplicates, difference: float, asked: int) -> list[Finding]:
    where: dict[str, str | int] = {"schedule": name}
    if replicates.status != "converged":
        return [
            Finding(
                kind="audit.temperature_boundary",
                level=Level.INFO,
                message=f"The temperature of {name} is at a boundary ({replicates.status}): fixed in all replicates.",
                value=replicates.beta,
                where=where,
            )
        ]
    if len(replicates.betas) < asked:
        return [
            Finding(
                kind="audit.exact_refits",
                level=Level.INFO,
                message=f"Intervals that use the temperature of {name} come from {len(replicates.betas)} exact refits.",
                remedy="More calibration documents make the fit stable enough for all replicates.",
                value=replicates.difference,
                threshold=MAX_DIFFERENCE,
                where=where,
            )
        ]
    if difference > MAX_DIFFERENCE:
        return [
            Finding(
                kind="audit.refit_expansion",
                level=Level.WARNING,
                message=f"Refits of {name} by expansion are up to {difference:.1e} nats from exact ones.",
                remedy="Use more calibration documents.",
                value=difference,
                threshold=MAX_DIFFERENCE,
                where=where,
            )
        ]
    return []
