"""Latent anchoring: a model that drifts when it runs on is bound to the state it had at a depth where it worked.

    L = CE(h_r) + weight * mean over labels of |h_r - sg(h_a)|^2 / |sg(h_a)|^2          a = 8, r ~ U{16..128}

Only a low-rank change of the core is trained: give the finished model `signal=PerIterationLoRA(rank=16, max=1, ..)`
with `beyond=ClampLast()`, which is one change for all iterations, begin at its weights (`RunConfig.start`) and set
`train_only=("layer_signals",)`. Untrained, the change is 0 and the outputs are those of the finished model.

Reference: arXiv:2608.18222. Ours: the gradient window of 8 (`TruncatedBPTT(window=8)`) and 2,000 steps in recipes; the
part of the state that the readout starts from.
"""

from dataclasses import dataclass

from torch import Tensor

from looplab._types import Int
from looplab.objectives.base import OBJECTIVES, LossParts, Objective, Part, Rollout, labelled, scored_mask
from looplab.objectives.readout import token_losses
from looplab.recurrence.exit.base import readable


@OBJECTIVES.register("latent_anchor")
@dataclass(frozen=True, kw_only=True)
class LatentAnchor(Objective):
    """Next-token loss at the drawn depth, and the relative distance from the state at a shallow one."""

    anchor: int = 8
    """Applications after which the state is right."""
    weight: float = 1.0
    """Of the distance."""
    chunk: int | None = None
    """Tokens per readout chunk; None: all logits at once."""

    def __post_init__(self) -> None:
        if self.anchor < 1:
            raise ValueError(f"LatentAnchor.anchor must be at least 1 application. Got {self.anchor}.")
        if self.weight < 0:
            raise ValueError(f"LatentAnchor.weight must be at least 0. Got {self.weight}.")
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"LatentAnchor.chunk must be at least 1 token, or None. Got {self.chunk}.")

    def reads(self, length: int) -> tuple[int, int]:
        """The anchor and the end."""
        return (self.anchor, length)

    def counts(self, labels: Int[Tensor, "batch seq *cells"], length: int = 1) -> dict[str, int]:
        """Positions with a label, for both parts.

        Raises:
            ValueError: No label; a run that ends at the anchor or before.
        """
        if length <= self.anchor:
            raise ValueError(
                f"LatentAnchor.anchor must be below the applications of every step. Got {self.anchor}, and {length} "
                "applications were drawn. Raise the least depth of the model's trained_depth."
            )
        scored = labelled(self, labels)
        return {"ce": scored, "anchor": scored}

    def loss(self, rollout: Rollout, labels: Int[Tensor, "batch seq *cells"]) -> LossParts:
        """The parts `ce` and `anchor`."""
        length, scored = len(rollout.plan), scored_mask(labels)
        losses = token_losses(rollout.model, rollout.hidden(length), labels, chunk=self.chunk, ledger=rollout.ledger)
        anchor, end = (readable(rollout.model.spec, rollout.states[k], labels.shape[1]) for k in (self.anchor, length))
        anchor = anchor.detach()
        drift = (end - anchor).square().sum(-1) / anchor.square().sum(-1)
        count = int(scored.sum())
        return LossParts(
            {"ce": Part(losses.sum(), count, 1.0), "anchor": Part(drift[scored].sum(), count, self.weight)}
        )
