"""A Poisson number of iterations, at least one.

    zero="clip"         T = max(1, Poisson(rate))             E[T] = rate + exp(-rate)
    zero="condition"    T = Poisson(rate) given T >= 1        E[T] = rate / (1 - exp(-rate))

Parcae's "truncated Poisson" is the first with `TruncatedBPTT(window)`: what is truncated there is the gradient.

Reference: Parcae, arXiv:2604.12946.
Deviations: the law ends at `max_steps`; the original has no bound.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from looplab.recurrence.depth.base import DEPTH_SAMPLERS, DepthSampler, Tail, cut


@DEPTH_SAMPLERS.register("poisson")
@dataclass(frozen=True, kw_only=True)
class PoissonDepth(DepthSampler):
    """T = Poisson(rate), at least 1 and at most `max_steps`."""

    rate: float
    """Mean of the Poisson number, before anything is done about zero."""
    max_steps: int
    """Largest depth; required, since the law has no upper end of its own."""
    zero: Literal["clip", "condition"] = "clip"
    """A draw of 0 counts as 1, or is drawn again."""
    tail: Tail = "clip"

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ValueError(f"PoissonDepth.rate must be positive. Got {self.rate}. Parcae has 8.")
        if self.max_steps < 1:
            raise ValueError(f"PoissonDepth.max_steps must be at least 1. Got {self.max_steps}.")

    def pmf(self, step: int | None = None) -> NDArray[np.float64]:
        return cut(self._mass(), self.tail)

    def beyond(self, step: int | None = None) -> float:
        return max(0.0, 1.0 - float(self._mass().sum()))

    def at_mean(self, value: float) -> "PoissonDepth":
        return replace(self, rate=float(value))

    @property
    def nominal(self) -> float:
        return self.rate

    def _mass(self) -> NDArray[np.float64]:
        mass = poisson_terms(self.rate, self.max_steps)
        if self.zero == "clip":
            mass[1] += mass[0]
        else:
            mass /= -math.expm1(-self.rate)
        mass[0] = 0.0
        return mass

    def __str__(self) -> str:
        return f"PoissonDepth({self.rate:g}, max_steps={self.max_steps})"


def poisson_terms(mean: float, last: int) -> NDArray[np.float64]:
    """Probabilities of 0 .. last under Poisson(mean)."""
    counts = np.arange(last + 1)
    factorials = np.array([math.lgamma(n + 1) for n in counts])
    return np.exp(counts * math.log(mean) - mean - factorials)


def poisson_mass(mean: float, last: int) -> NDArray[np.float64]:
    """Probabilities of 0 .. last under Poisson(mean), the mass beyond on `last`."""
    return cut(poisson_terms(mean, last), "clip")


def poisson_reach(mean: float) -> int:
    """A count that Poisson(mean) exceeds with a probability below 1e-12."""
    return math.ceil(mean + 9 * math.sqrt(mean) + 15)
