"""A Poisson count whose rate is log-normal, plus one: mostly shallow, with a long tail.

    tau ~ LogNormal(ln rate - sigma^2 / 2, sigma),   T = Poisson(tau) + 1,   E[T] = rate + 1 before max_steps

The law has no upper end, so `max_steps` is required. The mixture is summed over 20,001 normal quantiles in [-9, 9].

Reference: Huginn, arXiv:2502.05171, where "mean recurrence" names the mean of tau, not of T. Deviations: draws are
counter-based. `compat="huginn"` has the draws of the published code instead: log-normal first, then Poisson, then + 1,
from PyTorch's CPU generator seeded with 514229 + step, one draw for all rows of a step. The law is the same.
"""

import bisect
import functools
import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import pdtrc

from looplab.recurrence.depth.base import DEPTH_SAMPLERS, DepthSampler, Tail, cut

QUANTILES = 20_001
HUGINN_SEED = 514229
REACH = 9.0
"""The grid of the mixture: so many normal quantiles, to so many standard deviations on either side."""


@DEPTH_SAMPLERS.register("poisson_lognormal")
@dataclass(frozen=True, kw_only=True)
class PoissonLognormal(DepthSampler):
    """T = Poisson(tau) + 1, at most max_steps."""

    rate: float
    """Mean of tau; E[T] is one more."""
    max_steps: int = 0
    """The deepest draw; required, since the law has no upper end of its own: 0 is refused."""
    sigma: float = 0.5
    """Standard deviation of ln tau."""
    tail: Tail = "clip"
    compat: Literal["huginn"] | None = None
    """Draw as published runs did; for replaying them only."""

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ValueError(f"PoissonLognormal.rate must be positive. Got {self.rate}. Huginn has 32.")
        if self.sigma < 0:
            raise ValueError(f"PoissonLognormal.sigma must be at least 0. Got {self.sigma}. Huginn has 0.5.")
        if self.max_steps == 0:
            raise ValueError(
                "PoissonLognormal.max_steps is required: the law has no upper end. "
                f"For mean {self.rate:g} the 99.99 % quantile is {self._far()}."
            )
        if self.max_steps < 0:
            raise ValueError(
                f"PoissonLognormal.max_steps must be at least 1. Got {self.max_steps}. "
                f"The 99.99 % quantile is {self._far()}."
            )
        if self.compat is not None and self.tail != "clip":
            raise ValueError(f"PoissonLognormal.tail must be 'clip' with compat={self.compat!r}. Got {self.tail!r}.")

    def _far(self) -> int:
        """The 99.99 % quantile, on a grid of few quantiles of tau: this law has no bound to be summed to."""
        z = np.linspace(-REACH, REACH, 2001)
        weights = np.exp(-(z**2) / 2)
        rates = np.exp(math.log(self.rate) - self.sigma**2 / 2 + self.sigma * z)

        def beyond(steps: int) -> float:
            return float(weights @ pdtrc(steps - 1, rates) / weights.sum())

        high = 1
        while beyond(high) > 1e-4:
            high *= 2
        return bisect.bisect_left(range(high), -1e-4, lo=1, key=lambda steps: -beyond(steps))

    def pmf(self, step: int | None = None) -> NDArray[np.float64]:
        return cut(_mass(self.rate, self.sigma, self.max_steps).copy(), self.tail)

    def draw(self, key: int, step: int, rows: NDArray[np.int64], micro_batch: int = 0) -> NDArray[np.int64]:
        if self.compat is None:
            return super().draw(key, step, rows, micro_batch)
        generator = torch.Generator().manual_seed(HUGINN_SEED + step)
        mu = math.log(self.rate) - self.sigma**2 / 2
        tau = torch.zeros(1).log_normal_(mean=mu, std=self.sigma, generator=generator)
        depth = int(torch.poisson(tau, generator=generator)) + 1
        return np.full(len(rows), min(depth, self.max_steps), np.int64)

    def beyond(self, step: int | None = None) -> float:
        return max(0.0, 1.0 - float(_mass(self.rate, self.sigma, self.max_steps).sum()))

    def at_mean(self, value: float) -> "PoissonLognormal":
        return replace(self, rate=float(value))

    @property
    def nominal(self) -> float:
        return self.rate

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
    for steps in range(1, max_steps + 1):
        mass[steps] = weight @ np.exp(term)
        term = term + log_rate - np.log(steps)
    return mass
