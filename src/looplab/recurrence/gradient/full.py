"""Full back-propagation through every application."""

from dataclasses import dataclass

from looplab.recurrence.gradient.base import GRADIENT_STRATEGIES, GradientStrategy, Segment


@GRADIENT_STRATEGIES.register("full")
@dataclass(frozen=True, kw_only=True)
class FullBPTT(GradientStrategy):
    """dL/ds_0 through all applications; activations of all of them are kept."""

    def segments(self, length: int) -> tuple[Segment, ...]:
        return (Segment(0, length, True),)
