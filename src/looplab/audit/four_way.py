"""Structure and readout in one sum: Q(prefix(1)) - Q_probe(full) as application, distinct, composition, calibration.

    structure first    A + D + C under the raw readout,     calibration = gain(full)
    probe first        A + D + C under the refitted one,    calibration = gain(prefix(1))

with gain(s) = Q(s) - Q_probe(s). Both add up to the whole. Where the count and index square exists, structure itself
has two orders and there are four paths. No path is the true one: all are reported, with their mean and range.

Reference: Dau, Khuat, Dung, "Beyond Depth Truncation".
Deviation: terms that this model cannot tell apart are not given. A part whose two plans are one word is exactly zero
and left out; with fewer than two parts, or with a part that was not measured, one term `structure` stands for all.
"""

from collections.abc import Mapping, Sequence

from looplab.audit.bootstrap import Losses
from looplab.audit.config import AuditConfig
from looplab.audit.decompose import FULL, Combination, Pair, combine, difference, gain, no_number, structural_pairs
from looplab.audit.factorial import count_first, no_factorial, structural_orders
from looplab.audit.result import RAW, FourWay, Ordering, ScheduleEntry

STRUCTURE, CALIBRATION = "structure", "calibration"
Terms = dict[str, Combination]


def four_ways(
    losses: Losses,
    rows: Sequence[ScheduleEntry],
    *,
    units: int,
    kmid: int,
    reasons: Mapping[Pair, str | None],
    unmeasured: Mapping[str, str],
    config: AuditConfig,
) -> tuple[FourWay, ...]:
    """The four-way view of every probe; none where prefix(1) or full was not measured.

    Args:
        losses: Losses of every row that has a number, under the row's own name.
        rows: The schedule map.
        units: M.
        kmid: Leading units with the block sequence of the first.
        reasons: Contrasts that carry no information (`decompose.identify`).
        unmeasured: Schedules without a number, with the reason.
    """
    if no_number("prefix(1)", FULL, reasons, unmeasured) is not None:
        return ()
    parts = _parts(units, kmid, reasons, unmeasured)
    square = no_factorial(rows, units=units, kmid=kmid, reasons=reasons, unmeasured=unmeasured) is None
    return tuple(
        _four_way(losses, probe, _paths(probe, parts, square, units, kmid), config)
        for probe in losses.readouts
        if probe != RAW
    )


def _parts(units: int, kmid: int, reasons: Mapping[Pair, str | None], unmeasured: Mapping[str, str]) -> tuple[str, ...]:
    """Structural parts that stand alone; none where they merge."""
    pairs = {
        term: pair for term, pair in structural_pairs(units, kmid).items() if no_number(*pair, reasons, {}) is None
    }
    measured = all(no_number(*pair, reasons, unmeasured) is None for pair in pairs.values())
    return tuple(pairs) if measured and len(pairs) > 1 else ()


def _paths(probe: str, parts: Sequence[str], square: bool, units: int, kmid: int) -> dict[str, Terms]:
    """Path -> term -> linear form."""
    last, first = _structures(RAW, parts, square, units, kmid), _structures(probe, parts, square, units, kmid)
    paths = {}
    for order in last:
        names = (
            (f"{order}, probe last", f"{order}, probe first") if len(last) > 1 else ("structure first", "probe first")
        )
        paths[names[0]] = {**last[order], CALIBRATION: gain(probe, FULL)}
        paths[names[1]] = {**first[order], CALIBRATION: gain(probe, "prefix(1)")}
    return paths


def _structures(readout: str, parts: Sequence[str], square: bool, units: int, kmid: int) -> dict[str, Terms]:
    """Order -> structural term -> linear form under one readout."""
    if not parts:
        return {STRUCTURE: {STRUCTURE: difference(readout, "prefix(1)", FULL)}}
    if square:
        return structural_orders(readout, units, kmid)
    forms = count_first(readout, units, kmid)
    return {STRUCTURE: {term: forms[term] for term in parts}}


def _four_way(losses: Losses, probe: str, paths: Mapping[str, Terms], config: AuditConfig) -> FourWay:
    terms = list(next(iter(paths.values())))
    mean = {term: combine(*((1 / len(paths), forms[term]) for forms in paths.values())) for term in terms}
    points = {term: [losses.point(forms[term]) for forms in paths.values()] for term in terms}
    return FourWay(
        probe=probe,
        whole=losses.estimate({(RAW, "prefix(1)"): 1.0, (probe, FULL): -1.0}, config.level),
        paths=tuple(
            Ordering(name=name, terms={term: losses.estimate(form, config.level) for term, form in forms.items()})
            for name, forms in paths.items()
        ),
        mean={term: losses.estimate(form, config.level) for term, form in mean.items()},
        spread={term: (min(values), max(values)) for term, values in points.items()},
    )
