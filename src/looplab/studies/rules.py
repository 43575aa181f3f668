"""Decision rules: intervals in, a word out. The rule and its numbers are fixed before anything runs.

    above(x)          supported: low > x             not supported: high < x
    below(x)          the mirror image
    between(x, y)     supported: x <= low, high <= y   not supported: wholly outside
    exact(x)          equality of counts and facts; no interval
    greater(d)        of a - b: above d, or above 0
    equivalent(d)     the 90 % interval inside (-d, d); not supported: wholly outside. Two one-sided tests at 5 %
    two_sided(d)      not supported: equivalent(d); else supported: 0 outside the interval, whose side is printed
    law(p)            of a share of replicates: supported from p on; not supported up to 1 - p
    spread            between-arm variance above 0: Cochran's Q against chi2, lower end of the Q-profile interval

Everything else is undecided. What they decide on is a value, a difference, or one of

    sum_i w_i y_i     effect, interaction, trend: contrasts per seed, weights that sum to 0; a trend has
                      w_i = (x_i - m) / sum (x - m)^2, the least-squares slope on x, with m the mean of x
    exp(log a - log b)    ratio: decided on logarithms
    AUC(p) - AUC(q)   of two predictors of one outcome over runs; the bootstrap draws whole clusters
    median            of paired ratios of times, between order statistics

Over training seeds, each side of the interval is

    sqrt(t^2 + d^2)      t: side of the t interval over the seeds' values;   d: mean side of their document intervals

so seeds that happen to agree give no interval of zero width, and many documents do not hide a spread of seeds. The two
add because all seeds are audited on the same documents: their error is shared, and no spread of seeds shows it. For the
same reason a difference of two arms has as document interval the worst case [a.low - b.high, a.high - b.low]. A
contrast of more cells takes the root of the sum of squares: on equal items errors do not correlate negatively, and with
weights that sum to 0 what is shared cancels.

References: Schuirmann, J. Pharmacokinetics and Biopharmaceutics 15, 1987 (equivalence); Viechtbauer, Statistics in
    Medicine 26, 2007 (Q-profile).
Deviations: the sum of squares contains the hull of both intervals, and stands in place of a bootstrap with seeds as
    outer level, which needs draws that a stored audit does not hold. `two_sided`: a difference that is clear of 0 and
    yet inside the margin is no difference.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from looplab.intervals import percentile_interval
from looplab.records import Rule

SUPPORTED, NOT_SUPPORTED, UNDECIDED = "supported", "not supported", "undecided"
UNIDENTIFIED = "not identifiable at this scale"
WORDS = (SUPPORTED, NOT_SUPPORTED, UNDECIDED, UNIDENTIFIED)
NOT_RUN = "-"
"""In place of a word where nothing was run."""
LEVEL, EQUIVALENCE_LEVEL = 0.95, 0.90
MIN_SEEDS = 3
MOST_SEEDS = 50
NEAR_CHANCE, CEILING, FEWEST_ITEMS = 0.02, 0.98, 100
"""Accuracies this near to chance, or from this on, compare nothing; nor do fewer items."""
REPETITIONS = 7
"""Fewest repetitions of a time."""
SUREST = 0.95
"""Share of replicates that decides a law."""
DRAWS = 10_000
Number = float | int


def above(x: Number) -> Rule:
    """The interval lies above x."""
    return Rule(name="above", numbers=(float(x),))


def below(x: Number) -> Rule:
    """The interval lies below x."""
    return Rule(name="below", numbers=(float(x),))


def between(x: Number, y: Number) -> Rule:
    """The interval lies in [x, y]."""
    return Rule(name="between", numbers=(float(x), float(y)))


def exact(x: Number) -> Rule:
    """A count or fact equals x; one seed is enough."""
    return Rule(name="exact", numbers=(float(x),))


def greater(by: Number = 0.0) -> Rule:
    """The first arm exceeds the second by more than `by`."""
    return Rule(name="greater", numbers=(float(by),) if by else ())


def equivalent(margin: Number) -> Rule:
    """No effect within the margin."""
    return Rule(name="equivalent", numbers=(float(margin),))


def two_sided(margin: Number) -> Rule:
    """An effect of either sign, against none within the margin."""
    return Rule(name="two_sided", numbers=(float(margin),))


def law(share: Number = SUREST) -> Rule:
    """Something holds in this share of the replicates of a fit."""
    return Rule(name="law", numbers=(float(share),))


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
    if rule.name == "two_sided":
        if -x[0] < found.low90 and found.high90 < x[0]:
            return NOT_SUPPORTED
        return _side(found.low > 0 or found.high < 0, False)
    if rule.name == "law":
        return _side(found.value >= x[0], found.value <= 1 - x[0])
    raise KeyError(
        f"Unknown rule {rule.name!r}. Known: above, below, between, exact, greater, equivalent, two_sided, law, spread."
    )


def reversed_claim(rule: Rule, found: Interval) -> bool:
    """Whether the mirrored claim would be supported: the effect is there, with the other sign."""
    x = rule.numbers[0] if rule.numbers else 0.0
    if rule.name == "greater" or (rule.name == "above" and x >= 0):
        return found.high < -x
    return rule.name == "below" and x <= 0 and found.low > -x


def contrast(found: Sequence[Interval], weights: Sequence[float]) -> Interval:
    """A weighted sum of cells."""
    if sorted(weights) == [-1.0, 1.0]:
        one, other = found if weights[0] > 0 else found[::-1]
        return one - other
    value = sum(w * each.value for w, each in zip(weights, found, strict=True))

    def side(low: int, high: int, sign: float) -> float:
        reached = (
            w * (each[high] - each.value) if w * sign > 0 else w * (each[low] - each.value)
            for w, each in zip(weights, found, strict=True)
        )
        return value + sign * math.hypot(*reached)

    return Interval(value, side(1, 2, -1.0), side(1, 2, 1.0), side(3, 4, -1.0), side(3, 4, 1.0))


def slope_weights(at: Sequence[float]) -> tuple[float, ...]:
    """Weights with which the least-squares slope on `at` is a sum.

    Raises:
        ValueError: Fewer than two different points.
    """
    mean = math.fsum(at) / len(at)
    squares = math.fsum((x - mean) ** 2 for x in at)
    if len(at) < 2 or not squares > 0:
        raise ValueError(f"trend: at must have two different points or more. Got {list(at)}. Give it another axis.")
    return tuple((x - mean) / squares for x in at)


def mapped(found: Interval, function: Callable[[float], float]) -> Interval:
    """The image of a value and its interval under a growing function."""
    return Interval(*map(function, found))


def sign_flip(values: Sequence[float]) -> float:
    """Two-sided p of the mean over seeds when every seed's sign might as well be the other; exact up to 16 seeds.

    With n seeds it is at least 2 / 2^n, so three seeds alone never reach .05.
    """
    observed = abs(math.fsum(values))
    if len(values) > 16:
        signs = np.random.default_rng(0).choice((-1.0, 1.0), size=(DRAWS, len(values)))
    else:
        signs = np.array(list(itertools.product((-1.0, 1.0), repeat=len(values))))
    return float((np.abs(signs @ np.array(values)) >= observed * (1 - 1e-12)).mean())


def auc_difference(
    first: Sequence[float], second: Sequence[float], outcome: Sequence[bool], clusters: Sequence[str]
) -> Interval | None:
    """AUC of the first predictor minus that of the second, with a bootstrap over whole clusters of runs.

    A cluster that is drawn n times weighs n: of W = draws x clusters, AUC = (W U W) / (W P) (W N), with U_ij the wins
    of positive runs of cluster i over negative ones of j (ties half), P and N how many there are of each. Replicates in
    which one outcome does not occur are left out.

    Returns:
        None where there are fewer than two clusters, or one outcome alone.
    """
    names = list(dict.fromkeys(clusters))
    positive = np.array(outcome, dtype=bool)
    if len(names) < 2 or positive.all() or not positive.any():
        return None
    member = np.array([[cluster == name for cluster in clusters] for name in names], dtype=float)
    ups, downs = member[:, positive], member[:, ~positive]
    drawn = np.random.default_rng(0).multinomial(len(names), np.full(len(names), 1 / len(names)), size=DRAWS)
    pairs = (drawn @ ups.sum(1)) * (drawn @ downs.sum(1))
    drawn, pairs = drawn[pairs > 0], pairs[pairs > 0]
    value, found = 0.0, np.zeros(len(drawn))
    for sign, scores in ((1.0, np.array(first)), (-1.0, np.array(second))):
        apart = scores[positive][:, None] - scores[~positive][None, :]
        wins = (apart > 0) + 0.5 * (apart == 0)
        value += sign * float(wins.mean())
        found += sign * np.einsum("di,ij,dj->d", drawn, ups @ wins @ downs.T, drawn) / pairs
    wide, narrow = (
        percentile_interval(value, found, units=len(names), level=level) for level in (LEVEL, EQUIVALENCE_LEVEL)
    )
    return Interval(value, wide.low, wide.high, narrow.low, narrow.high)


def median_ratio(ours: Sequence[float], reference: Sequence[float]) -> Interval:
    """Median of paired ratios of times, between the order statistics that hold it with 95 % and 90 %.

    With 7 pairs both are the smallest and the largest.

    Raises:
        ValueError: Fewer pairs than `REPETITIONS`.
    """
    if len(ours) != len(reference) or len(ours) < REPETITIONS:
        raise ValueError(
            f"time: must have {REPETITIONS} pairs of repetitions or more. Got {len(ours)} and {len(reference)}. "
            "Measure both arms in turn."
        )
    ratios = sorted(a / b for a, b in zip(ours, reference, strict=True))

    def ends(level: float) -> tuple[float, float]:
        dropped = 0  # at each end; the median is outside what is left with 2 P(at most so many of the pairs lie below)
        while 2 * stats.binom.cdf(dropped + 1, len(ratios), 0.5) <= 1 - level:
            dropped += 1
        return ratios[dropped], ratios[-1 - dropped]

    return Interval(float(np.median(ratios)), *ends(LEVEL), *ends(EQUIVALENCE_LEVEL))


def guard(values: Sequence[float], chances: Sequence[float | None], items: Sequence[int | None]) -> str:
    """Why arms cannot be compared on an accuracy: floor, ceiling, too few events; empty where they can."""
    counted = [n for n in items if n is not None]
    if counted and min(counted) < FEWEST_ITEMS:
        return f"too few events: {min(counted)} items, {FEWEST_ITEMS} needed"
    if any(chance is None for chance in chances):
        return ""
    text = ", ".join(f"{value:.3g}" for value in values)
    if all(value <= chance + NEAR_CHANCE for value, chance in zip(values, chances, strict=True) if chance is not None):
        return f"floor: {text}, chance {max(c for c in chances if c is not None):.3g}"
    return f"ceiling: {text}" if min(values) >= CEILING else ""


def at_level(found: Interval, level: float) -> Interval:
    """Document intervals at 1 - alpha and 1 - 2 alpha in place of 95 % and 90 %: sides grow as normal quantiles do."""
    alpha = 1 - level
    wide, narrow = (
        float(stats.norm.ppf(1 - new / 2) / stats.norm.ppf(1 - old / 2))
        for new, old in ((alpha, 0.05), (2 * alpha, 0.1))
    )
    value = found.value
    return Interval(
        value,
        value + wide * (found.low - value),
        value + wide * (found.high - value),
        value + narrow * (found.low90 - value),
        value + narrow * (found.high90 - value),
    )


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


def over_seeds(found: Sequence[Interval], *, level: float = LEVEL) -> Interval:
    """The mean over training seeds, with an interval that covers seeds and documents.

    Args:
        level: Of the first interval; that of the equivalence test errs twice as often.
    """
    number = len(found)
    mean = Interval(*(sum(each[i] for each in found) / number for i in range(5)))
    if number == 1:
        return mean
    deviation = _deviation([each.value for each in found])
    half, half90 = (
        float(stats.t.ppf(0.5 + each / 2, number - 1)) * deviation / math.sqrt(number)
        for each in (level, EQUIVALENCE_LEVEL if level == LEVEL else 2 * level - 1)
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


def any_of(words: Sequence[str]) -> str:
    """Supported if one word is; not supported if all are not; else the first word without an answer."""
    if SUPPORTED in words:
        return SUPPORTED
    return next((word for word in words if word != NOT_SUPPORTED), NOT_SUPPORTED)


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
