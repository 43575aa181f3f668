"""`ln g = [phi + kappa ln(r_b / r_f)] ln r_f`: at a fixed ratio of window to num_steps a pure power of num_steps."""

from dataclasses import dataclass

import numpy as np

from looplab.scaling.laws.base import GAIN, bounds
from looplab.scaling.laws.gains.base import Gain, linear
from looplab.scaling.laws.points import Array


@dataclass(frozen=True, kw_only=True)
class Tilt(Gain):
    """The exponent of num_steps falls with the share of passes that carry no gradient."""

    @property
    def names(self) -> tuple[str, ...]:
        return ("phi", "kappa")

    @property
    def box(self) -> Array:
        return bounds(GAIN, GAIN)

    @property
    def truncated(self) -> tuple[str, ...]:
        return ("kappa",)

    def log_gain(self, theta: Array, pairs: Array) -> tuple[Array, Array, Array]:
        forward, back = np.log(pairs).T
        return linear(theta, np.stack([forward, (back - forward) * forward]))
