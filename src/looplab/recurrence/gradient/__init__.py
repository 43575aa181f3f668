"""Gradient strategies: which applications of a run carry gradient, and what is recomputed. One file per strategy."""

from looplab.recurrence.gradient.base import GRADIENT_STRATEGIES, GradientStrategy, Segment
from looplab.recurrence.gradient.checkpoint import CheckpointApplication
from looplab.recurrence.gradient.full import FullBPTT
from looplab.recurrence.gradient.segmented import SegmentedDetach
from looplab.recurrence.gradient.truncated import TruncatedBPTT

__all__ = [
    "GRADIENT_STRATEGIES",
    "CheckpointApplication",
    "FullBPTT",
    "GradientStrategy",
    "Segment",
    "SegmentedDetach",
    "TruncatedBPTT",
]
