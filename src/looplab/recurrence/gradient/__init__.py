"""Gradient strategies: which applications of a run carry gradient, and what is recomputed. One file per strategy."""

from looplab.recurrence.gradient.base import GRADIENT_STRATEGIES, GradientStrategy, Segment
from looplab.recurrence.gradient.checkpoint import CheckpointApplication, CheckpointUnit
from looplab.recurrence.gradient.full import FullBPTT
from looplab.recurrence.gradient.growing import GrowingWindow
from looplab.recurrence.gradient.implicit import Implicit, NotConverged
from looplab.recurrence.gradient.last_step import LastStep
from looplab.recurrence.gradient.segmented import SegmentedDetach
from looplab.recurrence.gradient.truncated import TruncatedBPTT

__all__ = [
    "GRADIENT_STRATEGIES",
    "CheckpointApplication",
    "CheckpointUnit",
    "FullBPTT",
    "GradientStrategy",
    "GrowingWindow",
    "Implicit",
    "LastStep",
    "NotConverged",
    "Segment",
    "SegmentedDetach",
    "TruncatedBPTT",
]
