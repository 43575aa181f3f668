"""A log-normal number of iterations, rounded.

    T = round(LogNormal(mu, sigma)), at least 1            max_steps 100: E[T] = 9.438

Reference: STARS, arXiv:2605.26733.
"""

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from looplab.recurrence.depth.base import DEPTH_SAMPLERS, DepthSampler, Tail, cut


@DEPTH_SAMPLERS.register("lognormal")
@dataclass(frozen=True, kw_only=True)
class LognormalDepth(DepthSampler):
    """T = round(exp(mu + sigma * normal)), from 1 to max_steps."""

    mu: float = 2.0
    """Mean of the logarithm."""
    sigma: float = 0.7
    """Standard deviation of the logarithm."""
    max_steps: int
    """Largest depth; required, since the law has no upper end of its own. STARS has 100."""
    tail: Tail = "clip"

    def __post_init__(self) -> None:
        if not self.sigma > 0:
            raise ValueError(f"LognormalDepth.sigma must be positive. Got {self.sigma}. STARS has 0.7.")
        if self.max_steps < 1:
            raise ValueError(f"LognormalDepth.max_steps must be at least 1. Got {self.max_steps}. STARS has 100.")

    def pmf(self, step: int | None = None) -> NDArray[np.float64]:
        return cut(self._mass(), self.tail)

    def beyond(self, step: int | None = None) -> float:
        return max(0.0, 1.0 - float(self._mass().sum()))

    def _mass(self) -> NDArray[np.float64]:
        law = NormalDist(self.mu, self.sigma)
        edges = np.log(np.arange(1, self.max_steps + 1) + 0.5)
        below = np.array([law.cdf(edge) for edge in edges])
        return np.concatenate([[0.0], np.diff(below, prepend=0.0)])

    def __str__(self) -> str:
        return f"LognormalDepth({self.mu:g}, {self.sigma:g}, max_steps={self.max_steps})"
