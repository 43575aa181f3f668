"""What a law reads of the runs, as arrays."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Points:
    """n runs. Gains are evaluated once per distinct (num_steps, window), not once per run."""

    n_once: Array
    n_rec: Array
    tokens: Array
    loss: Array
    """Nats per token."""
    pairs: Array
    """[P, 2]: the distinct (num_steps, window), sorted."""
    pair: NDArray[np.int64]
    """[n]: row of `pairs` of every run with one depth."""
    mixture: Array | None
    """[n, P] masses where depths are sampled and their law is known: the gain of a run is the mean over its row."""
    mean_steps: Array
    eval_steps: Array

    def __len__(self) -> int:
        return len(self.loss)

    @classmethod
    def make(
        cls,
        *,
        n_once: ArrayLike,
        n_rec: ArrayLike,
        tokens: ArrayLike,
        loss: ArrayLike,
        num_steps: ArrayLike,
        window: ArrayLike,
        eval_steps: ArrayLike | None = None,
        laws: Sequence[Sequence[tuple[float | int, float | int, float]] | None] | None = None,
    ) -> "Points":
        """The points of n runs.

        Args:
            laws: Per run, (num_steps, window, mass) of its sampled depth, or None where the depth is fixed or unknown.
        """
        once, rec, data, nats, steps, windows = (
            np.asarray(values, dtype=np.float64) for values in (n_once, n_rec, tokens, loss, num_steps, window)
        )
        own = [law or [(steps[i], windows[i], 1.0)] for i, law in enumerate(laws or [None] * len(steps))]
        pairs = np.array(sorted({(float(f), float(b)) for law in own for f, b, _ in law})).reshape(-1, 2)
        place = {(f, b): i for i, (f, b) in enumerate(pairs.tolist())}
        mixture = None
        if any(len(law) > 1 for law in own):
            mixture = np.zeros((len(own), len(pairs)))
            for row, law in zip(mixture, own, strict=True):
                for f, b, mass in law:
                    row[place[float(f), float(b)]] += mass
        pair = np.array([place[float(law[0][0]), float(law[0][1])] for law in own], dtype=np.int64)
        seen = steps if eval_steps is None else np.asarray(eval_steps, dtype=np.float64)
        return cls(once, rec, data, nats, pairs, pair, mixture, steps, seen)

    def take(self, rows: NDArray[np.generic]) -> "Points":
        """The points of some rows; `pairs` stays whole, so parameters of a `Table` keep their places."""
        names = ("n_once", "n_rec", "tokens", "loss", "pair", "mean_steps", "eval_steps")
        mixture = None if self.mixture is None else self.mixture[rows]
        return dataclasses.replace(self, mixture=mixture, **{name: getattr(self, name)[rows] for name in names})

    def present(self) -> Array:
        """The rows of `pairs` that some run has mass on."""
        if self.mixture is not None:
            return self.pairs[self.mixture.any(axis=0)]
        return self.pairs[np.unique(self.pair)]
