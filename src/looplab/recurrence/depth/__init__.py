"""Depth laws: how many iterations (or applications) a training step runs. One file per law."""

from looplab.recurrence.depth.base import DEPTH_SAMPLERS, Depth, DepthSampler, Grid, Unknown
from looplab.recurrence.depth.bucketed import Bucketed
from looplab.recurrence.depth.categorical import CategoricalDepth
from looplab.recurrence.depth.curriculum import Curriculum
from looplab.recurrence.depth.fixed import FixedDepth
from looplab.recurrence.depth.learned import DepthLearner, LearnedCategorical
from looplab.recurrence.depth.lognormal import LognormalDepth
from looplab.recurrence.depth.poisson import PoissonDepth
from looplab.recurrence.depth.poisson_lognormal import PoissonLognormal
from looplab.recurrence.depth.prefix import PrefixDepth
from looplab.recurrence.depth.uniform import UniformDepth

__all__ = [
    "DEPTH_SAMPLERS",
    "Bucketed",
    "CategoricalDepth",
    "Curriculum",
    "Depth",
    "DepthLearner",
    "DepthSampler",
    "FixedDepth",
    "Grid",
    "LearnedCategorical",
    "LognormalDepth",
    "PoissonDepth",
    "PoissonLognormal",
    "PrefixDepth",
    "UniformDepth",
    "Unknown",
]
