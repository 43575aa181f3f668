"""Acceleration: stop when the steps themselves no longer change, twice in a row.

    |(s_t - s_{t-1}) - (s_{t-1} - s_{t-2})| / |s_t| < tau   at t - 1 and at t        norms per token, in float32

s is what the readout reads. The state before the first application takes no part, so the first number exists at t = 3
and the earliest stop is t = 4. Reference: arXiv:2509.23314, in the form relative to the state's norm.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from looplab._types import Bool, Float
from looplab.recurrence.exit.base import EXIT_RULES, ExitRule, Seen, check_positive, precise
from looplab.recurrence.spec import LoopSpec


class LastTwo(NamedTuple):
    """The states one and two steps ago, and whether the last acceleration was small."""

    one: Float[Tensor, "batch seq dim"]
    two: Float[Tensor, "batch seq dim"]
    small: Bool[Tensor, "batch seq"]


@EXIT_RULES.register("acceleration")
@dataclass(frozen=True, kw_only=True)
class AccelerationExit(ExitRule):
    """After the second step in a row whose acceleration is below `threshold` of the state's norm."""

    threshold: float
    number: ClassVar[str] = "threshold"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, self.threshold)

    def start(self, spec: LoopSpec, state: Float[Tensor, "batch seq dim"]) -> LastTwo:
        return LastTwo(state, state, torch.zeros_like(state[..., 0], dtype=torch.bool))

    def observe(self, memory: LastTwo, seen: Seen) -> tuple[Bool[Tensor, "batch seq"], LastTwo]:
        now, one, two = precise(seen.state), precise(memory.one), precise(memory.two)
        change = ((now - one) - (one - two)).norm(dim=-1) / now.norm(dim=-1)
        small = (change < self.threshold) & (seen.steps >= 3)[:, None]
        return small & memory.small, LastTwo(seen.state, memory.one, small)
