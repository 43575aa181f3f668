"""Gains that know nothing of the window: `r_f^phi`, and the fixed ones 1 and r_f."""

from dataclasses import dataclass

import numpy as np

from looplab.scaling.laws.base import GAIN, bounds
from looplab.scaling.laws.gains.base import Gain, linear
from looplab.scaling.laws.points import Array


@dataclass(frozen=True, kw_only=True)
class Steps(Gain):
    """`g = r_f^phi`; with a fixed phi it has no parameter: 0 counts stored parameters, 1 executed ones."""

    phi: float | None = None
    """None: fitted."""

    @property
    def names(self) -> tuple[str, ...]:
        return ("phi",) if self.phi is None else ()

    @property
    def box(self) -> Array:
        return bounds(GAIN) if self.phi is None else bounds()

    def log_gain(self, theta: Array, pairs: Array) -> tuple[Array, Array, Array]:
        forward = np.log(pairs[:, 0])
        if self.phi is None:
            return linear(theta, forward[None])
        value, first, second = linear(theta, np.zeros((0, len(pairs))))
        return value + self.phi * forward, first, second
