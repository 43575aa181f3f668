"""Intervals and tests over documents and items, and the calibration scores they are put on. NumPy and SciPy only.

Document bootstrap. The unit is the document. One matrix of draws W, "replicates documents", holds how often each
document occurs in each replicate; every sum of every quantity in a replicate is `W @ values`, so quantities that are
compared share their draws and a contrast of a quantity with itself is exactly 0 in every replicate.

Expanded percentile interval (Hesterberg, arXiv:1411.5279, section 3.4): the tail probability of the percentile interval
is replaced by `Phi(sqrt(n / (n - 1)) t_{alpha/2, n-1})`, which undoes the bootstrap's narrowness for small n. The plain
percentile interval is kept beside it.
"""

import dataclasses
import hashlib
import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from looplab._types import Bool, Float, Integer

_ROWS = 2048
"""Rows of W turned into float64 at a time."""


@dataclasses.dataclass(frozen=True, eq=False)
class Draws:
    """How often each document occurs in each replicate.

    Every row sums to the number of documents. Build it with `document_draws`, or `Draws.from_indices` for draws
    recorded elsewhere.
    """

    counts: Integer[np.ndarray, "replicates documents"]

    @classmethod
    def from_indices(cls, indices: Integer[np.ndarray, "replicates drawn"], num_documents: int) -> "Draws":
        """Counts of explicit document indices, one replicate per row."""
        return cls(np.stack([np.bincount(row, minlength=num_documents) for row in indices]).astype(np.uint16))

    @property
    def replicates(self) -> int:
        return self.counts.shape[0]

    @property
    def documents(self) -> int:
        return self.counts.shape[1]

    def sums(self, values: Float[np.ndarray, "documents columns"]) -> Float[np.ndarray, "replicates columns"]:
        """`W @ values` in float64, in row chunks so that W is never held in float64 as a whole."""
        result = np.empty((self.replicates, values.shape[1]))
        for start in range(0, self.replicates, _ROWS):
            rows = slice(start, start + _ROWS)
            np.matmul(self.counts[rows].astype(np.float64), values, out=result[rows])
        return result

    def first(self, replicates: int) -> "Draws":
        """The leading replicates: what a costlier computation uses and still shares with all others."""
        return Draws(self.counts[:replicates])


