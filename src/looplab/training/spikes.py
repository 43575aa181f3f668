"""Spikes: steps whose loss or gradient stands out from those just before.

    loss > median + 6 MAD        or        |g| > 20 median        over the last 200 finite steps

MAD is the median distance from the median. Nothing is said before there are 200 steps. A spike is recorded and changes
nothing.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

LENGTH = 200
DEVIATIONS = 6.0
FACTOR = 20.0


class Spikes:
    """The last steps, to compare the next with."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=LENGTH)
        self._norms: deque[float] = deque(maxlen=LENGTH)

    def reread(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Goes on from the lines of a metrics file."""
        for record in records:
            if record["kind"] == "train" and not record["skipped"]:
                self._losses.append(record["loss"])
                self._norms.append(record["grad_norm"])

    def add(self, loss: float, norm: float) -> bool:
        """Whether a finite step is a spike; it counts among the last steps from then on."""
        spike = len(self._losses) == LENGTH and (self._outlying(loss) or norm > FACTOR * median(self._norms))
        self._losses.append(loss)
        self._norms.append(norm)
        return spike

    def _outlying(self, loss: float) -> bool:
        middle = median(self._losses)
        return loss > middle + DEVIATIONS * median(abs(other - middle) for other in self._losses)
