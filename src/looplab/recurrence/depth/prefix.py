"""A draw of k trains the first k applications of the full plan, not k iterations of every block.

Reference: the training arms of Dau, Khuat, Dung, "Beyond Depth Truncation", arXiv:2609.19934.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from looplab.recurrence.depth.base import DEPTH_SAMPLERS, DepthSampler


@DEPTH_SAMPLERS.register("prefix")
@dataclass(frozen=True, kw_only=True)
class PrefixDepth(DepthSampler):
    """k from `law`; the step runs prefix(k) of the full plan. Mean and quantiles are in applications."""

    law: DepthSampler

    def __post_init__(self) -> None:
        if self.law.of_prefix:
            raise ValueError("PrefixDepth.law must be a law of num_steps. Got another PrefixDepth.")

    def over(self, steps: int) -> "PrefixDepth":
        return replace(self, law=self.law.over(steps))

    def pmf(self, step: int | None = None) -> NDArray[np.float64]:
        return self.law.pmf(step)

    def draw(self, key: int, step: int, rows: NDArray[np.int64], micro_batch: int = 0) -> NDArray[np.int64]:
        return self.law.draw(key, step, rows, micro_batch)

    def beyond(self, step: int | None = None) -> float:
        return self.law.beyond(step)

    def learner(self) -> Any:
        return self.law.learner()

    @property
    def of_prefix(self) -> bool:
        return True

    def __str__(self) -> str:
        return f"PrefixDepth({self.law})"