def document_draws(num_documents: int, replicates: int, *, seed: int, domain: str, split: str) -> Draws:
    """Multinomial draws of documents, the same wherever (seed, domain, split) and the sizes are the same.

    Raises:
        ValueError: fewer than 2 documents or fewer than 1 replicate.
    """
    if not 2 <= num_documents <= 65_535:
        raise ValueError(
            f"document_draws: num_documents must be from 2 to 65535. Got {num_documents}. Add or split documents."
        )
    if replicates < 1:
        raise ValueError(f"document_draws: replicates must be at least 1. Got {replicates}. Use 10000.")
    key = hashlib.sha256(f"{seed}\0{domain}\0{split}".encode()).digest()[:16]
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "big")))
    counts = generator.multinomial(num_documents, np.full(num_documents, 1 / num_documents), size=replicates)
    return Draws(counts.astype(np.uint16))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate with its two-sided interval: expanded percentile (`low`, `high`) and plain percentile beside it."""

    estimate: float
    low: float
    high: float
    plain_low: float
    plain_high: float
    level: float

    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


def expanded_tail(units: int, level: float) -> float:
    """Lower tail probability at which the expanded percentile interval cuts; the plain one cuts at (1 - level) / 2."""
    if units < 2:
        raise ValueError(f"expanded_tail: units must be at least 2. Got {units}. An interval needs several documents.")
    if not 0 < level < 1:
        raise ValueError(f"expanded_tail: level must lie in (0, 1). Got {level}. Use 0.95.")
    return float(stats.norm.cdf(math.sqrt(units / (units - 1)) * stats.t.ppf((1 - level) / 2, units - 1)))


def percentile_interval(
    estimate: float, replicates: Float[np.ndarray, " replicates"], *, units: int, level: float = 0.95
) -> Interval:
    """Expanded and plain percentile interval from a vector of replicates; quantiles are linear.

    `units` is the number of documents (or items) that were resampled.
    """
    if not np.isfinite(replicates).all():
        raise ValueError(
            f"percentile_interval: replicates must be finite. Got {int((~np.isfinite(replicates)).sum())} others. "
            "Withhold ratios whose denominator may reach 0."
        )
    plain, wide = (1 - level) / 2, expanded_tail(units, level)
    low, high, plain_low, plain_high = np.quantile(replicates, [wide, 1 - wide, plain, 1 - plain])
    return Interval(
        estimate=float(estimate),
        low=float(low),
        high=float(high),
        plain_low=float(plain_low),
        plain_high=float(plain_high),
        level=level,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Equivalence:
    """Two one-sided tests that an effect is zero within a margin: it is, iff the interval lies inside the margin."""

    margin: float
    low: float
    high: float
    level: float
    equivalent: bool


def equivalence(
    replicates: Float[np.ndarray, " replicates"], *, margin: float, units: int, alpha: float = 0.05
) -> Equivalence:
    """TOST at `alpha` from a vector of replicates: the (1 - 2 alpha) expanded interval lies inside (-margin, margin).

    An interval that contains zero is not evidence of zero; this is (Schuirmann 1987).
    """
    if not margin > 0:
        raise ValueError(f"equivalence: margin must be above 0. Got {margin}. Fix it before looking at the data.")
    tail = expanded_tail(units, 1 - 2 * alpha)
    low, high = (float(q) for q in np.quantile(replicates, [tail, 1 - tail]))
    return Equivalence(
        margin=margin, low=low, high=high, level=1 - 2 * alpha, equivalent=-margin < low and high < margin
    )


def mean_interval(values: Float[np.ndarray, " items"], *, level: float = 0.95) -> Interval:
    """t interval of a mean over items; the normal interval stands in the plain fields."""
    items = len(values)
    if items < 2:
        raise ValueError(f"mean_interval: values must be of 2 items at least. Got {items}. Measure more.")
    mean, error = float(values.mean()), float(values.std(ddof=1)) / math.sqrt(items)
    half, plain = (float(q) * error for q in (stats.t.ppf((1 + level) / 2, items - 1), stats.norm.ppf((1 + level) / 2)))
    return Interval(
        estimate=mean, low=mean - half, high=mean + half, plain_low=mean - plain, plain_high=mean + plain, level=level
    )


def wilson(successes: int, trials: int, *, level: float = 0.95) -> Interval:
    """Score interval of a proportion (Wilson 1927); the normal (Wald) interval stands in the plain fields."""
    if not 0 <= successes <= trials or trials == 0:
        raise ValueError(
            f"wilson: successes must lie in 0..trials with trials above 0. Got {successes} of {trials}. Count again."
        )
    z = float(stats.norm.ppf((1 + level) / 2))
    p = successes / trials
    centre = (p + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials**2)) / (1 + z * z / trials)
    wald = z * math.sqrt(p * (1 - p) / trials)
    return Interval(
        estimate=p,
        low=0.0 if successes == 0 else centre - half,
        high=1.0 if successes == trials else centre + half,
        plain_low=p - wald,
        plain_high=p + wald,
        level=level,
    )


def paired_difference(
    first: Bool[np.ndarray, " items"], second: Bool[np.ndarray, " others"], *, level: float = 0.95
) -> Interval:
    """Difference of two proportions on the same items, first - second (Newcombe 1998, method 10).

    Square and add of the two Wilson intervals, less their correlation; so items that all agree give no interval of
    zero width. The normal interval stands in the plain fields.
    """
    if first.shape != second.shape or len(first) == 0:
        raise ValueError(
            f"paired_difference: both must be about the same items. Got {len(first)} and {len(second)}. Grade all."
        )
    items = len(first)
    a, b, c, d = (int((x & y).sum()) for x in (first, ~first) for y in (second, ~second))
    one, other = wilson(a + b, items, level=level), wilson(a + c, items, level=level)
    product = float(a + b) * (c + d) * (a + c) * (b + d)
    excess = float(a * d - b * c)
    excess = max(excess - items / 2, 0.0) if excess > 0 else excess
    phi = excess / math.sqrt(product) if product else 0.0
    p, q = one.estimate, other.estimate
    down, up = p - one.low, one.high - p
    down_other, up_other = q - other.low, other.high - q
    low = math.sqrt(max(0.0, down**2 - 2 * phi * down * up_other + up_other**2))
    high = math.sqrt(max(0.0, up**2 - 2 * phi * up * down_other + down_other**2))
    wald = float(stats.norm.ppf((1 + level) / 2)) * math.sqrt(b + c - (b - c) ** 2 / items) / items
    return Interval(
        estimate=p - q, low=p - q - low, high=p - q + high, plain_low=p - q - wald, plain_high=p - q + wald, level=level
    )


def mcnemar_exact(only_first: int, only_second: int) -> float:
    """Two-sided exact p-value that two paired systems succeed equally often, from the two discordant counts."""
    if min(only_first, only_second) < 0:
        raise ValueError(
            f"mcnemar_exact: discordant counts must not be negative. Got {only_first} and {only_second}. Count again."
        )
    discordant = only_first + only_second
    return 1.0 if discordant == 0 else float(stats.binomtest(only_first, discordant, 0.5).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Step-down adjusted p-values (Holm 1979), in the order given."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, running = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = running
    return adjusted


def expected_calibration_error(
    confidence: Float[np.ndarray, " items"], correct: Bool[np.ndarray, " items"], *, bins: int = 15, mass: bool = False
) -> float:
    """`sum_b n_b / n |accuracy_b - confidence_b|` over bins (low, high], the first closed (Guo et al. 2017).

    Bins have equal width, or equal mass with `mass`: then edges are quantiles of the confidence, and equal confidences
    share a bin, so the result does not depend on the order of the items.
    """
    if len(confidence) == 0:
        raise ValueError("expected_calibration_error: confidence must not be empty. Got 0 items. Score some.")
    confidence = confidence.astype(np.float64)
    edges = np.quantile(confidence, np.linspace(0, 1, bins + 1)) if mass else np.linspace(0, 1, bins + 1)
    index = np.clip(np.searchsorted(edges, confidence, side="left") - 1, 0, bins - 1)
    surplus = np.bincount(index, weights=correct - confidence, minlength=bins)
    return float(np.abs(surplus).sum() / len(confidence))


def brier(probabilities: Float[np.ndarray, "items classes"], labels: Integer[np.ndarray, " items"]) -> float:
    """Mean of `1 - 2 p_label + sum p^2`, in [0, 2] (Brier 1950)."""
    chosen = probabilities[np.arange(len(labels)), labels]
    return float(np.mean(1 - 2 * chosen + np.square(probabilities).sum(axis=1)))


def auroc(scores: Float[np.ndarray, " items"], positive: Bool[np.ndarray, " items"]) -> float:
    """Probability that a positive item scores above a negative one, ties counting half (Mann-Whitney)."""
    positives = int(positive.sum())
    negatives = len(positive) - positives
    if positives == 0 or negatives == 0:
        raise ValueError(
            f"auroc: both classes must occur. Got {positives} positive and {negatives} negative items. Add the other."
        )
    ranks = stats.rankdata(scores)
    return float((ranks[positive].sum() - positives * (positives + 1) / 2) / (positives * negatives))
