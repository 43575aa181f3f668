"""Deep supervision: every iteration predicts the final answer.

    L = sum over k of w_k CE_k / sum over k of w_k          CE_k: mean cross-entropy read from h_k, the same labels
    w_k = 1 (uniform), k (linear), or given

k runs over the applications after which the readout has something new to say. With uniform weights and full gradient
this is the mean of as many `NextToken` losses, one per depth. Under a gradient window the readouts of the applications
before it are still trained, their states are not.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from looplab._types import Float, Int
from looplab.objectives.base import (
    OBJECTIVES,
    LossParts,
    Needs,
    Objective,
    Part,
    Rollout,
    labelled,
    read_points,
    scored_positions,
)
from looplab.objectives.readout import token_losses


@OBJECTIVES.register("every_iteration")
@dataclass(frozen=True, kw_only=True)
class EveryIteration(Objective):
    """Cross-entropy of the labels after every iteration."""

    needs: ClassVar[Needs] = Needs(states="every")

    weights: Literal["uniform", "linear"] | tuple[float, ...] = "uniform"
    """Of the iterations; numbers are for runs of exactly so many iterations."""
    detach_readout: bool = False
    """Train the readout (coda and head) by the last iteration only; the others train the states they read."""
    chunk: int | None = None
    """Tokens per readout chunk; None: all logits of an iteration at once."""

    def __post_init__(self) -> None:
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"EveryIteration.chunk must be at least 1 token, or None. Got {self.chunk}.")
        if isinstance(self.weights, tuple) and (not self.weights or min(self.weights) < 0 or sum(self.weights) <= 0):
            raise ValueError(
                f"EveryIteration.weights must be at least 0 and not all 0. Got {self.weights}. Use 'uniform'."
            )

    @property
    def inner_gradient(self) -> bool:  # type: ignore[override]
        """Whether readouts are kept out of the graph."""
        return self.detach_readout

    def counts(self, labels: Int[Tensor, "batch seq *cells"], length: int = 1) -> dict[str, int]:
        """Positions with a label; the mean over iterations is taken before."""
        return {"ce": labelled(self, labels)}

    def loss(self, rollout: Rollout, labels: Int[Tensor, "batch seq *cells"]) -> LossParts:
        """The part `ce`."""
        points = read_points(rollout)
        weights = self._weights(len(points))
        terms = []
        for k, weight in zip(points, weights, strict=True):
            if weight:
                read = self._detached if self.detach_readout and k < points[-1] else self._summed
                terms.append(weight / sum(weights) * read(rollout, k, labels))
        return LossParts({"ce": Part(torch.stack(terms).sum(), scored_positions(labels), 1.0)})

    def _weights(self, count: int) -> tuple[float, ...]:
        if self.weights == "uniform":
            return (1.0,) * count
        if self.weights == "linear":
            return tuple(float(k) for k in range(1, count + 1))
        assert isinstance(self.weights, tuple)
        if len(self.weights) != count:
            raise ValueError(
                f"EveryIteration.weights must have one entry per iteration ({count} were run). "
                f"Got {len(self.weights)}. Use 'uniform' or 'linear' where the depth varies."
            )
        return self.weights

    def _summed(self, rollout: Rollout, k: int, labels: Tensor) -> Float[Tensor, ""]:
        hidden = rollout.hidden(k)
        return token_losses(rollout.model, hidden, labels, chunk=self.chunk, ledger=rollout.ledger).sum()

    def _detached(self, rollout: Rollout, k: int, labels: Tensor) -> Float[Tensor, ""]:
        """The same number, with a gradient to the state alone."""
        return rollout.to_state_alone(k, lambda alone: self._summed(alone, k, labels))
