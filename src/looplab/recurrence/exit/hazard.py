"""Hazard: stop when the summed exit probability of a trained gate reaches q.

    l_t = sigmoid(g(s_t)),   c_t = c_{t-1} + l_t S_{t-1},   S_t = S_{t-1} (1 - l_t),   S_0 = 1, c_0 = 0
    stop after the first t with c_t >= q

Reference: Ouro, arXiv:2510.25741. Deviation: q = 1 means full depth. In the original's floating point a gate that
saturates makes c_t reach 1 early, and its default threshold of 1 then stops; here no c_t is compared with 1.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from looplab._types import Bool, Float
from looplab.recurrence.exit.base import EXIT_RULES, ExitRule, Seen, no_gate, precise, without_gate
from looplab.recurrence.spec import LoopSpec


class Mass(NamedTuple):
    """Exit probability spent so far, and left."""

    spent: Float[Tensor, "batch seq"]
    left: Float[Tensor, "batch seq"]


@EXIT_RULES.register("hazard")
@dataclass(frozen=True, kw_only=True)
class HazardExit(ExitRule):
    """After the first step whose summed exit probability reaches `threshold`, in (0, 1]; 1: never."""

    threshold: float
    number: ClassVar[str] = "threshold"
    reads_score: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.threshold <= 1:
            raise ValueError(
                f"HazardExit.threshold must be in (0, 1]. Got {self.threshold}. It is a probability; 1 is full depth"
            )

    @property
    def early(self) -> bool:
        return self.threshold < 1

    def check(self, spec: LoopSpec) -> None:
        if spec.halt is None:
            raise no_gate(spec)
        if spec.halt.layout != "hazard" or spec.halt.horizon != 0:
            raise ValueError(
                f"exit: hazard needs a gate that gives the exit probability of this very step. The score of "
                f"{spec.name} is {spec.halt.layout} with horizon {spec.halt.horizon}; exit rules without a score: "
                f"{without_gate()}"
            )
        super().check(spec)

    def start(self, spec: LoopSpec, state: Float[Tensor, "batch seq dim"]) -> Mass:
        none = torch.zeros_like(precise(state[..., 0]))
        return Mass(none, torch.ones_like(none))

    def observe(self, memory: Mass, seen: Seen) -> tuple[Bool[Tensor, "batch seq"], Mass]:
        assert seen.score is not None
        chance = torch.sigmoid(precise(seen.score))
        spent = memory.spent + chance * memory.left
        stop = spent >= self.threshold if self.early else torch.zeros_like(spent, dtype=torch.bool)
        return stop, Mass(spent, memory.left * (1 - chance))
