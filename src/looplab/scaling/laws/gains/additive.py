"""`g = r_b^phi + c (r_f - r_b)^q`: trained passes, plus a bonus for those that carry no gradient.

A coefficient on the first term would not be free: g(r, r) = r^phi holds it at 1.
"""

from dataclasses import dataclass

import numpy as np

from looplab.scaling.laws.base import GAIN, bounds
from looplab.scaling.laws.gains.base import Gain
from looplab.scaling.laws.points import Array


@dataclass(frozen=True, kw_only=True)
class Additive(Gain):
    """Trained and untrained passes add up."""

    @property
    def names(self) -> tuple[str, ...]:
        return ("phi", "c", "q")

    @property
    def box(self) -> Array:
        return bounds(GAIN, (0.0, 3.0), (0.0, 2.0))

    @property
    def truncated(self) -> tuple[str, ...]:
        return ("c", "q")

    def log_gain(self, theta: Array, pairs: Array) -> tuple[Array, Array, Array]:
        forward, back = pairs.T
        log_back = np.log(back)
        cut = forward > back
        log_rest = np.log(np.where(cut, forward - back, 1.0))
        phi, c, q = (theta[:, i, None] for i in range(3))
        trained = np.exp(phi * log_back)
        passes = np.exp(q * log_rest) * cut  # 0^0 must not count a pass that is not there
        total = trained + c * passes
        first = np.stack([trained * log_back, passes, c * passes * log_rest], axis=1) / total[:, None]
        second = np.zeros((len(theta), 3, 3, len(pairs)))
        second[:, 0, 0] = trained * log_back**2
        second[:, 1, 2] = second[:, 2, 1] = passes * log_rest
        second[:, 2, 2] = c * passes * log_rest**2
        second = second / total[:, None, None] - first[:, :, None] * first[:, None]
        return np.log(total), first, second
