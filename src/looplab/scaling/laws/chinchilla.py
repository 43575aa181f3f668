"""`L = E + A N^-alpha + B D^-beta` (Hoffmann et al., arXiv:2203.15556; refitted in arXiv:2404.10102).

N counts stored parameters without embedding and head. Fits per (num_steps, window) are not comparable across loops:
the runs sit in different regions of (N, D).
"""

from dataclasses import dataclass

from looplab.scaling.laws.effective import EffectiveParameters
from looplab.scaling.laws.gains.base import Gain
from looplab.scaling.laws.gains.steps import Steps

# Before rounding, from the sources of the papers; rounding alone moves the optimal N by a fifth.
PUBLISHED = {"A": 406.4, "alpha": 0.3392, "B": 410.7, "beta": 0.2849, "E": 1.6934}
REPLICATION = {"A": 482.01, "alpha": 0.3478, "B": 2085.43, "beta": 0.3658, "E": 1.8172}


@dataclass(frozen=True, kw_only=True)
class Chinchilla(EffectiveParameters):
    """The core counts once, however often it runs."""

    @property
    def how(self) -> Gain:
        return Steps(phi=0.0)

    @property
    def reference(self) -> str:
        return "arXiv:2203.15556"
