"""Segments: the graph is cut after every few applications, and each segment has a loss of its own.

    segments 0 .. K-1, K .. 2K-1, ..;   s_K, s_2K, .. are detached

With one loss at the end this would equal a window over the last segment, so a segment needs a loss at its end: the
caller gives it through `walk(on_segment_end=...)`. With `last`, only so many trailing applications carry gradient, and
the segments are counted from there. Reference: LOOM, arXiv:2610.01153 (K = 3).
"""

from dataclasses import dataclass

from looplab.recurrence.gradient.base import GRADIENT_STRATEGIES, GradientStrategy, Segment


@GRADIENT_STRATEGIES.register("segmented")
@dataclass(frozen=True, kw_only=True)
class SegmentedDetach(GradientStrategy):
    """The last applications, or all, carry gradient, in segments of `every`."""

    every: int
    """Applications per segment."""
    last: int | None = None
    """Trailing applications with gradient; None: all."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"SegmentedDetach.every must be at least 1. Got {self.every}.")
        if self.last is not None and self.last < 1:
            raise ValueError(f"SegmentedDetach.last must be at least 1, or None. Got {self.last}.")

    def segments(self, length: int) -> tuple[Segment, ...]:
        free = 0 if self.last is None else max(0, length - self.last)
        head = (Segment(0, free, False),) if free else ()
        starts = range(free, length, self.every) if length else (0,)
        return (*head, *(Segment(start, min(start + self.every, length), True) for start in starts))

    def __str__(self) -> str:
        last = "" if self.last is None else f", last={self.last}"
        return f"SegmentedDetach(every={self.every}{last})"
