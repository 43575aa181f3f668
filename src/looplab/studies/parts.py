"""What a claim looks at, built in one line each: a level, a difference, a contrast, a trend, a ratio.

A cell is an arm's name, or a pair (arm, quantity) where the quantities differ. Weights are over cells:

    effect(f)            mean of the cells with f - mean of those without
    interaction(f, g)    (f and g - g alone) - (f alone - neither)
    trend                slope per seed on the axis that is named
    ratio                factor between two cells, decided on its logarithm: a margin of 0.05 is about 5 %
"""

import math
from collections.abc import Mapping, Sequence

from looplab.records import Part, Rule
from looplab.studies import rules
from looplab.studies.rules import Number

Cell = str | tuple[str, str]
Cells = Cell | Sequence[Cell]
Points = Mapping[str, Number] | Mapping[tuple[str, str], Number] | Mapping[Cell, Number]


def level(arm: Cell, quantity: str = "", *, rule: Rule, label: str = "") -> Part:
    """One quantity of one arm against thresholds."""
    return _part("", (arm,), quantity, rule, label)


def difference(one: Cell, other: Cell, quantity: str = "", *, rule: Rule, label: str = "") -> Part:
    """One cell minus another, paired by seed."""
    return _part("", (one, other), quantity, rule, label or f"{_said(one)} - {_said(other)}")


def ratio(one: Cell, other: Cell, quantity: str = "", *, rule: Rule, label: str = "") -> Part:
    """One cell over another, paired by seed; thresholds are factors, margins are of the logarithm."""
    return _part("ratio", (one, other), quantity, rule, label or f"{_said(one)} / {_said(other)}")


def contrast(weights: Points, quantity: str = "", *, rule: Rule, label: str) -> Part:
    """Any weighted sum of cells, seed by seed."""
    return _part("contrast", tuple(weights), quantity, rule, label, tuple(map(float, weights.values())))


def effect(factor: str, with_it: Cells, without: Cells, quantity: str = "", *, rule: Rule, label: str = "") -> Part:
    """Mean of the cells with a factor minus mean of those without."""
    high, low = _many(with_it), _many(without)
    weights = (*[1 / len(high)] * len(high), *[-1 / len(low)] * len(low))
    return _part("effect", (*high, *low), quantity, rule, label or f"effect of {factor}", weights)


def interaction(
    factors: tuple[str, str],
    both: Cells,
    first: Cells,
    second: Cells,
    neither: Cells,
    quantity: str = "",
    *,
    rule: Rule,
    label: str = "",
) -> Part:
    """How much the effect of one factor changes with the other."""
    groups = [_many(each) for each in (both, first, second, neither)]
    weights = [sign / len(group) for sign, group in zip((1, -1, -1, 1), groups, strict=True) for _ in group]
    cells = tuple(cell for group in groups for cell in group)
    return _part("interaction", cells, quantity, rule, label or f"{factors[0]} x {factors[1]}", tuple(weights))


def trend(points: Points, axis: str, quantity: str = "", *, rule: Rule, label: str = "") -> Part:
    """Slope on an axis: cell -> where it stands, in the axis's own unit (log2 loops: 0, 1, 2)."""
    at = tuple(map(float, points.values()))
    named = label or f"slope on {axis}"
    return _part("trend", tuple(points), quantity, rule, named, rules.slope_weights(at), at=at, axis=axis)


def auc(one: str, other: str, outcome: str, clusters: Mapping[str, str], *, rule: Rule, label: str = "") -> Part:
    """AUC of one predictor minus that of another, over all runs of the arms.

    Args:
        one: Quantity that predicts; larger means that the outcome is likelier.
        outcome: Quantity that is 1 or 0.
        clusters: Arm -> what is drawn as a whole, such as its architecture and task.
    """
    return Part(
        label=label or f"AUC of {one} - AUC of {other}",
        quantity=outcome,
        arms=tuple(arm for arm in clusters for _ in range(3)),
        quantities=(one, other, outcome) * len(clusters),
        clusters=tuple(clusters.values()),
        statistic="auc",
        rule=rule,
    )


def timing(arm: Cell, quantity: str = "", *, rule: Rule, label: str = "") -> Part:
    """A median of paired ratios of times, as `rules.median_ratio` makes it; one seed is enough."""
    return _part("time", (arm,), quantity, rule, label)


def _part(
    statistic: str,
    cells: tuple[Cell, ...],
    quantity: str,
    rule: Rule,
    label: str,
    weights: tuple[float, ...] = (),
    *,
    at: tuple[float, ...] = (),
    axis: str = "",
) -> Part:
    pairs = [cell if isinstance(cell, tuple) else (cell, quantity) for cell in cells]
    named = [name for _, name in pairs]
    if not all(named):
        raise ValueError(
            f"{label or cells[0]}: quantity must be given for every cell. Got {cells}. Name it once or each."
        )
    if weights and statistic != "contrast" and abs(math.fsum(weights)) > 1e-9:
        raise ValueError(f"{label}: weights must sum to 0. Got {weights}. Use `contrast` for anything else.")
    return Part(
        label=label or f"{pairs[0][0]}, {named[0]}",
        quantity=named[0],
        arms=tuple(arm for arm, _ in pairs),
        quantities=() if len(set(named)) == 1 else tuple(named),
        statistic=statistic,
        weights=weights,
        at=at,
        axis=axis,
        rule=rule,
    )


def _many(cells: Cells) -> tuple[Cell, ...]:
    """A tuple is one cell; several are a list."""
    if isinstance(cells, (str, tuple)):
        return (cells,)  # type: ignore[return-value]
    return tuple(cells)


def _said(cell: Cell) -> str:
    return cell if isinstance(cell, str) else ", ".join(cell)
