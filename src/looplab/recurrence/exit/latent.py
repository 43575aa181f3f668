"""Latent: stop when a step hardly moves the state.

    |s_t - s_{t-1}| / |s_t| < tau         norms per token, in float32

s is what the readout reads, s_0 the state before the first application. Reference: Huginn's `latent-diff`,
arXiv:2502.05171. A state of norm 0 has no relative change and never stops.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from looplab._types import Bool, Float
from looplab.recurrence.exit.base import EXIT_RULES, ExitRule, Seen, check_positive, precise
from looplab.recurrence.spec import LoopSpec


class Previous(NamedTuple):
    """The state one step ago."""

    state: Float[Tensor, "batch seq dim"]


@EXIT_RULES.register("latent")
@dataclass(frozen=True, kw_only=True)
class LatentExit(ExitRule):
    """After the first step that changes the state by less than `threshold` of its norm."""

    threshold: float
    number: ClassVar[str] = "threshold"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, self.threshold)

    def start(self, spec: LoopSpec, state: Float[Tensor, "batch seq dim"]) -> Previous:
        return Previous(state)

    def observe(self, memory: Previous, seen: Seen) -> tuple[Bool[Tensor, "batch seq"], Previous]:
        return relative_change(seen.state, memory.state) < self.threshold, Previous(seen.state)


def relative_change(now: Float[Tensor, "*batch dim"], before: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch"]:
    """|now - before| / |now|."""
    now, before = precise(now), precise(before)
    return (now - before).norm(dim=-1) / now.norm(dim=-1)
