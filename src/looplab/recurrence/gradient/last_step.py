"""The one-step gradient: only the last application carries any.

The gradient of a fixed point with (I - J)^-1 replaced by I, as HRM argues for it, arXiv:2506.21734.
"""

from dataclasses import dataclass

from looplab.recurrence.gradient.base import GRADIENT_STRATEGIES, GradientStrategy, Segment
from looplab.recurrence.gradient.truncated import TruncatedBPTT


@GRADIENT_STRATEGIES.register("last_step")
@dataclass(frozen=True, kw_only=True)
class LastStep(GradientStrategy):
    """`TruncatedBPTT(window=1)`."""

    def segments(self, length: int) -> tuple[Segment, ...]:
        return TruncatedBPTT(window=1).segments(length)
