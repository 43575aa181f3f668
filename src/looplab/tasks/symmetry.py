"""Symmetries of a task: rename tokens, move them to other places, and a problem with its answer stays one."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from looplab.tasks.base import IGNORED


@dataclass(frozen=True)
class Symmetry:
    """What is at `places[i]` goes to place i, and token (or symbol) t becomes `names[t]`."""

    places: tuple[int, ...]
    names: tuple[int, ...]

    def apply(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """The image of tokens, or of labels, [.., seq]; IGNORED stays."""
        moved = tokens[..., list(self.places)]
        return np.where(moved == IGNORED, IGNORED, np.array(self.names)[np.maximum(moved, 0)])

    @property
    def inverse(self) -> "Symmetry":
        """What takes every image back."""
        return Symmetry(_inverse(self.places), _inverse(self.names))


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argsort(order))
