"""A Poisson count whose rate is log-normal, plus one: mostly shallow, with a long tail.

    tau ~ LogNormal(ln rate - sigma^2 / 2, sigma),   T = Poisson(tau) + 1,   E[T] = rate + 1 before max_steps

The law has no upper end, so `max_steps` is required; what lies beyond it counts as max_steps. The mixture is summed
over 20,001 normal quantiles in [-9, 9].

Reference: Huginn, arXiv:2502.05171, where "mean recurrence" names the mean of tau, not of T. Deviations: draws are
counter-based, so the published sequence of depths is not replayed, only its law.
"""

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from looplab.recurrence.depth.base import DEPTH_SAMPLERS, DepthSampler

QUANTILES = 20_001
REACH = 9.0
"""The grid of the mixture: so many normal quantiles, to so many standard deviations on either side."""


@DEPTH_SAMPLERS.register("poisson_lognormal")
@dataclass(frozen=True, kw_only=True)
class PoissonLognormal(DepthSampler):
    """T = Poisson(tau) + 1, at most max_steps."""

    rate: float
    """Mean of tau; E[T] is one more."""
    max_steps: int
    """The deepest draw, which takes the mass beyond it."""
    sigma: float = 0.5
    """Standard deviation of ln tau."""

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ValueError(f"PoissonLognormal.rate must be positive. Got {self.rate}. Huginn has 32.")
        if self.sigma < 0:
            raise ValueError(f"PoissonLognormal.sigma must be at least 0. Got {self.sigma}. Huginn has 0.5.")
        if self.max_steps < 1:
            raise ValueError(
                f"PoissonLognormal.max_steps must be at least 1. Got {self.max_steps}. "
                "The 99.99 % quantile is a fair bound."
            )

    def pmf(self, step: int = 0) -> NDArray[np.float64]:
        return _mass(self.rate, self.sigma, self.max_steps).copy()

    def __str__(self) -> str:
        return f"PoissonLognormal({self.rate:g}, max_steps={self.max_steps})"


@functools.lru_cache(maxsize=32)
def _mass(rate: float, sigma: float, max_steps: int) -> NDArray[np.float64]:
    normal = np.linspace(-REACH, REACH, QUANTILES)
    weight = np.exp(-normal * normal / 2)
    weight /= weight.sum()
    log_rate = np.log(rate) - sigma**2 / 2 + sigma * normal
    term = -np.exp(log_rate)  # log Poisson(0; tau)
    mass = np.zeros(max_steps + 1)
    for steps in range(1, max_steps):
        mass[steps] = weight @ np.exp(term)
        term = term + log_rate - np.log(steps)
    mass[max_steps] = max(0.0, 1.0 - mass.sum())
    return mass
