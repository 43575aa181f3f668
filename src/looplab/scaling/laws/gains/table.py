"""`ln g` is one number per observed (r_f, r_b), 0 at (1, 1): saturated, so every other gain is nested in it."""

from dataclasses import dataclass

import numpy as np

from looplab.scaling.laws.base import bounds
from looplab.scaling.laws.gains.base import Gain, linear
from looplab.scaling.laws.points import Array

WIDE = (-10.0, 10.0)


@dataclass(frozen=True, kw_only=True)
class Table(Gain):
    """A number per pair. It says nothing about pairs that it does not hold."""

    pairs: tuple[tuple[float, float], ...] = ()
    """The pairs that have a parameter; empty: those of the data when fitted."""

    def of(self, pairs: Array) -> "Table":
        """The table of these pairs. Without (1, 1) the first pair is the unit, and gains are known up to a factor."""
        if self.pairs:
            return self
        found = [(float(f), float(b)) for f, b in pairs]
        unit = (1.0, 1.0) if (1.0, 1.0) in found else found[0]
        return Table(pairs=tuple(pair for pair in found if pair != unit))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"ln_g({f:g},{b:g})" for f, b in self.pairs)

    @property
    def box(self) -> Array:
        return bounds(*[WIDE for _ in self.pairs])

    @property
    def truncated(self) -> tuple[str, ...]:
        return tuple(name for name, (f, b) in zip(self.names, self.pairs, strict=True) if b < f)

    def log_gain(self, theta: Array, pairs: Array) -> tuple[Array, Array, Array]:
        own = np.array(self.pairs).reshape(-1, 2)
        return linear(theta, (own[:, None] == pairs[None]).all(axis=2).astype(np.float64))
