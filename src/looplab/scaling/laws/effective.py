"""Laws of effective parameters: `L = E + A (n_once + g n_rec)^-alpha + B D^-beta` with a gain g.

They differ only in g, so the arithmetic stands here once. `g` of a run with a known law of depth is the mean of the
gain over that law, because a gain is not linear in depth.
"""

from abc import abstractmethod

import numpy as np

from looplab.scaling.laws.base import AMPLITUDE, EXPONENT, FLOOR, Law, Term, bounds, constant, power
from looplab.scaling.laws.gains.base import Gain
from looplab.scaling.laws.points import Array, Points

OWN = ("a", "alpha", "b", "beta", "e")


class EffectiveParameters(Law):
    """A Chinchilla law in which the core counts as g copies of itself."""

    @property
    @abstractmethod
    def how(self) -> Gain:
        """The gain."""

    @property
    def names(self) -> tuple[str, ...]:
        return (*OWN, *self.how.names)

    @property
    def linear(self) -> tuple[int, ...]:
        return (0, 2, 4)

    def box(self, points: Points) -> Array:
        return np.concatenate([bounds(AMPLITUDE, EXPONENT, AMPLITUDE, EXPONENT, FLOOR), self.how.box])

    def terms(self, theta: Array, points: Points, *, curved: bool = True) -> list[Term]:
        inner = tuple(range(len(OWN), len(self.names)))
        size, first, second = self.sizes(theta[:, len(OWN) :], points, curved=curved)
        return [
            power(theta, 0, 1, size, inner, first, second),
            power(theta, 2, 3, np.log(points.tokens)),
            constant(theta, 4, points),
        ]

    def sizes(self, gains: Array, points: Points, *, curved: bool = True) -> tuple[Array, Array, Array | None]:
        """ln N_eff [S, n] with its derivatives by the parameters of the gain, [S, q, n] and [S, q, q, n]."""
        value, first, second = self.how.log_gain(gains, points.pairs)
        g = np.exp(value)
        dg = g[:, None] * first

        def spread(of_pairs: Array) -> Array:
            return of_pairs[..., points.pair] if points.mixture is None else of_pairs @ points.mixture.T

        total = points.n_once + spread(g) * points.n_rec
        per_gain = points.n_rec / total
        down = spread(dg) * per_gain[:, None]
        if not curved:
            return np.log(total), down, None
        d2g = g[:, None, None] * (first[:, :, None] * first[:, None] + second)
        return np.log(total), down, spread(d2g) * per_gain[:, None, None] - down[:, :, None] * down[:, None]
