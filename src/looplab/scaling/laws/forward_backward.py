"""`L = E + A (n_once + g(r_f, r_b) n_rec)^-alpha + B D^-beta`: how many passes run, and how many carry gradient.

Forms of g are choices of `laws/gains`. At r_b = r_f every one of them is Iso-Depth.
"""

import dataclasses
from dataclasses import dataclass

from looplab.scaling.laws.effective import EffectiveParameters
from looplab.scaling.laws.gains.base import Gain
from looplab.scaling.laws.gains.power import Power
from looplab.scaling.laws.gains.table import Table
from looplab.scaling.laws.points import Points


@dataclass(frozen=True, kw_only=True)
class ForwardBackward(EffectiveParameters):
    """A law with a gain of two arguments."""

    gain: Gain = dataclasses.field(default_factory=Power)

    @property
    def how(self) -> Gain:
        return self.gain

    @property
    def title(self) -> str:
        return type(self.gain).__name__

    @property
    def reference(self) -> str:
        return "extends arXiv:2604.21106 to truncated back-propagation"

    def on(self, points: Points) -> "ForwardBackward":
        if isinstance(self.gain, Table):
            return dataclasses.replace(self, gain=self.gain.of(points.present()))
        return self
