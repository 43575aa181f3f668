"""A law whose mean grows along a run.

    value(step) = max(floor, f m),    or  kept + f (m - kept) where `kept` iterations are run from the first step on
    f = ramp(step / ramp_steps)       m: the mean that the law is given (rate, num_steps)
    ramp_steps = round(ramp_fraction * steps of the run), at least 1, where a fraction is given
    ramp    linear  x        one_minus_sqrt  1 - sqrt(1 - x)        x = min(1, step / ramp_steps)

References: retrofitted recurrence, arXiv:2511.07384 (ramps over 12.5 to 75 % of training, rounded up); Parcae,
arXiv:2604.12946 (the window's iterations from the start). A window that grows is the gradient strategy's
(`recurrence.gradient.growing`).
"""

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from looplab._config import LATER
from looplab.recurrence.depth.base import DEPTH_SAMPLERS, DepthSampler

Shape = Literal["linear", "one_minus_sqrt"]


@DEPTH_SAMPLERS.register("curriculum")
@dataclass(frozen=True, kw_only=True)
class Curriculum(DepthSampler):
    """`law` with a smaller mean at first; after `ramp_steps` it is `law`."""

    law: DepthSampler
    ramp_steps: int | None = None
    """Optimizer steps until the law has its own mean ..."""
    ramp_fraction: float | None = field(default=None, metadata=LATER)
    """... or the part of the run's steps. The trainer asks `over(steps)`; what is not asked is the law's end."""
    shape: Shape = "linear"
    """one_minus_sqrt starts slower and ends steep."""
    floor: float = 1.0
    """Smallest mean."""
    kept: float | None = None
    """Part of the mean that is there from the first step: the gradient window, where only what runs without gradient is
    to grow."""
    rounding: Literal["ceil", "none"] = "ceil"
    """Means are whole numbers, or as they come."""

    def __post_init__(self) -> None:
        whole = self.law.nominal  # refuses laws without one
        if (self.ramp_steps is None) == (self.ramp_fraction is None):
            raise ValueError(
                f"Curriculum needs ramp_steps or ramp_fraction, not both. Got {self.ramp_steps} and "
                f"{self.ramp_fraction}. Give one."
            )
        if self.ramp_steps is not None and self.ramp_steps < 1:
            raise ValueError(f"Curriculum.ramp_steps must be at least 1. Got {self.ramp_steps}. Use the law alone.")
        if self.ramp_fraction is not None and not 0 < self.ramp_fraction <= 1:
            raise ValueError(
                f"Curriculum.ramp_fraction must be above 0 and at most 1. Got {self.ramp_fraction}. Use the law alone."
            )
        if not 0 < self.floor <= whole:
            raise ValueError(
                f"Curriculum.floor must be positive and at most the law's mean {whole:g}. Got {self.floor}."
            )
        if self.kept is not None and not 0 < self.kept <= whole:
            raise ValueError(f"Curriculum.kept must be positive and at most the law's mean {whole:g}. Got {self.kept}.")

    def over(self, steps: int) -> "Curriculum":
        """With the fraction as a number of steps."""
        if self.ramp_fraction is None:
            return self
        return replace(self, ramp_steps=max(1, round(self.ramp_fraction * steps)), ramp_fraction=None)

    def at(self, step: int | None) -> DepthSampler:
        """The law at an optimizer step; None: at the end.

        Raises:
            ValueError: The ramp is a fraction of a run whose length is not known here.
        """
        if step is None:
            return self.law
        if self.ramp_steps is None:
            raise ValueError(
                f"Curriculum.ramp_fraction ({self.ramp_fraction}) is a part of a run. Got a step of a run of unknown "
                "length. Ask over(steps) first."
            )
        if step >= self.ramp_steps:
            return self.law
        part, whole = ramp(step / self.ramp_steps, self.shape), self.law.nominal
        value = max(self.floor, part * whole) if self.kept is None else self.kept + part * (whole - self.kept)
        return self.law.at_mean(float(math.ceil(value)) if self.rounding == "ceil" else value)

    def pmf(self, step: int | None = None) -> NDArray[np.float64]:
        return self.at(step).pmf(step)

    def draw(self, key: int, step: int, rows: NDArray[np.int64], micro_batch: int = 0) -> NDArray[np.int64]:
        return self.at(step).draw(key, step, rows, micro_batch)

    def beyond(self, step: int | None = None) -> float:
        return self.at(step).beyond(step)

    def __str__(self) -> str:
        ramp = f"steps={self.ramp_steps}" if self.ramp_fraction is None else f"fraction={self.ramp_fraction}"
        return f"Curriculum({self.law}, ramp_{ramp})"


def ramp(x: float, shape: Shape) -> float:
    """From 0 at x = 0 to 1 at x = 1 and beyond."""
    x = min(1.0, x)
    return x if shape == "linear" else 1.0 - math.sqrt(1.0 - x)
