"""`ln g = phi_b ln r_b + phi_f ln(r_f / r_b)`: the worth of trained and of untrained passes.

In ratio coordinates `ln g = phi ln r_f + psi ln(r_b / r_f)` it is the same law: phi = phi_b, psi = phi_b - phi_f.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from looplab.scaling.laws.base import GAIN, bounds
from looplab.scaling.laws.gains.base import Gain, linear
from looplab.scaling.laws.points import Array


@dataclass(frozen=True, kw_only=True)
class Power(Gain):
    """A power of the window times a power of the passes that carry no gradient."""

    coordinates: Literal["split", "ratio"] = "split"
    """Parameters phi_b and phi_f, or phi and psi."""

    @property
    def names(self) -> tuple[str, ...]:
        return ("phi_b", "phi_f") if self.coordinates == "split" else ("phi", "psi")

    @property
    def box(self) -> Array:
        return bounds(GAIN, GAIN)

    @property
    def truncated(self) -> tuple[str, ...]:
        return self.names[1:]

    @property
    def fixed_ratio(self) -> str:
        both = " and ".join(self.names)
        return f"{both} are separated only by the power form; Tilt and Decay would fit as well. Add a second ratio."

    def log_gain(self, theta: Array, pairs: Array) -> tuple[Array, Array, Array]:
        forward, back = np.log(pairs).T
        split = self.coordinates == "split"
        return linear(theta, np.stack([back, forward - back] if split else [forward, back - forward]))
