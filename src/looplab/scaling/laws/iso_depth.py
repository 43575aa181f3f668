"""`L = E + A (n_once + r^phi n_rec)^-alpha + B D^-beta` (Iso-Depth, arXiv:2604.21106).

Published on 116 runs: alpha 0.199, beta 0.369, E 1.57, phi 0.459 [0.41, 0.53]. phi belongs to one recipe and one
baseline.
"""

from dataclasses import dataclass

from looplab.scaling.laws.base import Law
from looplab.scaling.laws.chinchilla import Chinchilla
from looplab.scaling.laws.effective import EffectiveParameters
from looplab.scaling.laws.gains.base import Gain
from looplab.scaling.laws.gains.steps import Steps

PUBLISHED = {"alpha": 0.199, "beta": 0.369, "E": 1.57, "phi": 0.459}
"""A and B are not printed."""


@dataclass(frozen=True, kw_only=True)
class IsoDepth(EffectiveParameters):
    """One exponent of num_steps: phi = 1 counts executed parameters, phi = 0 stored ones."""

    @property
    def how(self) -> Gain:
        return Steps()

    @property
    def reference(self) -> str:
        return "arXiv:2604.21106"

    @property
    def nested(self) -> tuple[tuple[Law, dict[str, float]], ...]:
        return ((Chinchilla(), {"phi": 0.0}),)
