"""Minimum of a loss with a penalty, for one strength of the penalty after another.

    minimise   loss(x) + strength |x - origin|^2

Limited-memory BFGS. The penalty's curvature, 2 strength, is known, so the pairs (change of x, change of gradient) are
kept of the loss alone and serve every strength; so does the last gradient, which makes the first step at a new strength
free. Directions start from a preconditioner, an estimate of (curvature of the loss + 2 strength)^-1; where that is
close, the first step length tried, 1, is taken. Lengths are judged by slopes rather than by losses near the minimum,
where losses differ by less than float32 can tell.

Reference: Nocedal, Wright, "Numerical Optimization", 2006, algorithms 7.4 and 3.5; the approximate Wolfe condition of
Hager, Zhang, "A new conjugate gradient method with guaranteed descent", SIAM J. Optim. 16, 2005.
"""

import collections
import dataclasses
import math
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from torch import Tensor

from looplab._types import Float

MAX_ITERATIONS = 200
MAX_GRADIENT = 1e-5
_MEMORY, _MEMORY_BYTES, _FEWEST = 40, 2**28, 5
_TRIALS = 25
_DECREASE, _SLOPE, _ROUNDING = 1e-4, 0.9, 1e-6


@dataclasses.dataclass(frozen=True, eq=False)
class Point:
    """A place with the loss, without the penalty, and its gradient there."""

    x: Float[Tensor, " parameters"]
    loss: float
    gradient: Float[Tensor, " parameters"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Minimum:
    """Where a search ended; `converged`: no entry of the penalised gradient above 1e-5."""

    point: Point
    converged: bool
    iterations: int


@runtime_checkable
class Curvature(Protocol):
    """An estimate of the Hessian of the loss."""

    def inverse(self, strength: float) -> Callable[[Tensor], Tensor]:
        """Applies (curvature + 2 strength)^-1, positive definite."""
        ...


class Descent:
    """The search over one loss."""

    def __init__(self, loss: Callable[[Tensor], tuple[float, Tensor]], origin: Float[Tensor, " parameters"]):
        """`loss`: loss and gradient, float64, at parameters of the shape of `origin`."""
        self._loss, self._origin = loss, origin
        memory = max(_FEWEST, min(_MEMORY, _MEMORY_BYTES // (2 * origin.nbytes)))
        self._pairs: collections.deque[tuple[Tensor, Tensor]] = collections.deque(maxlen=memory)

    def on(self, loss: Callable[[Tensor], tuple[float, Tensor]]) -> "Descent":
        """The search over a similar loss, such as that of more tokens, with the curvature seen so far."""
        other = Descent(loss, self._origin)
        other._pairs.extend(self._pairs)
        return other

    def at(self, x: Float[Tensor, " parameters"]) -> Point:
        """Evaluates the loss."""
        return Point(x, *self._loss(x))

    def solve(self, strength: float, start: Point, curvature: Curvature) -> Minimum:
        """The minimum for one strength, from `start`."""
        point, inverse = start, curvature.inverse(strength)
        for iteration in range(MAX_ITERATIONS):
            gradient = self._gradient(point, strength)
            if float(gradient.abs().max()) <= MAX_GRADIENT:
                return Minimum(point=point, converged=True, iterations=iteration)
            found = self._along(point, -self._newton(gradient, strength, inverse), strength)
            if found is None:
                return Minimum(point=point, converged=False, iterations=iteration)
            step, change = found.x - point.x, found.gradient - point.gradient
            if float(step @ change) > 0:
                self._pairs.append((step, change))
            point = found
        return Minimum(point=point, converged=False, iterations=MAX_ITERATIONS)

    def _gradient(self, point: Point, strength: float) -> Tensor:
        return point.gradient + 2 * strength * (point.x - self._origin)

    def _newton(self, gradient: Tensor, strength: float, inverse: Callable[[Tensor], Tensor]) -> Tensor:
        """The inverse Hessian that the pairs make of `inverse`, times the gradient (two-loop recursion)."""
        pairs = [(step, change + 2 * strength * step) for step, change in self._pairs]
        left = []
        q = gradient.clone()
        for step, change in reversed(pairs):
            share = (step @ q) / (step @ change)
            q -= share * change
            left.append(share)
        q = inverse(q)
        if pairs:  # the preconditioner may be off by a factor; the newest pair tells it
            step, change = pairs[-1]
            q *= (step @ change) / (change @ inverse(change))
        for (step, change), share in zip(pairs, reversed(left), strict=True):
            q += (share - (change @ q) / (step @ change)) * step
        return q

    def _along(self, start: Point, direction: Tensor, strength: float) -> Point | None:
        """The first point tried with enough decrease and a flatter slope; None where rounding hides every decrease."""

        def measure(point: Point) -> tuple[float, float]:
            penalty = strength * float((point.x - self._origin).square().sum())
            return point.loss + penalty, float(self._gradient(point, strength) @ direction)

        loss, slope = measure(start)
        low, low_slope, high, high_slope, length = 0.0, slope, math.inf, math.inf, 1.0
        for _ in range(_TRIALS):
            point = self.at(start.x + length * direction)
            here, steep = measure(point)
            less = here <= loss + _DECREASE * length * slope
            level = here <= loss + _ROUNDING * abs(loss) and steep <= (2 * _DECREASE - 1) * slope
            if (less or level) and steep >= _SLOPE * slope:
                return point
            if (less or level) and steep < 0:
                low, low_slope = length, steep
            else:
                high, high_slope = length, steep
            length = _between(low, low_slope, high, high_slope)
        return None


def _between(low: float, low_slope: float, high: float, high_slope: float) -> float:
    """Where the slope would vanish if it were linear, kept inside the bracket."""
    if high == math.inf:
        return 4 * low
    width = high - low
    if not high_slope > 0 or not math.isfinite(high_slope):
        return low + width / 4
    return low + width * min(max(low_slope / (low_slope - high_slope), 0.1), 0.9)
