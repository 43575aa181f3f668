"""Decision rules: intervals in, a word out. The rule and its numbers are fixed before anything runs.

    above(x)          supported: low > x             not supported: high < x
    below(x)          the mirror image
    between(x, y)     supported: x <= low, high <= y   not supported: wholly outside
    exact(x)          equality of counts and facts; no interval
    greater(d)        of a - b: above d, or above 0
    equivalent(d)     the 90 % interval inside (-d, d); not supported: wholly outside. Two one-sided tests at 5 %
    spread            between-arm variance above 0: Cochran's Q against chi2, lower end of the Q-profile interval

Everything else is undecided. Over training seeds, each side of the interval is

    sqrt(t^2 + d^2)      t: side of the t interval over the seeds' values;   d: mean side of their document intervals

so seeds that happen to agree give no interval of zero width, and many documents do not hide a spread of seeds. The two
add because all seeds are audited on the same documents: their error is shared, and no spread of seeds shows it. For the
same reason a difference of two arms has as document interval the worst case [a.low - b.high, a.high - b.low].

References: Schuirmann, J. Pharmacokinetics and Biopharmaceutics 15, 1987 (equivalence); Viechtbauer, Statistics in
    Medicine 26, 2007 (Q-profile).
Deviations: the sum of squares contains the hull of both intervals, and stands in place of a bootstrap with seeds as
    outer level, which needs draws that a stored audit does not hold.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from scipy import stats

from looplab.records import Rule

SUPPORTED, NOT_SUPPORTED, UNDECIDED = "supported", "not supported", "undecided"
UNIDENTIFIED = "not identifiable at this scale"
WORDS = (SUPPORTED, NOT_SUPPORTED, UNDECIDED, UNIDENTIFIED)
LEVEL, EQUIVALENCE_LEVEL = 0.95, 0.90
MIN_SEEDS = 3
MOST_SEEDS = 50


class Interval(NamedTuple):
    """A value with its interval, and that of the equivalence test."""

    value: float
    low: float
    high: float
    low90: float
    high90: float

    def __sub__(self, other: "Interval") -> "Interval":
        return Interval(
            self.value - other.value,
            self.low - other.high,
            self.high - other.low,
            self.low90 - other.high90,
            self.high90 - other.low90,
        )


def decide(rule: Rule, found: Interval, *, margin: float | None = None) -> str:
    """The word of a rule for one interval.

    Args:
        margin: Of an equivalence whose rule names none.
    """
    x = rule.numbers
    if rule.name == "above":
        return _side(found.low > x[0], found.high < x[0])
    if rule.name == "greater":
        by = x[0] if x else 0.0
        return _side(found.low > by, found.high < by)
    if rule.name == "below":
        return _side(found.high < x[0], found.low > x[0])
    if rule.name == "between":
        return _side(x[0] <= found.low and found.high <= x[1], found.high < x[0] or found.low > x[1])
    if rule.name == "exact":
        return _side(found.value == x[0], found.value != x[0])
    if rule.name == "equivalent":
        d = x[0] if x else margin
        assert d is not None, "an equivalence needs a margin"
        return _side(-d < found.low90 and found.high90 < d, found.low90 > d or found.high90 < -d)
    raise KeyError(f"Unknown rule {rule.name!r}. Known: above, below, between, exact, greater, equivalent, spread.")


def spread(found: Sequence[Interval]) -> tuple[Interval | None, str]:
    """Between-arm standard deviation with its 95 % Q-profile interval, and the word of `above 0`.

    Returns:
        None and `undecided` for fewer than two arms. `high` is infinite where the profile has no upper end.
    """
    if len(found) < 2:
        return None, UNDECIDED
    values = [each.value for each in found]
    variances = [max(1e-12, ((each.high - each.low) / (2 * stats.norm.ppf(0.5 + LEVEL / 2))) ** 2) for each in found]
    degrees = len(found) - 1
    low, high, low90, high90 = (
        _profile(values, variances, float(stats.chi2.ppf(q, degrees))) for q in (0.975, 0.025, 0.95, 0.05)
    )
    value = _profile(values, variances, float(degrees))
    return Interval(value, low, high, low90, high90), SUPPORTED if low > 0 else UNDECIDED


def over_seeds(found: Sequence[Interval]) -> Interval:
    """The mean over training seeds, with an interval that covers seeds and documents."""
    number = len(found)
    mean = Interval(*(sum(each[i] for each in found) / number for i in range(5)))
    if number == 1:
        return mean
    deviation = _deviation([each.value for each in found])
    half, half90 = (
        float(stats.t.ppf(0.5 + level / 2, number - 1)) * deviation / math.sqrt(number)
        for level in (LEVEL, EQUIVALENCE_LEVEL)
    )
    value = mean.value
    return Interval(
        value,
        value - math.hypot(value - mean.low, half),
        value + math.hypot(mean.high - value, half),
        value - math.hypot(value - mean.low90, half90),
        value + math.hypot(mean.high90 - value, half90),
    )


def all_of(words: Sequence[str]) -> str:
    """Supported if every word is; not supported if one is not; else the first word without an answer."""
    if NOT_SUPPORTED in words:
        return NOT_SUPPORTED
    return next((word for word in words if word != SUPPORTED), SUPPORTED)


def seeds_needed(values: Sequence[float], distance: float) -> str:
    """Smallest number of seeds whose t interval would be narrower than `distance`, if they spread as these do."""
    if len(values) < 2:
        return "unknown"
    deviation = _deviation(values)
    for number in range(2, MOST_SEEDS + 1):
        if float(stats.t.ppf(0.5 + LEVEL / 2, number - 1)) * deviation / math.sqrt(number) <= distance:
            return str(number)
    return f"more than {MOST_SEEDS}"


def _side(claimed: bool, other: bool) -> str:
    return SUPPORTED if claimed else NOT_SUPPORTED if other else UNDECIDED


def _deviation(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _profile(values: Sequence[float], variances: Sequence[float], target: float) -> float:
    """The tau with Q(tau^2) = target; 0 where Q(0) is below it already."""

    def q(squared: float) -> float:
        weights = [1 / (variance + squared) for variance in variances]
        centre = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
        return sum(w * (v - centre) ** 2 for w, v in zip(weights, values, strict=True))

    if q(0.0) <= target:
        return 0.0
    low, high = 0.0, 1.0
    while q(high) > target:
        high *= 4
    for _ in range(200):  # q falls strictly, so halving ends at the last bit
        middle = (low + high) / 2
        low, high = (middle, high) if q(middle) > target else (low, middle)
    return math.sqrt(high)
