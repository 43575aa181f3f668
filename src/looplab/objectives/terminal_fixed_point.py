"""Terminal fixed point: the last application should change nothing.

    L = CE(h_T) + weight * mean over labels of RMS(h_T - h_{T-1})          RMS per token: |.| / sqrt(d)

The gradient goes through both states. On a scalar core h' = a h + b it drives |a| below 1: extra iterations then stay
where they are.

Reference: arXiv:2608.18222 (weights from .005 to .2 were useful, .05 their default). Ours: the norm per token, and the
part of the state that the readout starts from. Left out: scaling by the gate of a gated update, of which we have no
confirmed definition.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from looplab._types import Float, Int
from looplab.objectives.base import (
    OBJECTIVES,
    LossParts,
    Objective,
    Part,
    Rollout,
    labelled,
    scored_mask,
)
from looplab.objectives.readout import token_losses
from looplab.recurrence.exit.base import readable


@OBJECTIVES.register("terminal_fixed_point")
@dataclass(frozen=True, kw_only=True)
class TerminalFixedPoint(Objective):
    """Next-token loss at the drawn depth, and the size of the last change."""

    weight: float = 0.05
    """Of the last change."""
    chunk: int | None = None
    """Tokens per readout chunk; None: all logits at once."""

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise ValueError(f"TerminalFixedPoint.weight must be at least 0. Got {self.weight}.")
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"TerminalFixedPoint.chunk must be at least 1 token, or None. Got {self.chunk}.")

    def reads(self, length: int) -> tuple[int, int]:
        """The last two states."""
        return (length - 1, length)

    def counts(self, labels: Int[Tensor, "batch seq *cells"], length: int = 1) -> dict[str, int]:
        """Positions with a label, for both parts."""
        scored = labelled(self, labels)
        return {"ce": scored, "fixed_point": scored}

    def loss(self, rollout: Rollout, labels: Int[Tensor, "batch seq *cells"]) -> LossParts:
        """The parts `ce` and `fixed_point`."""
        length, scored = len(rollout.plan), scored_mask(labels)
        losses = token_losses(rollout.model, rollout.hidden(length), labels, chunk=self.chunk, ledger=rollout.ledger)
        before, after = (readable(rollout.model.spec, rollout.states[k], labels.shape[1]) for k in (length - 1, length))
        change, count = rms(after - before)[scored].sum(), int(scored.sum())
        return LossParts({"ce": Part(losses.sum(), count, 1.0), "fixed_point": Part(change, count, self.weight)})


def rms(x: Float[Tensor, "*tokens dim"]) -> Float[Tensor, "*tokens"]:
    """Root mean square over the last axis, whose gradient at 0 is 0."""
    return torch.linalg.vector_norm(x, dim=-1) / x.shape[-1] ** 0.5
