"""A window that grows along a run.

    window(step) = max(1, ceil(ramp(step / ramp_steps) window))         ramp as of `recurrence.depth.curriculum`

Reference: retrofitted recurrence, arXiv:2511.07384, which grows the depth, the window, or both.
"""

import math
from dataclasses import dataclass

from looplab.recurrence.depth.curriculum import Shape, ramp
from looplab.recurrence.gradient.base import GRADIENT_STRATEGIES, GradientStrategy, Segment
from looplab.recurrence.gradient.truncated import TruncatedBPTT


@GRADIENT_STRATEGIES.register("growing")
@dataclass(frozen=True, kw_only=True)
class GrowingWindow(GradientStrategy):
    """`TruncatedBPTT(window)`, with a smaller window before `ramp_steps`."""

    window: int
    """Trailing applications with gradient, at the end of the ramp."""
    ramp_steps: int
    """Optimizer steps until then."""
    shape: Shape = "linear"

    def __post_init__(self) -> None:
        for name in ("window", "ramp_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"GrowingWindow.{name} must be at least 1. Got {getattr(self, name)}.")

    def at(self, step: int) -> TruncatedBPTT:
        part = ramp(step / self.ramp_steps, self.shape)
        return TruncatedBPTT(window=max(1, math.ceil(part * self.window)))

    def segments(self, length: int) -> tuple[Segment, ...]:
        """At the end of the ramp."""
        return TruncatedBPTT(window=self.window).segments(length)
