"""Any law that is written out."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from looplab.recurrence.depth.base import DEPTH_SAMPLERS, DepthSampler


@DEPTH_SAMPLERS.register("categorical")
@dataclass(frozen=True, kw_only=True)
class CategoricalDepth(DepthSampler):
    """T = 1, 2, .. with the given probabilities."""

    probs: tuple[float, ...]
    """Probability of T = 1, 2, .."""

    def __post_init__(self) -> None:
        if not self.probs or min(self.probs) < 0 or not math.isclose(sum(self.probs), 1.0, abs_tol=1e-9):
            raise ValueError(
                "CategoricalDepth.probs must be probabilities of T = 1, 2, .. that sum to 1. "
                f"Got {len(self.probs)} with sum {sum(self.probs):.6g}. Divide them by their sum."
            )

    def pmf(self, step: int | None = None) -> NDArray[np.float64]:
        mass = np.array([0.0, *self.probs])
        return mass / mass.sum()

    def __str__(self) -> str:
        return f"CategoricalDepth(mean {self.mean():.4g}, max_steps={len(self.probs)})"
