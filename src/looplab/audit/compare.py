"""Several checkpoints on the same documents: paired differences, and how far each share spreads.

A training trajectory, the sizes of a family, arms of an experiment: every model is audited by itself, on the same
evaluation documents and with the same draws of them. A difference between two models is then formed inside each
replicate, which cancels what makes some documents harder than others. Losses and gaps are in nats per byte, so models
with different tokenizers stand on one axis; a share is that of each model's own gap.

Intervals cover documents, not training runs: two checkpoints that differ say nothing about two recipes.
"""

import dataclasses
import statistics
from collections.abc import Iterator, Mapping

import numpy as np

from looplab._types import Float
from looplab.audit.assemble import Measured
from looplab.audit.bootstrap import Losses, estimate
from looplab.audit.case import MODEL
from looplab.audit.decompose import FULL, Combination, difference, net_gain, share_rows, structural_pairs
from looplab.audit.protocol import Measurement
from looplab.audit.result import RAW, AuditResult, DomainResult, Estimate, ModelCard
from looplab.data.documents import DataError

PER_BYTE, SHARE = "nats per byte", "share of the gap"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantity:
    """One number of every model."""

    name: str
    """loss at full depth, gap, application, distinct, composition, or net gain of a probe."""
    unit: str
    values: dict[str, Estimate]
    """Model -> value; models without one are in `missing`."""
    missing: dict[str, str]
    """Model -> why there is no number, as it is printed."""
    baseline: str | None
    """The first model that has the number."""
    differences: dict[str, Estimate]
    """Model -> its number minus that of `baseline`, paired by document."""
    smallest: float | None
    largest: float | None
    deviation: float | None
    """Standard deviation over models; None for fewer than two."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparedDomain:
    """All models on one set of documents."""

    name: str
    documents: int
    same_tokens: bool
    """Every model scores the same token ids; otherwise only numbers per byte and shares compare."""
    quantities: tuple[Quantity, ...]

    def quantity(self, name: str, unit: str) -> Quantity:
        """The quantity of that name and unit; KeyError if there is none."""
        for quantity in self.quantities:
            if (quantity.name, quantity.unit) == (name, unit):
                return quantity
        raise KeyError((name, unit))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Several audits side by side. `models` are the names they have here, in the order given."""

    models: tuple[str, ...]
    cards: tuple[ModelCard, ...]
    domains: tuple[ComparedDomain, ...]
    config_hash: str
    versions: dict[str, str]
    command: str
    schema: int = 1

    def domain(self, name: str) -> ComparedDomain:
        """The domain called `name`; KeyError if there is none."""
        for domain in self.domains:
            if domain.name == name:
                return domain
        raise KeyError(name)

    def __str__(self) -> str:
        lines = [f"{len(self.models)} models side by side"]
        for domain in self.domains:
            lines += ["", f"{domain.name}: {domain.documents} documents, the same for all models"]
            for quantity in domain.quantities:
                lines.append(f"  {quantity.name} ({quantity.unit})")
                for model in self.models:
                    lines.append(f"    {model:<24} {_told(quantity, model)}")
                if quantity.deviation is not None:
                    low, high = (_short(end, quantity.unit) for end in (quantity.smallest, quantity.largest))
                    lines.append(
                        f"    from {low} to {high}, standard deviation {_short(quantity.deviation, quantity.unit)}"
                    )
        return "\n".join([*lines, "", "Intervals cover documents, not training runs."])


def _told(quantity: Quantity, model: str) -> str:
    if model in quantity.missing:
        return quantity.missing[model]
    value = _interval(quantity.values[model], quantity.unit)
    if model not in quantity.differences:
        return value
    return f"{value}   minus {quantity.baseline}: {_interval(quantity.differences[model], quantity.unit)}"


def _interval(value: Estimate, unit: str) -> str:
    ends = (_short(end, unit, bare=True) for end in (value.low, value.high))
    return f"{_short(value.value, unit)} [{', '.join(ends)}]"


def _short(value: float | None, unit: str, *, bare: bool = False) -> str:
    if value is None:
        return "none"
    if unit == SHARE:
        return f"{100 * value:z.1f}" + ("" if bare else " %")
    return f"{value:z.4f}"


@dataclasses.dataclass(frozen=True, eq=False)
class Summary:
    """What a comparison needs of one audit; it does not hold the model."""

    result: AuditResult
    max_tokens: int
    """Longest document in tokens."""
    domains: "Mapping[str, _Side]"


@dataclasses.dataclass(frozen=True, eq=False)
class _Side:
    keys: tuple[str, ...]
    tokens: tuple[bytes, ...]
    numbers: "dict[tuple[str, str], _Number]"


def summary(measurement: Measurement, result: AuditResult) -> Summary:
    """The part of a finished audit that is compared."""
    sides = {}
    for domain in result.domains:
        part = measurement.measured[MODEL, domain.name]
        documents = part.domain.evaluation.documents
        sides[domain.name] = _Side(
            keys=tuple(document.content_key for document in documents),
            tokens=tuple(document.tokens.tobytes() for document in documents),
            numbers=dict(_numbers(part, domain)),
        )
    return Summary(result, measurement.plan.max_tokens, sides)


