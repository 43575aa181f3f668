"""Training objectives: one file each, every loss as named parts that sum."""

from looplab.objectives.base import OBJECTIVES, LossParts, Needs, Objective, Part, Rollout
from looplab.objectives.next_token import NextToken

__all__ = ["OBJECTIVES", "LossParts", "Needs", "NextToken", "Objective", "Part", "Rollout"]
