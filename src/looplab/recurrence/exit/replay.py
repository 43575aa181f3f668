"""Replay: every token stops where it stopped in a recorded run.

    stop after step t = depths[row, token]

So two runs, or two ways of computing the same run, get identical exits whatever their numerics.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from looplab._types import Bool, Float, Int
from looplab.recurrence.exit.base import EXIT_RULES, ExitRule, Seen
from looplab.recurrence.spec import LoopSpec


class Recorded(NamedTuple):
    """Depths of the tokens."""

    depths: Int[Tensor, "batch seq"]


@EXIT_RULES.register("replay")
@dataclass(frozen=True, kw_only=True, eq=False)
class ReplayExit(ExitRule):
    """After `depths` steps, one number for every token of the call (such as the `steps` of an `ExitOutput`)."""

    depths: Int[Tensor, "batch seq"]

    def __post_init__(self) -> None:
        super().__post_init__()
        depths = self.depths
        if not isinstance(depths, Tensor) or depths.dim() != 2 or depths.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"ReplayExit.depths must be Int[batch, seq]. Got {depths!r}.")
        if depths.numel() and int(depths.min()) < 1:
            row, token = (int(i) for i in (depths < 1).nonzero()[0])
            raise ValueError(
                f"ReplayExit.depths must be at least 1. Got {int(depths[row, token])} at row {row}, token {token}."
            )

    def fits(self, points: Mapping[int, int]) -> None:
        super().fits(points)
        beyond = self.depths > max(points)
        if bool(beyond.any()):
            row, token = (int(i) for i in beyond.nonzero()[0])
            raise ValueError(
                f"ReplayExit.depths must be at most num_steps, {max(points)}. Got {int(self.depths[row, token])} at "
                f"row {row}, token {token}. Raise num_steps"
            )

    def start(self, spec: LoopSpec, state: Float[Tensor, "batch seq dim"]) -> Recorded:
        if self.depths.shape != state.shape[:2]:
            raise ValueError(
                f"ReplayExit.depths must have one entry per token of the call, {tuple(state.shape[:2])}. "
                f"Got {tuple(self.depths.shape)}. Cut out the call's tokens"
            )
        return Recorded(self.depths.to(state.device))

    def observe(self, memory: Recorded, seen: Seen) -> tuple[Bool[Tensor, "batch seq"], Recorded]:
        return seen.steps[:, None] >= memory.depths, memory

    def __str__(self) -> str:
        rows, tokens = self.depths.shape
        return f"replay({rows}x{tokens})"
