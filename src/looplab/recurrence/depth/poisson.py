"""A Poisson number of iterations, at least one.

    T = max(1, Poisson(rate))        E[T] = rate + exp(-rate)

Parcae's "truncated Poisson" is this law with `TruncatedBPTT(window)`: what is truncated there is the gradient.

Reference: Parcae, arXiv:2604.12946.
Deviations: the law ends at `max_steps`, onto which the mass beyond it moves; the original has no bound.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from looplab.recurrence.depth.base import DEPTH_SAMPLERS, DepthSampler


@DEPTH_SAMPLERS.register("poisson")
@dataclass(frozen=True, kw_only=True)
class PoissonDepth(DepthSampler):
    """T = max(1, Poisson(rate)), clipped at `max_steps`."""

    rate: float
    """Mean of the Poisson number, before it is clipped at 1."""
    max_steps: int
    """Largest depth; required, since the law has no upper end of its own."""

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ValueError(f"PoissonDepth.rate must be positive. Got {self.rate}. Parcae has 8.")
        if self.max_steps < 1:
            raise ValueError(f"PoissonDepth.max_steps must be at least 1. Got {self.max_steps}.")

    def pmf(self, step: int = 0) -> NDArray[np.float64]:
        mass = poisson_mass(self.rate, self.max_steps)
        mass[1] += mass[0]
        mass[0] = 0.0
        return mass

    def __str__(self) -> str:
        return f"PoissonDepth({self.rate:g}, max_steps={self.max_steps})"


def poisson_mass(mean: float, last: int) -> NDArray[np.float64]:
    """Probabilities of 0 .. last under Poisson(mean), the mass beyond on `last`."""
    counts = np.arange(last + 1)
    factorials = np.array([math.lgamma(n + 1) for n in counts])
    mass = np.exp(counts * math.log(mean) - mean - factorials)
    mass[last] += max(0.0, 1.0 - mass.sum())
    return mass / mass.sum()


def poisson_reach(mean: float) -> int:
    """A count that Poisson(mean) exceeds with a probability below 1e-12."""
    return math.ceil(mean + 9 * math.sqrt(mean) + 15)
