"""Learning-rate schedules: the factor of the peak rate, as a pure function of the step.

warmup:  (step + 1) / warmup_steps                          step counts from 0, so the first step is not lost
after:   x = (step - warmup_steps) / (steps - warmup_steps)
         constant 1;   linear  1 - (1 - floor) y;   cosine  floor + (1 - floor) (1 + cos(pi y)) / 2
         y = (x - hold) / (1 - hold), 0 before: the peak rate is held for a part of what follows the warm-up
         wsd: hold = 1 - decay_fraction, and the linear way down, or 1 - sqrt(y)

References: "warm-up, stable, decay" of MiniCPM, arXiv:2404.06395; 1 - sqrt: Haegele et al., arXiv:2405.18392.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Schedule(ABC):
    """A linear warm-up, then what the subclass says."""

    warmup_steps: int = 0
    """Optimizer steps until the peak."""

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ValueError(f"{type(self).__name__}.warmup_steps must be at least 0. Got {self.warmup_steps}.")

    def factor(self, step: int, steps: int) -> float:
        """Share of the peak rate at `step` (from 0) of a run of `steps`."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return self.after(min(1.0, (step - self.warmup_steps) / max(1, steps - self.warmup_steps)))

    @abstractmethod
    def after(self, x: float) -> float:
        """The factor at the fraction x of what follows the warm-up."""


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """The peak rate to the end."""

    def after(self, x: float) -> float:
        """The factor at the fraction x of what follows the warm-up."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class _Decay(Schedule):
    """Down to a floor at the end of the run."""

    floor: float = 0.0
    """Share of the peak rate that is left at the end."""
    hold: float = 0.0
    """Part of what follows the warm-up that still has the peak rate."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.floor <= 1:
            raise ValueError(f"{type(self).__name__}.floor must be in [0, 1]. Got {self.floor}.")
        if not 0 <= self.hold < 1:
            raise ValueError(f"{type(self).__name__}.hold must be in [0, 1). Got {self.hold}.")

    def after(self, x: float) -> float:
        """The factor at the fraction x of what follows the warm-up."""
        return self.floor + (1.0 - self.floor) * self.left(max(0.0, (x - self.hold) / (1 - self.hold)))

    @abstractmethod
    def left(self, y: float) -> float:
        """What is left of the way down to the floor, at the fraction y of it: 1 to 0."""


@dataclass(frozen=True, kw_only=True)
class Linear(_Decay):
    """A straight line down to the floor."""

    def left(self, y: float) -> float:
        """1 - y."""
        return 1.0 - y


@dataclass(frozen=True, kw_only=True)
class Cosine(_Decay):
    """Half a cosine down to the floor."""

    def left(self, y: float) -> float:
        """(1 + cos(pi y)) / 2."""
        return (1.0 + math.cos(math.pi * y)) / 2.0


@dataclass(frozen=True, kw_only=True)
class WSD(Schedule):
    """Warm-up, then the peak rate, then down to a floor: checkpoints before the decay can be trained on for longer."""

    decay_fraction: float = 0.2
    """Part of what follows the warm-up in which the rate falls."""
    shape: Literal["linear", "one_minus_sqrt"] = "linear"
    """one_minus_sqrt falls steeply at first and slowly at the end."""
    floor: float = 0.0
    """Share of the peak rate that is left at the end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.decay_fraction <= 1:
            raise ValueError(
                f"WSD.decay_fraction must be above 0 and at most 1. Got {self.decay_fraction}. Use Constant for none."
            )
        if not 0 <= self.floor <= 1:
            raise ValueError(f"WSD.floor must be in [0, 1]. Got {self.floor}.")

    def after(self, x: float) -> float:
        """The factor at the fraction x of what follows the warm-up."""
        y = max(0.0, (x - (1 - self.decay_fraction)) / self.decay_fraction)
        left = 1.0 - y if self.shape == "linear" else 1.0 - math.sqrt(y)
        return self.floor + (1.0 - self.floor) * left
