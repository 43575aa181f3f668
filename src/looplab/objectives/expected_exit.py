"""Ouro, stage I: expected loss under the exit law of the model's gate, with a reward for an undecided law.

    lambda_k = sigmoid(gate(h_k))
    p_k = lambda_k prod_{j<k} (1 - lambda_j)   for k < T;      p_T = prod_{j<T} (1 - lambda_j)
    L = mean over labels of  sum_k p_k CE_k - beta H(p)        H(p) = - sum_k p_k log p_k, in nats

lambda_T is not used. Where CE_k is fixed and the gate free, the best p_k is proportional to exp(-CE_k / beta). This is
the expected loss, not the loss of the mixed logits that the released forward returns.

Reference: Zhu et al., arXiv:2510.25741, section 3 (beta 0.1 in the first stage of their training, 0.05 after).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from looplab._types import Float, Int
from looplab.objectives.base import (
    OBJECTIVES,
    LossParts,
    Needs,
    Objective,
    Part,
    Rollout,
    labelled,
    needs_gate,
    read_points,
    scored_mask,
)
from looplab.objectives.readout import token_losses


@OBJECTIVES.register("expected_exit")
@dataclass(frozen=True, kw_only=True)
class ExpectedExit(Objective):
    """Expected cross-entropy under the gate's exit law, minus `beta` times its entropy."""

    needs: ClassVar[Needs] = Needs(states="every")

    beta: float = 0.1
    """Weight of the entropy."""
    chunk: int | None = None
    """Tokens per readout chunk; None: all logits of an iteration at once."""

    def __post_init__(self) -> None:
        if self.beta < 0:
            raise ValueError(f"ExpectedExit.beta must be at least 0. Got {self.beta}.")
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"ExpectedExit.chunk must be at least 1 token, or None. Got {self.chunk}.")

    def check(self, model: Any) -> None:
        """Needs a hazard gate per token."""
        needs_gate(self, model)

    def counts(self, labels: Int[Tensor, "batch seq *cells"], length: int = 1) -> dict[str, int]:
        """Positions with a label, for both parts."""
        scored = labelled(self, labels)
        return {"expected_ce": scored, "entropy": scored}

    def loss(self, rollout: Rollout, labels: Int[Tensor, "batch seq *cells"]) -> LossParts:
        """The parts `expected_ce` and `entropy`, the latter with weight -beta."""
        points = read_points(rollout)
        gate = torch.stack([rollout.model.halt(rollout.states[k]) for k in points])
        losses = torch.stack(
            [
                token_losses(rollout.model, rollout.hidden(k), labels, chunk=self.chunk, ledger=rollout.ledger)
                for k in points
            ]
        )
        log_p = log_exit_law(gate)
        p, scored = log_p.exp(), scored_mask(labels)
        count = int(scored.sum())
        entropy = -torch.where(p > 0, p * log_p, 0.0).sum(0)
        return LossParts(
            {
                "expected_ce": Part((p * losses).sum(0)[scored].sum(), count, 1.0),
                "entropy": Part(entropy[scored].sum(), count, -self.beta),
            }
        )


def log_exit_law(gate: Float[Tensor, "steps *tokens"]) -> Float[Tensor, "steps *tokens"]:
    """log p_k from the gate's logits, in its precision; the last logit is not used."""
    stay = functional.logsigmoid(-gate[:-1]).cumsum(0)
    reach = torch.cat([torch.zeros_like(gate[:1]), stay])  # log of the probability that nothing stopped before
    return torch.cat([functional.logsigmoid(gate[:-1]) + reach[:-1], reach[-1:]])
