"""Trained: stop where the model's own halting score q = (halt, continue) says so, after a supervision step.

    q_halt > 0               stop if q[0] > 0
    q_halt > q_continue      stop if q[0] > q[1]           whichever of the two the model was trained with

All tokens of a row stop together. Known from HRM (arXiv:2506.21734) and TRM (arXiv:2510.04871), whose own evaluation
never stops early.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from looplab._types import Bool, Float
from looplab.recurrence.exit.base import EXIT_RULES, ExitRule, Seen, no_gate, without_gate
from looplab.recurrence.spec import LoopSpec

RIVALS = {"q_halt > 0": False, "q_halt > q_continue": True}
"""`HaltSpec.rule` -> whether q[0] is compared with q[1] instead of 0."""


class Rival(NamedTuple):
    """What q[0] is compared with: q[1] where True, 0 elsewhere."""

    is_continue: Bool[Tensor, " batch"]


@EXIT_RULES.register("trained")
@dataclass(frozen=True, kw_only=True)
class TrainedExit(ExitRule):
    """After the first supervision step whose halting score says stop."""

    reads_score: ClassVar[bool] = True

    def check(self, spec: LoopSpec) -> None:
        if spec.halt is None:
            raise no_gate(spec)
        if spec.halt.layout != "q_halt_continue" or spec.halt.rule not in RIVALS:
            raise ValueError(
                f"exit: trained needs a halting score that stops by itself ({' or '.join(RIVALS)}). The score of "
                f"{spec.name} is {spec.halt.layout}, and its rule is: {spec.halt.rule}. Other exit rules: "
                f"hazard, {without_gate()}"
            )
        super().check(spec)

    def start(self, spec: LoopSpec, state: Float[Tensor, "batch seq dim"]) -> Rival:
        assert spec.halt is not None
        return Rival(torch.full(state.shape[:1], RIVALS[spec.halt.rule], device=state.device))

    def observe(self, memory: Rival, seen: Seen) -> tuple[Bool[Tensor, "batch seq"], Rival]:
        assert seen.score is not None
        halt, go_on = seen.score.unbind(dim=-1)
        stop = halt > torch.where(memory.is_continue, go_on, 0.0)
        return stop[:, None].expand(seen.state.shape[:2]), memory
