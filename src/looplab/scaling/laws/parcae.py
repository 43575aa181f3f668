"""Laws of Parcae (arXiv:2604.12946): a floor in mean depth, and saturation in the depth of evaluation.

    floor     L = E + X N(mu)^-x + Y D^-y
    unified   L = floor + Z exp(-z T / mu)

mu is the mean num_steps of training, T that of evaluation. `N(mu) = mu N` over all parameters, as arXiv:2604.21106
reads it, or n_once + mu n_rec; which of them its authors fitted is not known to us.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from looplab.scaling.laws.base import AMPLITUDE, EXPONENT, FLOOR, Law, Term, bounds, constant, power
from looplab.scaling.laws.points import Array, Points


@dataclass(frozen=True, kw_only=True)
class Parcae(Law):
    """Every iteration counts in full."""

    count: Literal["all", "core"] = "all"
    """Parameters that mu multiplies."""
    test_time: bool = False
    """With the term of evaluation depth; its rows may have any eval_steps."""

    @property
    def names(self) -> tuple[str, ...]:
        return ("a", "alpha", "b", "beta", "e", *(("ln_z", "z") if self.test_time else ()))

    @property
    def linear(self) -> tuple[int, ...]:
        return (0, 2, 4, 5) if self.test_time else (0, 2, 4)

    @property
    def reference(self) -> str:
        return "arXiv:2604.12946"

    def box(self, points: Points) -> Array:
        late = ((-10.0, 3.0), (0.0, 60.0)) if self.test_time else ()
        return bounds(AMPLITUDE, EXPONENT, AMPLITUDE, EXPONENT, FLOOR, *late)

    @property
    def nested(self) -> tuple[tuple[Law, dict[str, float]], ...]:
        return ((Parcae(count=self.count), {"ln_z": -np.inf, "z": 0.0}),) if self.test_time else ()

    def terms(self, theta: Array, points: Points, *, curved: bool = True) -> list[Term]:
        mu = points.mean_steps
        size = mu * (points.n_once + points.n_rec) if self.count == "all" else points.n_once + mu * points.n_rec
        found = [
            power(theta, 0, 1, np.log(size)),
            power(theta, 2, 3, np.log(points.tokens)),
            constant(theta, 4, points),
        ]
        if self.test_time:
            found.append(power(theta, 5, 6, points.eval_steps / mu))  # exp(-z T/mu) is a power of exp(T/mu)
        return found