def compare(summaries: Mapping[str, Summary], command: str = "") -> Comparison:
    """Compares audits of several models.

    Args:
        summaries: By the name of the model, in the order in which they are shown.
        command: The command line, for the record.

    Raises:
        DataError: They did not score the same documents.
    """
    first = next(iter(summaries.values()))
    return Comparison(
        models=tuple(summaries),
        cards=tuple(each.result.model for each in summaries.values()),
        domains=tuple(_domain(name, summaries) for name in first.domains),
        config_hash=first.result.config_hash,
        versions=first.result.versions,
        command=command,
    )


def _domain(name: str, summaries: Mapping[str, Summary]) -> ComparedDomain:
    first_model, first = next(iter(summaries.items()))
    own = first.domains[name]
    for model, other in summaries.items():
        if other.max_tokens != first.max_tokens:
            raise DataError(
                f"all models must read the same text. Got {first.max_tokens} tokens of a document for {first_model} "
                f"and {other.max_tokens} for {model}. Pass --max-tokens {min(first.max_tokens, other.max_tokens)}."
            )
        keys = other.domains[name].keys if name in other.domains else ()
        if keys != own.keys:
            raise DataError(
                f"all models must score the same documents of {name}. Got {len(keys)} for {model} and {len(own.keys)} "
                f"for {first_model}, or others. Raise --max-tokens so that every prompt fits all tokenizers."
            )
    found = {model: each.domains[name].numbers for model, each in summaries.items()}
    names = dict.fromkeys(key for numbers in found.values() for key in numbers)
    return ComparedDomain(
        name=name,
        documents=len(own.keys),
        same_tokens=all(each.domains[name].tokens == own.tokens for each in summaries.values()),
        quantities=tuple(
            _quantity(key, {model: numbers.get(key) for model, numbers in found.items()}) for key in names
        ),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Number:
    """A point with its replicates, or the reason for having none."""

    point: float = 0.0
    rows: Float[np.ndarray, " replicates"] | None = None
    units: int = 0
    level: float = 0.95
    reason: str = ""

    def estimate(self) -> Estimate:
        assert self.rows is not None
        return estimate(self.point, self.rows, units=self.units, level=self.level)

    def minus(self, other: "_Number") -> Estimate:
        assert self.rows is not None and other.rows is not None
        shared = min(len(self.rows), len(other.rows))
        rows = self.rows[:shared] - other.rows[:shared]
        return estimate(self.point - other.point, rows, units=self.units, level=self.level)


def _quantity(key: tuple[str, str], numbers: Mapping[str, _Number | None]) -> Quantity:
    there = {model: number for model, number in numbers.items() if number is not None and number.rows is not None}
    baseline = next(iter(there), None)
    points = [number.point for number in there.values()]
    return Quantity(
        name=key[0],
        unit=key[1],
        values={model: number.estimate() for model, number in there.items()},
        missing={m: number.reason if number else "not measured" for m, number in numbers.items() if m not in there},
        baseline=baseline,
        differences={m: number.minus(there[baseline]) for m, number in there.items() if baseline and m != baseline},
        smallest=min(points, default=None),
        largest=max(points, default=None),
        deviation=statistics.stdev(points) if len(points) > 1 else None,
    )


def _numbers(part: Measured, result: DomainResult) -> Iterator[tuple[tuple[str, str], _Number]]:
    losses, level = part.losses, part.config.level
    per_byte = losses.tokens / losses.num_bytes if losses.num_bytes else float("nan")

    def plain(form: Combination) -> _Number:
        return _Number(per_byte * losses.point(form), per_byte * losses.rows(form), losses.documents, level)

    yield ("loss at full depth", PER_BYTE), plain({(RAW, FULL): 1.0})
    if not result.decompositions:
        return
    raw = result.decomposition(RAW)
    whole = difference(RAW, "prefix(1)", FULL)
    yield ("gap", PER_BYTE), plain(whole)
    pairs = structural_pairs(part.subject.full.M, part.subject.full.kmid)
    for name, pair in pairs.items():
        reason = raw.part(name).reason
        form = difference(RAW, *pair)
        yield (name, PER_BYTE), _Number(reason=reason) if reason else plain(form)
        yield (name, SHARE), _share(losses, form, whole, level, reason or _withheld(raw.gap_measurable))
    for gain in result.gains:
        if gain.k == 1:
            net, _ = net_gain(gain.probe, 1)
            yield (f"net gain, {gain.probe}", SHARE), _share(losses, net, whole, level, _withheld(raw.gap_measurable))


def _withheld(measurable: bool) -> str:
    return "" if measurable else "withheld: gap too small"


def _share(losses: Losses, part: Combination, whole: Combination, level: float, reason: str) -> _Number:
    if reason:
        return _Number(reason=reason)
    point = losses.point(part) / losses.point(whole)
    return _Number(point, share_rows(losses, part, whole), losses.documents, level)
