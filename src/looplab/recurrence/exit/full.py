"""Every token runs the same number of steps: all of them, or a fixed number.

full       stop after step t = max_steps
fixed(n)   stop after step t = n
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from looplab._types import Bool
from looplab.recurrence.exit.base import EXIT_RULES, ExitRule, Seen, check_count


@EXIT_RULES.register("full")
@dataclass(frozen=True, kw_only=True)
class FullExit(ExitRule):
    """Never before the last step."""

    @property
    def early(self) -> bool:
        return False

    def observe(self, memory: Any, seen: Seen) -> tuple[Bool[Tensor, "batch seq"], Any]:
        return torch.zeros_like(seen.state[..., 0], dtype=torch.bool), memory


@EXIT_RULES.register("fixed")
@dataclass(frozen=True, kw_only=True)
class FixedExit(ExitRule):
    """After `num_steps` steps, whatever the state."""

    num_steps: int
    number: ClassVar[str] = "num_steps"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "num_steps", 1)
        if self.min_steps > self.num_steps:
            raise ValueError(
                f"FixedExit.num_steps must be at least min_steps, {self.min_steps}. Got {self.num_steps}. Raise it"
            )

    @property
    def early(self) -> bool:
        return False

    def fits(self, points: Mapping[int, int]) -> None:
        super().fits(points)
        if self.num_steps not in points:
            raise ValueError(
                f"exit: {self} must name a step after which tokens can stop: {', '.join(map(str, points))}. "
                f"Got {self.num_steps}. Set num_steps"
            )

    def observe(self, memory: Any, seen: Seen) -> tuple[Bool[Tensor, "batch seq"], Any]:
        due = (seen.steps >= self.num_steps)[:, None]
        return due.expand(seen.state.shape[:2]), memory
