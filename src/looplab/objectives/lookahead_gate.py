"""A gate that looks one step ahead, trained beside a finished model to say what the model's own gate will say.

    hazards   t_k = sigmoid(teacher(h_k)),   s_{k+1} = sigmoid(student(h_k)),   k = 1 .. T - 2
    laws      over 2 .. T, the last takes the rest; the teacher's mass at iteration 1 is added to that at 2
    L = mean over labels of  [ mean_k BCE(s_{k+1}, t_{k+1})  +  mean_{t = 2..T} |CDF_student(t) - CDF_teacher(t)| ]

An engine that launches iteration t + 1 before it has read the score of iteration t loses nothing with this gate; the
price is that no token stops after the first iteration. The student is one linear map that starts as the teacher.

`SameStepGateLoss` (`same_step_gate.py`) is the control without the shift. Reference: continuous depth batching,
arXiv:2608.09444. Nothing of the model gets a gradient.
"""

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from looplab._types import Float, Int
from looplab.objectives.base import (
    OBJECTIVES,
    LossParts,
    Needs,
    Objective,
    Outcome,
    Part,
    Pass,
    Rollout,
    labelled,
    needs_gate,
    read_points,
    roll,
    scored_mask,
)
from looplab.objectives.expected_exit import log_exit_law
from looplab.recurrence.exit.base import readable


@OBJECTIVES.register("lookahead_gate")
@dataclass(frozen=True, kw_only=True)
class LookaheadGateLoss(Objective):
    """Hazards and exit law of the next step, against those of the model's own gate."""

    needs: ClassVar[Needs] = Needs(states="every")
    shift: ClassVar[int] = 1
    """Steps that the gate looks ahead."""

    def check(self, model: Any) -> None:
        """Needs a hazard gate to learn from."""
        needs_gate(self, model)

    def beside(self, model: Any) -> nn.Module:
        """A copy of the model's gate, to be trained."""
        gate = getattr(model, "gate", None)
        if not isinstance(gate, nn.Module):
            raise ValueError(
                f"{type(self).__name__} starts from the module `gate` of a model. {model.spec.name!r} has "
                f"{type(gate).__name__}. Use a model of this package's own."
            )
        return copy.deepcopy(gate).requires_grad_()

    def counts(self, labels: Int[Tensor, "batch seq *cells"], length: int = 1) -> dict[str, int]:
        """Positions with a label, for both parts.

        Raises:
            ValueError: No label; too few applications to have a choice.
        """
        least = self.shift + 2
        if length < least:
            raise ValueError(
                f"{type(self).__name__} needs at least {least} applications, so that there is a choice. Got {length}. "
                "Raise the model's trained_depth."
            )
        scored = labelled(self, labels)
        return {"hazard": scored, "cdf": scored}

    def run(self, given: Pass) -> Outcome:
        """The same without a graph through the model."""
        with torch.no_grad():
            rollout, first, last = roll(given, self.reads(len(given.plan)))
        return Outcome(self.loss(rollout, given.batch.labels), first, last, given.plan)

    def loss(self, rollout: Rollout, labels: Int[Tensor, "batch seq *cells"]) -> LossParts:
        """The parts `hazard` and `cdf`."""
        assert rollout.beside is not None
        points, scored = read_points(rollout), scored_mask(labels)
        # The last step takes the rest: nobody asks for its hazard.
        asked = points[self.shift : -1]
        with torch.no_grad():
            read = [readable(rollout.model.spec, rollout.states[k], labels.shape[1]) for k in points]
            hazards = torch.stack([rollout.model.halt(rollout.states[k]) for k in points[:-1]])
            # Mass before the first step that the student can choose is folded into that step.
            wanted = exit_cdf(hazards)[self.shift :]
        student = torch.stack([rollout.beside(read[k]) for k in range(len(asked))])
        terms = functional.binary_cross_entropy_with_logits(
            student, torch.sigmoid(hazards[self.shift :]), reduction="none"
        ).mean(0)
        apart = (exit_cdf(student) - wanted).abs().mean(0)
        count = int(scored.sum())
        return LossParts(
            {"hazard": Part(terms[scored].sum(), count, 1.0), "cdf": Part(apart[scored].sum(), count, 1.0)}
        )


def exit_cdf(hazards: Float[Tensor, "steps *tokens"]) -> Float[Tensor, "later *tokens"]:
    """Probability of having stopped after each step, from the logits of all steps but the last, which ends at 1."""
    return log_exit_law(torch.cat([hazards, hazards[-1:]])).exp().cumsum(0)
