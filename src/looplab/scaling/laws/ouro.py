"""`L = E + A (N + t1)^-alpha + B (D + t2)^-beta + C (T + t3)^-gamma` (Ouro, arXiv:2510.25741).

T is the largest number of loops for the total loss, or the index of the loop for the step-wise loss of models with one
maximum; it is read from `eval_steps`. The additive T term claims that loops help alike at every size.
"""

from dataclasses import dataclass

import numpy as np

from looplab.scaling.laws.base import AMPLITUDE, EXPONENT, FLOOR, Law, Term, bounds, constant, power
from looplab.scaling.laws.chinchilla import Chinchilla
from looplab.scaling.laws.points import Array, Points


@dataclass(frozen=True, kw_only=True)
class Ouro(Law):
    """Parameters, tokens and loops add up, each with an offset; t1 and t2 are logarithms."""

    @property
    def names(self) -> tuple[str, ...]:
        return ("a", "alpha", "b", "beta", "e", "c", "gamma", "ln_t1", "ln_t2", "t3")

    @property
    def linear(self) -> tuple[int, ...]:
        return (0, 2, 4, 5)

    @property
    def reference(self) -> str:
        return "arXiv:2510.25741"

    def box(self, points: Points) -> Array:
        parameters = float(np.log((points.n_once + points.n_rec).min()))
        tokens = float(np.log(points.tokens.min()))
        loops = ((-10.0, 3.0), (0.0, 5.0), (0.0, parameters), (0.0, tokens), (-0.99, 20.0))
        return bounds(AMPLITUDE, EXPONENT, AMPLITUDE, EXPONENT, FLOOR, *loops)

    @property
    def nested(self) -> tuple[tuple[Law, dict[str, float]], ...]:
        return ((Chinchilla(), {"c": -np.inf, "gamma": 0.0, "ln_t1": -np.inf, "ln_t2": -np.inf, "t3": 0.0}),)

    def terms(self, theta: Array, points: Points, *, curved: bool = True) -> list[Term]:
        loops = points.eval_steps + theta[:, 9, None]
        rise = (1 / loops)[:, None]
        return [
            _offset(theta, 0, 1, 7, points.n_once + points.n_rec, curved),
            _offset(theta, 2, 3, 8, points.tokens, curved),
            constant(theta, 4, points),
            power(theta, 5, 6, np.log(loops), (9,), rise, -(rise**2)[:, None] if curved else None),
        ]


def _offset(theta: Array, amplitude: int, exponent: int, offset: int, size: Array, curved: bool) -> Term:
    """A power of size + exp(offset)."""
    added = np.exp(theta[:, offset, None])
    share = added / (size + added)
    bend = (share * (1 - share))[:, None, None] if curved else None
    return power(theta, amplitude, exponent, np.log(size + added), (offset,), share[:, None], bend)
