"""A gate that knows the number of steps before the loop, trained beside a finished model on its own gate's exit law.

    p = softmax(W e + b) over 1 .. T,   q the exit law of the model's gate
    L = mean over labels of  [ KL(q | p)  +  mean_t |CDF_p(t) - CDF_q(t)| ]

e is the context before the first application, so an engine can sort requests by depth when they come in.
Reference: continuous depth batching, arXiv:2608.09444. Nothing of the model gets a gradient.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from looplab._types import Int
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
from looplab.recurrence.halting import PreLoopGate


@OBJECTIVES.register("pre_loop_gate")
@dataclass(frozen=True, kw_only=True)
class PreLoopGateLoss(Objective):
    """The exit law of the model's own gate, from the context alone."""

    needs: ClassVar[Needs] = Needs(states="every")

    def check(self, model: Any) -> None:
        """Needs a hazard gate to learn from."""
        needs_gate(self, model)

    def beside(self, model: Any) -> PreLoopGate:
        """A gate over as many steps as the model runs by default, at which all are equally likely."""
        token = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
        with torch.no_grad():
            embeds = model.encode(token).embeds
        return PreLoopGate(embeds.shape[-1], len(model.spec.plan())).to(embeds)

    def counts(self, labels: Int[Tensor, "batch seq *cells"], length: int = 1) -> dict[str, int]:
        """Positions with a label, for both parts.

        Raises:
            ValueError: No label; a single application, which leaves no choice.
        """
        if length < 2:
            raise ValueError(
                f"PreLoopGateLoss needs at least 2 applications, so that there is a choice. Got {length}. "
                "Raise the model's trained_depth."
            )
        scored = labelled(self, labels)
        return {"kl": scored, "cdf": scored}

    def run(self, given: Pass) -> Outcome:
        """The same without a graph through the model."""
        with torch.no_grad():
            rollout, first, last = roll(given, self.reads(len(given.plan)))
        return Outcome(self.loss(rollout, given.batch.labels), first, last, given.plan)

    def loss(self, rollout: Rollout, labels: Int[Tensor, "batch seq *cells"]) -> LossParts:
        """The parts `kl` and `cdf`."""
        assert rollout.beside is not None
        points, scored = read_points(rollout), scored_mask(labels)
        with torch.no_grad():
            log_q = log_exit_law(torch.stack([rollout.model.halt(rollout.states[k]) for k in points])).movedim(0, -1)
            embeds = rollout.context.embeds.detach()
        log_p = rollout.beside(embeds).log_softmax(-1)
        if log_p.shape != log_q.shape:
            raise ValueError(
                f"PreLoopGateLoss: the gate chooses among {log_p.shape[-1]} steps, but {log_q.shape[-1]} were run. "
                "Train it at the model's own number of steps."
            )
        q = log_q.exp()
        kl = torch.where(q > 0, q * (log_q - log_p), 0.0).sum(-1)
        apart = (log_p.exp().cumsum(-1) - q.cumsum(-1)).abs().mean(-1)
        count = int(scored.sum())
        return LossParts({"kl": Part(kl[scored].sum(), count, 1.0), "cdf": Part(apart[scored].sum(), count, 1.0)})
