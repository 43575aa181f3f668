"""Per-application checkpointing: keep the state before each application, run the application again going back.

Activation memory is (applications in the window) * state + one application's interior. It composes with any strategy.
Models draw no random numbers, so recomputation needs no saved generator and gives the same bits.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from looplab.recurrence.gradient.base import GRADIENT_STRATEGIES, GradientStrategy, Segment
from looplab.recurrence.gradient.full import FullBPTT


@GRADIENT_STRATEGIES.register("checkpoint")
@dataclass(frozen=True, kw_only=True)
class CheckpointApplication(GradientStrategy):
    """`inner`, with every application that carries gradient recomputed in the backward pass."""

    inner: GradientStrategy = field(default_factory=FullBPTT)

    def __post_init__(self) -> None:
        if isinstance(self.inner, CheckpointApplication):
            raise ValueError("CheckpointApplication.inner must be another strategy. Got CheckpointApplication.")

    def segments(self, length: int) -> tuple[Segment, ...]:
        return self.inner.segments(length)

    @property
    def recomputes(self) -> bool:
        return True

    def wrap(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        def recomputed(*args: Any) -> Any:
            if not torch.is_grad_enabled():
                return apply(*args)
            return checkpoint(apply, *args, use_reentrant=False, preserve_rng_state=False)

        return recomputed
