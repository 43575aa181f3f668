"""The contract of a gain g(r_f, r_b): how many copies of itself the core is worth.

    g(1, 1) = 1  and  g(r, r) = r^phi

so Iso-Depth is the restriction of every gain to full back-propagation. r_f is num_steps, r_b the window.
"""

from abc import ABC, abstractmethod

import numpy as np

from looplab.scaling.laws.points import Array


class Gain(ABC):
    """A frozen choice of form. `log_gain` is batched over the leading axis of theta."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Parameters."""

    @property
    @abstractmethod
    def box(self) -> Array:
        """[q, 2]"""

    @abstractmethod
    def log_gain(self, theta: Array, pairs: Array) -> tuple[Array, Array, Array]:
        """ln g [S, P], its gradient [S, q, P] and its Hessian [S, q, q, P] at `pairs` [P, 2] of (r_f, r_b)."""

    @property
    def truncated(self) -> tuple[str, ...]:
        """Parameters that only runs with a window below num_steps can tell."""
        return ()

    @property
    def fixed_ratio(self) -> str:
        """What cannot be told where the window is one fraction of num_steps; empty: nothing to say."""
        return ""

    def diagonal(self, theta: Array) -> Array:
        """phi of g(r, r) = r^phi, [S]."""
        return self.log_gain(np.atleast_2d(theta), np.array([[np.e, np.e]]))[0][:, 0]


def linear(theta: Array, features: Array) -> tuple[Array, Array, Array]:
    """ln g of a form that is linear in its parameters: features [q, P]."""
    rows, (q, pairs) = len(theta), features.shape
    first = np.broadcast_to(features, (rows, q, pairs))
    return theta @ features, first, np.zeros((rows, q, q, pairs))
