"""A law that is learned along with the model, by reward.

    p = softmax(phi);     after a step of depth T with loss c:    R = exp(-c) - cost_weight T / max_steps
    phi follows Adam on  -(R - b) log p_T - entropy_weight H(p) + mean_penalty (E_p[T] - target_mean)^2
    b: moving average of R, as it was before this R

The first `warmup` steps move b alone. Configurations do not change: `LearnedCategorical.pmf` is where the law begins
(uniform), and the run's `DepthLearner` says what it has become. Reference: arXiv:2610.06833; the cost term and the
penalty on the mean are ours, and off by default.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from looplab.recurrence.depth.base import DEPTH_SAMPLERS, DepthSampler, inverse
from looplab.recurrence.philox import uniforms

BETAS, EPS = (0.9, 0.999), 1e-8


@DEPTH_SAMPLERS.register("learned")
@dataclass(frozen=True, kw_only=True)
class LearnedCategorical(DepthSampler):
    """T = 1 .. max_steps with learned probabilities, uniform at first."""

    max_steps: int
    entropy_weight: float = 0.01
    cost_weight: float = 0.0
    """Reward lost at the greatest depth."""
    target_mean: float | None = None
    mean_penalty: float = 0.0
    """Of the squared distance between mean and `target_mean`."""
    lr: float = 1e-3
    baseline_decay: float = 0.95
    warmup: int = 32
    """Steps that move the baseline only."""

    def __post_init__(self) -> None:
        if self.max_steps < 1:
            raise ValueError(f"LearnedCategorical.max_steps must be at least 1. Got {self.max_steps}.")
        for name in ("entropy_weight", "cost_weight", "mean_penalty", "warmup"):
            if getattr(self, name) < 0:
                raise ValueError(f"LearnedCategorical.{name} must be at least 0. Got {getattr(self, name)}.")
        if not self.lr > 0:
            raise ValueError(f"LearnedCategorical.lr must be positive. Got {self.lr}.")
        if not 0 <= self.baseline_decay < 1:
            raise ValueError(f"LearnedCategorical.baseline_decay must be in [0, 1). Got {self.baseline_decay}.")
        if (self.target_mean is None) != (self.mean_penalty == 0):
            raise ValueError(
                "LearnedCategorical.target_mean and mean_penalty must be given together. "
                f"Got {self.target_mean} and {self.mean_penalty}."
            )

    def pmf(self, step: int | None = None) -> NDArray[np.float64]:
        return np.concatenate([[0.0], np.full(self.max_steps, 1.0 / self.max_steps)])

    def learner(self) -> "DepthLearner":
        """Begins a run."""
        return DepthLearner(self)

    def __str__(self) -> str:
        return f"LearnedCategorical(max_steps={self.max_steps})"


class DepthLearner:
    """The law of one run, as far as it has come."""

    def __init__(self, config: LearnedCategorical):
        self.config = config
        self.phi, self.first, self.second = (np.zeros(config.max_steps) for _ in range(3))
        self.baseline, self.steps = 0.0, 0

    def pmf(self) -> NDArray[np.float64]:
        """Probability of T = 0 .. max_steps now."""
        return np.concatenate([[0.0], np.exp(self._log_law())])

    def draw(self, key: int, step: int, rows: NDArray[np.int64], micro_batch: int = 0) -> NDArray[np.int64]:
        """As of other laws, from the law as it is now."""
        return inverse(self.pmf(), uniforms(key, step, rows, micro_batch))

    def update(self, depth: int, loss: float) -> None:
        """Learns from one optimizer step.

        Args:
            depth: What was drawn.
            loss: Mean cross-entropy per token, in nats.
        """
        c = self.config
        reward = math.exp(-loss) - c.cost_weight * depth / c.max_steps
        before = reward if self.steps == 0 else self.baseline
        self.baseline = c.baseline_decay * before + (1 - c.baseline_decay) * reward
        self.steps += 1
        if self.steps > c.warmup:
            self._move(self.slope(depth, reward - before), self.steps - c.warmup)

    def slope(self, depth: int, advantage: float) -> NDArray[np.float64]:
        """Gradient of the objective with respect to phi."""
        c, log_law = self.config, self._log_law()
        law, depths = np.exp(log_law), np.arange(1, c.max_steps + 1)
        entropy, mean = -law @ log_law, law @ depths
        found = advantage * law + c.entropy_weight * law * (log_law + entropy)
        found[depth - 1] -= advantage
        if c.target_mean is not None:
            found = found + 2 * c.mean_penalty * (mean - c.target_mean) * law * (depths - mean)
        return found

    def state_dict(self) -> dict[str, list[float]]:
        """All that is to be kept, in numbers that JSON brings back to the bit."""
        arrays = {name: getattr(self, name).tolist() for name in ("phi", "first", "second")}
        return {**arrays, "baseline": [self.baseline], "steps": [float(self.steps)]}

    def load_state_dict(self, state: Mapping[str, list[float]]) -> None:
        """Goes on from there."""
        self.phi, self.first, self.second = (np.array(state[name]) for name in ("phi", "first", "second"))
        self.baseline, self.steps = state["baseline"][0], int(state["steps"][0])

    def _log_law(self) -> NDArray[np.float64]:
        shifted = self.phi - self.phi.max()
        return shifted - math.log(np.exp(shifted).sum())

    def _move(self, slope: NDArray[np.float64], count: int) -> None:
        """One update of Adam."""
        (b1, b2), c = BETAS, self.config
        self.first = b1 * self.first + (1 - b1) * slope
        self.second = b2 * self.second + (1 - b2) * slope**2
        size = np.sqrt(self.second / (1 - b2**count)) + EPS
        self.phi = self.phi - c.lr * self.first / (1 - b1**count) / size
