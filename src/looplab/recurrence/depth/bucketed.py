"""A law on few depths, for loops that are captured whole, one graph per depth.

    b_i < T < b_{i+1}:   T becomes b_{i+1} with probability (T - b_i) / (b_{i+1} - b_i), else b_i

So the mean stays what it is, and the variance grows by sum over T of p_T (T - b_i) (b_{i+1} - T). The law is ours.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from looplab.recurrence.depth.base import DEPTH_SAMPLERS, DepthSampler


@DEPTH_SAMPLERS.register("bucketed")
@dataclass(frozen=True, kw_only=True)
class Bucketed(DepthSampler):
    """`law`, moved onto the depths `edges`."""

    law: DepthSampler
    edges: tuple[int, ...]
    """The depths that occur, ascending; the first and the last are the ends of the law's support."""
    most: int = 8
    """Largest number of edges."""

    def __post_init__(self) -> None:
        support = self.law.support()
        low, high = support[0], support[-1]
        if list(self.edges) != sorted(set(self.edges)) or (self.edges[:1], self.edges[-1:]) != ((low,), (high,)):
            raise ValueError(
                f"Bucketed.edges must ascend from {low} to {high}, the ends of the support. Got {self.edges}."
            )
        if len(self.edges) > self.most:
            raise ValueError(
                f"Bucketed.edges must be at most {self.most}. Got {len(self.edges)}. Leave some out or raise most."
            )

    def over(self, steps: int) -> "Bucketed":
        return replace(self, law=self.law.over(steps))

    def pmf(self, step: int | None = None) -> NDArray[np.float64]:
        mass, found = self.law.pmf(step), np.zeros(self.edges[-1] + 1)
        for depth in np.flatnonzero(mass):
            upper = int(np.searchsorted(self.edges, depth))
            high = self.edges[upper]
            low = self.edges[upper - 1] if high > depth else high
            part = (depth - low) / (high - low) if high > low else 1.0
            found[high] += mass[depth] * part
            found[low] += mass[depth] * (1.0 - part)
        return found

    def beyond(self, step: int | None = None) -> float:
        return self.law.beyond(step)

    @property
    def of_prefix(self) -> bool:
        return self.law.of_prefix

    def __str__(self) -> str:
        return f"Bucketed({self.law}, {self.edges})"
