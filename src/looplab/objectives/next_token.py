"""Next-token prediction from the state after the last application.

ce     = mean over labels of  (1 - s) * -log p(y) + s * mean over v of -log p(v)       s = label_smoothing
z_loss = mean over labels of  logsumexp(logits)^2                                      weight z_loss
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from looplab._types import Float, Int
from looplab.objectives.base import IGNORED, OBJECTIVES, LossParts, Objective, Part, Rollout, labelled, scored_positions
from looplab.objectives.readout import summed_readout


@OBJECTIVES.register("next_token")
@dataclass(frozen=True, kw_only=True)
class NextToken(Objective):
    """Cross-entropy of the next token at the drawn depth."""

    chunk: int | None = None
    """Tokens per readout chunk; None: all logits at once."""
    z_loss: float = 0.0
    """Weight of the squared log-partition, usually 1e-4; 0: no such part."""
    label_smoothing: float = 0.0
    """Probability spread evenly over the vocabulary."""

    def __post_init__(self) -> None:
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"NextToken.chunk must be at least 1 token, or None. Got {self.chunk}.")
        if self.z_loss < 0:
            raise ValueError(f"NextToken.z_loss must be at least 0. Got {self.z_loss}.")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"NextToken.label_smoothing must be in [0, 1). Got {self.label_smoothing}.")

    def counts(self, labels: Int[Tensor, "batch seq *cells"], length: int = 1) -> dict[str, int]:
        """Positions with a label that is not IGNORED, for every part."""
        scored = labelled(self, labels)
        return {"ce": scored} | ({"z_loss": scored} if self.z_loss else {})

    def loss(self, rollout: Rollout, labels: Int[Tensor, "batch seq *cells"]) -> LossParts:
        """The parts `ce` and, if asked for, `z_loss`."""
        hidden = rollout.hidden(len(rollout.plan))
        sums = summed_readout(rollout.model, hidden, labels, self._score, chunk=self.chunk, ledger=rollout.ledger)
        scored = scored_positions(labels)
        weights = {"ce": 1.0} | ({"z_loss": self.z_loss} if self.z_loss else {})
        return LossParts({name: Part(s, scored, w) for (name, w), s in zip(weights.items(), sums, strict=True)})

    def _score(
        self, logits: Float[Tensor, "tokens *cells symbols"], labels: Int[Tensor, "tokens *cells"]
    ) -> tuple[Float[Tensor, ""], ...]:
        ce = functional.cross_entropy(
            logits.flatten(0, -2),
            labels.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )
        if not self.z_loss:
            return (ce,)
        partition = torch.logsumexp(logits, dim=-1)
        return ce, torch.where(labels == IGNORED, 0.0, partition.square()).sum()
