"""Every depth between two bounds is equally likely."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from looplab.recurrence.depth.base import DEPTH_SAMPLERS, DepthSampler


@DEPTH_SAMPLERS.register("uniform")
@dataclass(frozen=True, kw_only=True)
class UniformDepth(DepthSampler):
    """T ~ U{low .. high}, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if self.low < 1:
            raise ValueError(
                f"UniformDepth.low must be at least 1. Got {self.low}. "
                "A model with no iteration is num_steps=0 at evaluation only."
            )
        if self.high < self.low:
            raise ValueError(f"UniformDepth.high must be at least low ({self.low}). Got {self.high}.")

    def pmf(self, step: int | None = None) -> NDArray[np.float64]:
        mass = np.zeros(self.high + 1)
        mass[self.low :] = 1.0 / (self.high - self.low + 1)
        return mass

    def __str__(self) -> str:
        return f"UniformDepth({self.low}, {self.high})"
