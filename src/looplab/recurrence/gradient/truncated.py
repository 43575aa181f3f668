"""Truncated back-propagation: gradient through the last applications only.

    s_n = f(.. f(s_0)) without a graph for n = max(0, T - window);  then min(window, T) applications with one

Reference: Huginn (arXiv:2502.05171, window 8) and Parcae (arXiv:2604.12946). A window that covers the whole plan is
full back-propagation to the bit, the initial state's graph included.
"""

from dataclasses import dataclass

from looplab.recurrence.gradient.base import GRADIENT_STRATEGIES, GradientStrategy, Segment


@GRADIENT_STRATEGIES.register("truncated")
@dataclass(frozen=True, kw_only=True)
class TruncatedBPTT(GradientStrategy):
    """The last `window` applications carry gradient."""

    window: int
    """Trailing applications with gradient."""

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"TruncatedBPTT.window must be at least 1. Got {self.window}.")

    def segments(self, length: int) -> tuple[Segment, ...]:
        free = max(0, length - self.window)
        head = (Segment(0, free, False),) if free else ()
        return (*head, Segment(free, length, True))
