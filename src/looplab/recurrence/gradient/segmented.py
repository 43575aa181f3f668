"""Segments: the graph is cut after every few applications, and each segment has a loss of its own.

    segments 0 .. K-1, K .. 2K-1, ..;   s_K, s_2K, .. are detached

With one loss at the end this would equal a window over the last segment, so a segment needs a loss at its end: the
caller gives it through `walk(on_segment_end=...)`. Reference: LOOM, arXiv:2610.01153 (K = 3).
"""

from dataclasses import dataclass

from looplab.recurrence.gradient.base import GRADIENT_STRATEGIES, GradientStrategy, Segment


@GRADIENT_STRATEGIES.register("segmented")
@dataclass(frozen=True, kw_only=True)
class SegmentedDetach(GradientStrategy):
    """All applications carry gradient, in segments of `every`."""

    every: int
    """Applications per segment."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"SegmentedDetach.every must be at least 1. Got {self.every}.")

    def segments(self, length: int) -> tuple[Segment, ...]:
        starts = range(0, length, self.every) if length else (0,)
        return tuple(Segment(start, min(start + self.every, length), True) for start in starts)
