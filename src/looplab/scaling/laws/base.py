"""The contract of a scaling law: a sum of positive terms, each with its exact first and second derivatives.

    ln L = LSE_k u_k(theta),   p_k = exp(u_k - ln L)
    d ln L = sum_k p_k du_k,   d2 ln L = sum_k p_k (du_k du_k' + d2u_k) - d ln L d ln L'

Every term has a logarithmic amplitude, so that amplitudes stay positive, and given all other parameters the law is
linear in the amplitudes. All functions are batched over the leading axis of `theta`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from looplab.scaling.laws.points import Array, Points

AMPLITUDE, EXPONENT, FLOOR = (-5.0, 35.0), (0.0, 2.5), (-3.0, 2.0)
"""Box of 2604.21106: ln A and ln B, alpha and beta, ln E."""
GAIN = (-3.0, 3.0)


@dataclass(frozen=True, eq=False)
class Term:
    """u of one term at a batch of S parameters, with derivatives by the q parameters it has."""

    value: Array
    """[S, n]"""
    params: tuple[int, ...]
    """Places of its parameters in theta, its amplitude first."""
    first: Array
    """[S, q, n]"""
    second: Array | None
    """[S, q, q, n]; None: zero, or not asked for."""


class Law(ABC):
    """A frozen choice of form. Parameters are in the order of `names`."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Parameters; amplitudes are logarithms."""

    @property
    @abstractmethod
    def linear(self) -> tuple[int, ...]:
        """Places of the logarithmic amplitudes, one per term."""

    @property
    @abstractmethod
    def reference(self) -> str:
        """Where it was published."""

    @abstractmethod
    def box(self, points: Points) -> Array:
        """[p, 2]: bounds of every parameter."""

    @abstractmethod
    def terms(self, theta: Array, points: Points, *, curved: bool = True) -> list[Term]:
        """The terms at `theta` [S, p]; without second derivatives unless `curved`."""

    @property
    def nested(self) -> tuple[tuple["Law", dict[str, float]], ...]:
        """(simpler law, values at which this law is that one)."""
        return ()

    def on(self, points: Points) -> "Law":
        """The law whose parameters suit the data; itself unless a gain has one parameter per observed pair."""
        return self

    @property
    def title(self) -> str:
        """How tables call it."""
        return type(self).__name__

    def log_loss(self, theta: Array, points: Points) -> Array:
        """ln L, [.., n], at `theta` [.., p]."""
        theta = np.asarray(theta, dtype=np.float64)
        flat = theta.reshape(-1, theta.shape[-1])
        found = log_sum([term.value for term in self.terms(flat, points)])[0]
        return found.reshape(*theta.shape[:-1], len(points))

    def derivatives(self, theta: Array, points: Points) -> tuple[Array, Array, Array]:
        """ln L [S, n], its gradient [S, p, n] and its Hessian [S, p, p, n]: whole, for tests and for small problems."""
        flat = np.atleast_2d(np.asarray(theta, dtype=np.float64))
        terms = self.terms(flat, points)
        total, shares = log_sum([term.value for term in terms])
        jacobian = gradient(terms, shares, len(self.names))
        hessian = -jacobian[:, :, None] * jacobian[:, None]
        for term, share in zip(terms, shares, strict=True):
            part = term.first[:, :, None] * term.first[:, None]
            if term.second is not None:
                part = part + term.second
            for i, row in enumerate(term.params):
                for j, column in enumerate(term.params):
                    hessian[:, row, column] += share * part[:, i, j]
        return total, jacobian, hessian

    def values(self, **given: float | int) -> Array:
        """theta from values by name; amplitudes may be given as they are, under their capital letter.

        Raises:
            KeyError: A missing or unknown name.
        """
        theta = []
        for place, name in enumerate(self.names):
            capital = name.upper()
            if place in self.linear and capital in given:
                theta.append(float(np.log(given.pop(capital))))
            elif name in given:
                theta.append(float(given.pop(name)))
            else:
                raise KeyError(f"{self.title}: values needs {name!r}. Its parameters: {', '.join(self.names)}.")
        if given:
            raise KeyError(f"{self.title} has no parameter {next(iter(given))!r}. Known: {', '.join(self.names)}.")
        return np.array(theta)


def log_sum(values: list[Array]) -> tuple[Array, list[Array]]:
    """Log-sum-exp over terms, and the share of each."""
    top = values[0]
    for value in values[1:]:
        top = np.maximum(top, value)
    parts = [np.exp(value - top) for value in values]
    total = sum(parts[1:], start=parts[0])
    return top + np.log(total), [part / total for part in parts]


def gradient(terms: list[Term], shares: list[Array], size: int) -> Array:
    """[S, p, n]: d ln L."""
    rows, points = shares[0].shape
    jacobian = np.zeros((rows, size, points))
    for term, share in zip(terms, shares, strict=True):
        jacobian[:, term.params] += share[:, None] * term.first
    return jacobian


def constant(theta: Array, amplitude: int, points: Points) -> Term:
    """u = ln E."""
    shape = (len(theta), len(points))
    value = np.broadcast_to(theta[:, amplitude, None], shape)
    return Term(value, (amplitude,), np.ones((len(theta), 1, len(points))), None)


def power(
    theta: Array,
    amplitude: int,
    exponent: int,
    log_size: Array,
    inner: tuple[int, ...] = (),
    first: Array | None = None,
    second: Array | None = None,
) -> Term:
    """u = a - x y with y = ln of a size, [n] or [S, n].

    Args:
        inner: Parameters that y itself has, with dy `first` [S, q, n] and d2y `second` [S, q, q, n], if asked for.
    """
    a, x = theta[:, amplitude, None], theta[:, exponent, None]
    y = np.broadcast_to(log_size, (len(theta), log_size.shape[-1]))
    q = 2 + len(inner)
    own = np.empty((len(theta), q, y.shape[1]))
    own[:, 0], own[:, 1] = 1.0, -y
    if first is not None:
        own[:, 2:] = -x[:, None] * first
    curved = None if second is None else np.zeros((len(theta), q, q, y.shape[1]))
    if curved is not None and first is not None and second is not None:
        curved[:, 1, 2:] = curved[:, 2:, 1] = -first
        curved[:, 2:, 2:] = -x[:, None, None] * second
    return Term(a - x * y, (amplitude, exponent, *inner), own, curved)


def bounds(*pairs: tuple[float, float]) -> Array:
    """A box from its rows."""
    return np.array(pairs, dtype=np.float64).reshape(-1, 2)
