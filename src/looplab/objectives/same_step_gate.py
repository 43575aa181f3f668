"""Control of the lookahead gate: the same head and loss, about the step whose state it reads.

    s_k = sigmoid(student(h_k)),   k = 1 .. T - 1;   loss as in `lookahead_gate.py` without the shift

It starts as the model's own gate and so starts at its best; what it loses to a lookahead gate after equal training is
the price of looking ahead.
"""

from dataclasses import dataclass
from typing import ClassVar

from looplab.objectives.base import OBJECTIVES
from looplab.objectives.lookahead_gate import LookaheadGateLoss


@OBJECTIVES.register("same_step_gate")
@dataclass(frozen=True, kw_only=True)
class SameStepGateLoss(LookaheadGateLoss):
    """Hazards and exit law of the same step, against those of the model's own gate."""

    shift: ClassVar[int] = 0
