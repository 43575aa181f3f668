"""Control of `TerminalFixedPoint`: the last application should change no decoded probability.

    L = CE(h_T) + weight * mean over labels of |softmax(logits_T) - softmax(logits_{T-1})|_2

The state itself may go on moving wherever the readout does not look, so neither the stability nor the safe extra depth
of the fixed point is expected of it. Reference: the control of arXiv:2608.18222; the norm is ours. With several cells
per position their distances add.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from looplab._types import Int
from looplab.objectives.base import (
    IGNORED,
    OBJECTIVES,
    LossParts,
    Objective,
    Part,
    Rollout,
    labelled,
    scored_mask,
)


@OBJECTIVES.register("decoded_change")
@dataclass(frozen=True, kw_only=True)
class DecodedChange(Objective):
    """Next-token loss at the drawn depth, and the last change of the decoded law."""

    weight: float = 0.05
    """Of the last change."""

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise ValueError(f"DecodedChange.weight must be at least 0. Got {self.weight}.")

    def reads(self, length: int) -> tuple[int, int]:
        """The last two states."""
        return (length - 1, length)

    def counts(self, labels: Int[Tensor, "batch seq *cells"], length: int = 1) -> dict[str, int]:
        """Positions with a label, for both parts."""
        scored = labelled(self, labels)
        return {"ce": scored, "decoded_change": scored}

    def loss(self, rollout: Rollout, labels: Int[Tensor, "batch seq *cells"]) -> LossParts:
        """The parts `ce` and `decoded_change`."""
        length, scored = len(rollout.plan), scored_mask(labels)
        before, after = (rollout.laws(k, labels) for k in (length - 1, length))
        ce = functional.cross_entropy(after.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        change = torch.linalg.vector_norm(after.softmax(-1) - before.softmax(-1), dim=-1)
        change = change.flatten(2).sum(-1) if labels.dim() > 2 else change
        count = int(scored.sum())
        return LossParts({"ce": Part(ce, count, 1.0), "decoded_change": Part(change[scored].sum(), count, self.weight)})
