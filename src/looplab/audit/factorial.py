"""Is it the count of applications or the iteration index? A square of four losses on the first run of units.

    q00 = Q(same(kmid))      q01 = Q(prefix(kmid))          first digit:  count kmid -> M
    q10 = Q(same(M))         q11 = Q(repeat(kmid))          second digit: one -> kmid indices

    index effect   at kmid      q00 - q01        at M             q10 - q11
    count effect   at one       q00 - q10        at kmid indices  q01 - q11
    interaction    (q00 - q01) - (q10 - q11)
    Shapley value  mean of a factor's two effects; both add up to q00 - q11

The chain prefix(1) -> same(kmid) -> square -> full gives the gap in two orders. Count first is the decomposition;
index first has

    application  [Q(prefix(1)) - q00] + [q01 - q11]        distinct  q00 - q01        composition  q11 - Q(full)

What "application" holds may come almost wholly from the first kmid applications and then saturate: the square shows it.

Reference: Dau, Khuat, Dung, "Beyond Depth Truncation", and the factorial of its repository.
Deviations: no value where the square's words do not differ; the probe is no third factor (see `four_way.py`).
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from looplab.audit.bootstrap import Losses
from looplab.audit.config import AuditConfig
from looplab.audit.decompose import (
    FULL,
    Combination,
    Pair,
    combine,
    difference,
    equivalence_margin,
    equivalent,
    structural_pairs,
)
from looplab.audit.result import Effect, Factorial, Ordering, ScheduleEntry
from looplab.audit.schedules import ONE_KIND, RUNS_ONCE

COUNT_FIRST, INDEX_FIRST = "count first", "index first"


class Cell(NamedTuple):
    """One corner of the square: how it is called, and the schedule that measured it (same(M) is repeat(1))."""

    label: str
    schedule: str


class Square(NamedTuple):
    """The four corners, named by count (short: kmid, long: M) and number of indices."""

    one_short: Cell
    many_short: Cell
    one_long: Cell
    many_long: Cell

    @classmethod
    def of(cls, units: int, kmid: int) -> "Square":
        """The square of a model with M units, of which the first kmid are one run."""
        return cls(
            Cell(f"same({kmid})", f"same({kmid})"),
            Cell(f"prefix({kmid})", f"prefix({kmid})"),
            Cell(f"same({units})", "repeat(1)"),
            Cell(f"repeat({kmid})", f"repeat({kmid})"),
        )


Step = tuple[float, Cell, Cell]
"""(weight, plus, minus): one difference in an effect."""


def factorials(
    losses: Losses,
    rows: Sequence[ScheduleEntry],
    *,
    units: int,
    kmid: int,
    reasons: Mapping[Pair, str | None],
    unmeasured: Mapping[str, str],
    config: AuditConfig,
) -> tuple[tuple[Factorial, ...], str | None]:
    """The square under every readout, raw first; or none, and why, as it is printed.

    Args:
        losses: Losses of every row that has a number, under the row's own name.
        rows: The schedule map.
        units: M.
        kmid: Leading units with the block sequence of the first.
        reasons: Contrasts that carry no information (`decompose.identify`).
        unmeasured: Schedules without a number, with the reason.
    """
    why = no_factorial(rows, units=units, kmid=kmid, reasons=reasons, unmeasured=unmeasured)
    if why is not None:
        return (), why
    extra = [
        (name, f"{family}({units})")
        for name, family in (("extra units at the start", "repeat_first"), ("extra units in a cycle", "cyclic"))
        if _has_number(f"{family}({units})", f"repeat({kmid})", losses, reasons)
    ]
    return tuple(_factorial(losses, readout, units, kmid, extra, config) for readout in losses.readouts), None


def no_factorial(
    rows: Sequence[ScheduleEntry],
    *,
    units: int,
    kmid: int,
    reasons: Mapping[Pair, str | None],
    unmeasured: Mapping[str, str],
) -> str | None:
    """Why there is no square, such as "not identifiable: only one kind of unit"; None where there is one."""
    if kmid == 1 or kmid == units:
        return f"not identifiable: {RUNS_ONCE if kmid == 1 else ONE_KIND}"
    names = [cell.schedule for cell in Square.of(units, kmid)]
    known = (reasons.get(pair) for pair in combinations(names, 2))
    reason = next((reason for reason in known if reason), None)
    if reason is not None:
        return f"not identifiable: {reason}"
    run = {row.name for row in rows}
    missing = next((name for name in names if name not in run or name in unmeasured), None)
    return None if missing is None else f"not measured: {missing} {unmeasured.get(missing, 'was not run')}"


def _has_number(plus: str, minus: str, losses: Losses, reasons: Mapping[Pair, str | None]) -> bool:
    return plus in losses.tables and minus in losses.tables and not reasons.get((plus, minus))


def _factorial(
    losses: Losses, readout: str, units: int, kmid: int, extra: Sequence[tuple[str, str]], config: AuditConfig
) -> Factorial:
    square = Square.of(units, kmid)
    margin = equivalence_margin(losses, readout, config)
    effects = [
        _effect(losses, readout, name, formula, steps, margin, config)
        for name, formula, steps in _effects(square, units, kmid, extra)
    ]
    orders: tuple[Ordering, ...] = ()
    if "prefix(1)" in losses.tables and FULL in losses.tables:
        orders = tuple(
            Ordering(name=name, terms={term: losses.estimate(form, config.level) for term, form in terms.items()})
            for name, terms in structural_orders(readout, units, kmid).items()
        )
    return Factorial(
        probe=readout,
        cells={cell.label: losses.estimate({(readout, cell.schedule): 1.0}, config.level) for cell in square},
        effects=tuple(effects),
        orders=orders,
    )


def _effects(
    square: Square, units: int, kmid: int, extra: Sequence[tuple[str, str]]
) -> list[tuple[str, str, list[Step]]]:
    """(name, formula, steps) of every effect, in the order they are shown."""
    index = ((square.one_short, square.many_short), (square.one_long, square.many_long))
    count = ((square.one_short, square.one_long), (square.many_short, square.many_long))
    single = {
        f"index effect at {kmid}": index[0],
        f"index effect at {units}": index[1],
        "count effect at one index": count[0],
        f"count effect at {kmid} indices": count[1],
    }
    found = [(name, _minus(pair), [(1.0, *pair)]) for name, pair in single.items()]
    short, long = map(_minus, index)
    found.append(("interaction", f"({short}) - ({long})", [(1.0, *index[0]), (-1.0, *index[1])]))
    for factor, pairs in (("count", count), ("index", index)):
        formula = f"mean of {_minus(pairs[0])} and {_minus(pairs[1])}"
        found.append((f"Shapley value of the {factor}", formula, [(0.5, *pair) for pair in pairs]))
    for name, schedule in extra:
        pair = Cell(schedule, schedule), square.many_long
        found.append((name, _minus(pair), [(1.0, *pair)]))
    return found


def _minus(pair: tuple[Cell, Cell]) -> str:
    return f"{pair[0].label} - {pair[1].label}"


def _effect(
    losses: Losses,
    readout: str,
    name: str,
    formula: str,
    steps: Sequence[Step],
    margin: float | None,
    config: AuditConfig,
) -> Effect:
    form = combine(*((weight, difference(readout, plus.schedule, minus.schedule)) for weight, plus, minus in steps))
    nats = losses.estimate(form, config.level)
    return Effect(
        name=name,
        formula=formula,
        nats=nats,
        equivalent=equivalent(nats, margin),
        bitwise_equal=all(losses.bitwise_equal(readout, plus.schedule, minus.schedule) for _, plus, minus in steps),
    )


def count_first(readout: str, units: int, kmid: int) -> dict[str, Combination]:
    """application, distinct and composition of the gap as the decomposition has them."""
    return {term: difference(readout, *pair) for term, pair in structural_pairs(units, kmid).items()}


def index_first(readout: str, units: int, kmid: int) -> dict[str, Combination]:
    """The same gap with the indices of the first run added at kmid applications, before the further ones."""
    one_short, many_short, _, many_long = (cell.schedule for cell in Square.of(units, kmid))
    first, later = difference(readout, "prefix(1)", one_short), difference(readout, many_short, many_long)
    return {
        "application": combine((1.0, first), (1.0, later)),
        "distinct": difference(readout, one_short, many_short),
        "composition": difference(readout, many_long, FULL),
    }


def structural_orders(readout: str, units: int, kmid: int) -> dict[str, dict[str, Combination]]:
    """Both orders of a model that has the square: order -> term -> linear form."""
    return {
        COUNT_FIRST: count_first(readout, units, kmid),
        INDEX_FIRST: index_first(readout, units, kmid),
    }
