"""Ouro, stage II: with the language model frozen, the gate learns to stop where the last iteration no longer helped.

    I_k = max(0, CE_{k-1} - CE_k)         what iteration k brought, per token, a constant
    w_k = sigmoid(50 (I_k - 0.005))       the wanted probability of going on
    L = mean over labels of  1/T sum_{k=2..T} BCE(1 - lambda_k, w_k)         average="T-1" divides by T - 1

lambda_k is trained on the gain that iteration k has brought, so the gate looks back one iteration. Its best value is
1 - E[w_k | h_k]; w is sigmoid(-0.25) = .438 where nothing was gained, so a fitted hazard never exceeds .562.

Reference: Zhu et al., arXiv:2510.25741. The gate gets the only gradients: states are read without their graph.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

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
from looplab.recurrence import state as states

SHARPNESS, LEAST_GAIN = 50.0, 0.005
"""Slope per nat, and the gain at which going on and stopping are equally wanted."""
GATE = "gate."
"""Start of the names of a gate's parameters."""


@OBJECTIVES.register("exit_gate")
@dataclass(frozen=True, kw_only=True)
class ExitGate(Objective):
    """Cross-entropy of the gate against the gain of the last iteration."""

    needs: ClassVar[Needs] = Needs(states="every")

    average: Literal["T", "T-1"] = "T"
    """What the sum over iterations is divided by."""
    chunk: int | None = None
    """Tokens per readout chunk; None: all logits of an iteration at once."""

    def __post_init__(self) -> None:
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"ExitGate.chunk must be at least 1 token, or None. Got {self.chunk}.")

    def check(self, model: Any) -> None:
        """Needs a hazard gate per token, and everything else frozen."""
        needs_gate(self, model)
        only_gate(self, model)

    def counts(self, labels: Int[Tensor, "batch seq *cells"], length: int = 1) -> dict[str, int]:
        """Positions with a label.

        Raises:
            ValueError: No label; fewer than two applications, so that no gain exists.
        """
        if length < 2:
            raise ValueError(
                f"ExitGate compares an iteration with the one before and needs 2 applications at least. Got {length}. "
                "Raise the least depth of the model's trained_depth."
            )
        return {"gate": labelled(self, labels)}

    def loss(self, rollout: Rollout, labels: Int[Tensor, "batch seq *cells"]) -> LossParts:
        """The part `gate`."""
        points, scored = read_points(rollout), scored_mask(labels)
        with torch.no_grad():
            losses = torch.stack(
                [
                    token_losses(rollout.model, rollout.hidden(k), labels, chunk=self.chunk, ledger=rollout.ledger)
                    for k in points
                ]
            )
            going_on = wanted(losses)
        gate = torch.stack([rollout.model.halt(states.detach(rollout.states[k])) for k in points[1:]])
        terms = functional.binary_cross_entropy_with_logits(-gate, going_on, reduction="none").sum(0)
        terms = terms / (len(points) if self.average == "T" else len(points) - 1)
        return LossParts({"gate": Part(terms[scored].sum(), int(scored.sum()), 1.0)})


def wanted(losses: Float[Tensor, "steps *tokens"]) -> Float[Tensor, "later *tokens"]:
    """w_2 .. w_T out of CE_1 .. CE_T."""
    gain = (losses[:-1] - losses[1:]).clamp(min=0)
    return torch.sigmoid(SHARPNESS * (gain - LEAST_GAIN))


def only_gate(objective: Objective, model: Any) -> None:
    """Refuses a model of which anything but the gate is trained."""
    trained = [name for name, p in model.named_parameters() if p.requires_grad and not name.startswith(GATE)]
    if trained:
        raise ValueError(
            f"{type(objective).__name__} expects a frozen language model; {len(trained)} tensors require grad. "
            'Set train_only=("gate",).'
        )
