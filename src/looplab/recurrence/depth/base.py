"""The contract of a depth law: an exact probability mass function, and draws that are its inverse CDF.

    draw = min { t : pmf[1] + .. + pmf[t] > u },    u one counter-based uniform per (step, row)

So the law of the draws is the pmf, and a draw depends on nothing but the run's key, the optimizer step and the row.

A law without upper end is cut at `max_steps`: with tail "clip" the mass beyond lies on max_steps, with "renormalise"
the rest is divided by its sum.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from looplab._registry import Registry
from looplab.recurrence.philox import uniforms

DEPTH_SAMPLERS: Registry[type["DepthSampler"]] = Registry("depth sampler", package="looplab.recurrence.depth")


Tail = Literal["clip", "renormalise"]
"""What becomes of the mass beyond `max_steps`."""


class Depth(ABC):
    """What is known of the depth a model was trained at: a law, a grid of step sizes, or nothing."""


class DepthSampler(Depth):
    """A law of num_steps. It owns the number of iterations only; the gradient window is the gradient strategy's."""

    @abstractmethod
    def pmf(self, step: int | None = None) -> NDArray[np.float64]:
        """Probability of T = 0 .. max_steps; entry 0 is 0 and the sum is 1 to 1e-12.

        Args:
            step: Optimizer step, for laws that move along a run; None: where they end.
        """

    def draw(self, key: int, step: int, rows: NDArray[np.int64], micro_batch: int = 0) -> NDArray[np.int64]:
        """One depth per row of the global batch, by inverse CDF. `key` is that of the stream "depth"."""
        return inverse(self.pmf(step), uniforms(key, step, rows, micro_batch))

    def mean(self, step: int | None = None) -> float:
        """Expected depth."""
        pmf = self.pmf(step)
        return float(pmf @ np.arange(len(pmf)))

    def quantile(self, q: float, step: int | None = None) -> int:
        """Smallest depth whose cumulative probability reaches `q`, 0 < q <= 1."""
        return int(np.searchsorted(np.cumsum(self.pmf(step)), q - 1e-12))

    def support(self, step: int | None = None) -> tuple[int, ...]:
        """Depths with positive probability."""
        return tuple(int(t) for t in np.flatnonzero(self.pmf(step)))

    def beyond(self, step: int | None = None) -> float:
        """Probability that was moved or removed, because it lay beyond `max_steps`."""
        return 0.0

    @property
    def nominal(self) -> float:
        """The mean that the law is given (which may not be E[T]).

        Raises:
            ValueError: A law of a shape that is not fixed by its mean.
        """
        raise ValueError(f"{self} has no mean of its own to move. Use FixedDepth, PoissonDepth or PoissonLognormal.")

    def at_mean(self, value: float) -> "DepthSampler":
        """The same law with another `nominal`; laws that have one bring it."""
        raise TypeError(f"{type(self).__name__} has a nominal mean, but no way to change it")

    def over(self, steps: int) -> "DepthSampler":
        """The law in a run of so many optimizer steps; another one only where it moves with a fraction of the run."""
        return self

    def learner(self) -> Any:
        """What moves the law along a run (`learned.DepthLearner`); None: it is not learned."""
        return None

    @property
    def of_prefix(self) -> bool:
        """True where a draw of k means prefix(k) of the full plan, False where it means `plan(k)`."""
        return False


def inverse(pmf: NDArray[np.float64], uniform: NDArray[np.float64]) -> NDArray[np.int64]:
    """Depths whose law is `pmf`, from uniforms."""
    cumulative = np.cumsum(pmf)
    return np.searchsorted(cumulative / cumulative[-1], uniform, side="right").astype(np.int64)


def cut(mass: NDArray[np.float64], tail: Tail) -> NDArray[np.float64]:
    """A law out of the probabilities of 0 .. max_steps, of which more or less is missing.

    Raises:
        ValueError: Everything is missing, so nothing could be divided.
    """
    if tail == "renormalise" and not mass.sum() > 0:
        raise ValueError(
            f"tail='renormalise' needs some probability up to max_steps. Got none up to {len(mass) - 1}. "
            "Raise max_steps."
        )
    if tail == "clip":
        mass[-1] += max(0.0, 1.0 - mass.sum())
    return mass / mass.sum()


@dataclass(frozen=True, kw_only=True)
class Grid(Depth):
    """Trained on steps of these sizes; together they make up the trained end time."""

    sizes: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Unknown(Depth):
    """The checkpoint does not say at which depth it was trained."""
