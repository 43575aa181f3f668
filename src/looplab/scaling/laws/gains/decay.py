"""`ln g = phi ln r_f - kappa (1/r_b - 1/r_f)`: what truncation costs sits in small windows."""

from dataclasses import dataclass

import numpy as np

from looplab.scaling.laws.base import GAIN, bounds
from looplab.scaling.laws.gains.base import Gain, linear
from looplab.scaling.laws.points import Array


@dataclass(frozen=True, kw_only=True)
class Decay(Gain):
    """A power of num_steps, less a loss that fades as the window grows."""

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
        forward, back = pairs.T
        return linear(theta, np.stack([np.log(forward), 1 / forward - 1 / back]))
