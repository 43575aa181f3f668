"""Every step runs the same number of iterations."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from looplab.recurrence.depth.base import DEPTH_SAMPLERS, DepthSampler


@DEPTH_SAMPLERS.register("fixed")
@dataclass(frozen=True, kw_only=True)
class FixedDepth(DepthSampler):
    """T = num_steps."""

    num_steps: int

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"FixedDepth.num_steps must be at least 1. Got {self.num_steps}.")

    def pmf(self, step: int | None = None) -> NDArray[np.float64]:
        mass = np.zeros(self.num_steps + 1)
        mass[-1] = 1.0
        return mass

    def at_mean(self, value: float) -> "FixedDepth":
        return FixedDepth(num_steps=max(1, math.ceil(value)))

    @property
    def nominal(self) -> float:
        return float(self.num_steps)

    def __str__(self) -> str:
        return f"FixedDepth({self.num_steps})"
