"""The contract of a depth law: an exact probability mass function, and draws that are its inverse CDF.

    draw = min { t : pmf[1] + .. + pmf[t] > u },    u one counter-based uniform per (step, row)

So the law of the draws is the pmf, and a draw depends on nothing but the run's key, the optimizer step and the row.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from looplab._registry import Registry
from looplab.recurrence.philox import uniforms

DEPTH_SAMPLERS: Registry[type["DepthSampler"]] = Registry("depth sampler", package="looplab.recurrence.depth")


class Depth(ABC):
    """What is known of the depth a model was trained at: a law, a grid of step sizes, or nothing."""


class DepthSampler(Depth):
    """A law of num_steps. It owns the number of iterations only; the gradient window is the gradient strategy's."""

    @abstractmethod
    def pmf(self, step: int = 0) -> NDArray[np.float64]:
        """Probability of T = 0 .. max_steps at optimizer step `step`; entry 0 is 0 and the sum is 1 to 1e-12."""

    def draw(self, key: int, step: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """One depth per row of the global batch, by inverse CDF. `key` is that of the stream "depth"."""
        cumulative = np.cumsum(self.pmf(step))
        drawn = np.searchsorted(cumulative / cumulative[-1], uniforms(key, step, rows), side="right")
        return drawn.astype(np.int64)

    def mean(self, step: int = 0) -> float:
        """Expected depth."""
        pmf = self.pmf(step)
        return float(pmf @ np.arange(len(pmf)))

    def quantile(self, q: float, step: int = 0) -> int:
        """Smallest depth whose cumulative probability reaches `q`, 0 < q <= 1."""
        return int(np.searchsorted(np.cumsum(self.pmf(step)), q - 1e-12))

    def support(self, step: int = 0) -> tuple[int, ...]:
        """Depths with positive probability."""
        return tuple(int(t) for t in np.flatnonzero(self.pmf(step)))

    @property
    def of_prefix(self) -> bool:
        """True where a draw of k means prefix(k) of the full plan, False where it means `plan(k)`."""
        return False


@dataclass(frozen=True, kw_only=True)
class Grid(Depth):
    """Trained on steps of these sizes; together they make up the trained end time."""

    sizes: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Unknown(Depth):
    """The checkpoint does not say at which depth it was trained."""
