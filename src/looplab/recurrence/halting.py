"""Learned stopping scores: what a trained gate says about a state. Rules that act on a score are written elsewhere.

    HazardGate      w . s + b per token, the logit of the exit probability:  lambda = sigmoid(w . s + b)
                    p_t = lambda_t prod_{j<t} (1 - lambda_j), the last takes the rest (Ouro, arXiv:2510.25741)
    LookaheadGate   the same shape, about the application that comes next
    QHead           w . s + b per token, the logit of being done: stop at the first one above 0
    PreLoopGate     W e per token: one logit per number of steps, known before the loop

LookaheadGate and PreLoopGate are trained beside a finished model (`objectives/lookahead_gate.py`, `pre_loop_gate.py`)
and are no part of its folder: whoever trains them keeps them in a file of their own.

s is the part of the state that the readout starts from. No sigmoid inside: a threshold on a probability and one on a
logit are the same rule, and sums of log probabilities stay exact.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from looplab._types import Float
from looplab.nn.linear import Init
from looplab.recurrence.spec import HaltSpec


class Halt(ABC):
    """Whether a model has a trained stopping score, and of what shape."""

    @property
    @abstractmethod
    def spec(self) -> HaltSpec | None:
        """What the model declares; None: no score."""

    @abstractmethod
    def build(self, dim: int, init: Init) -> nn.Module | None:
        """The module state -> score for states of width `dim`, or None."""


@dataclass(frozen=True, kw_only=True)
class NoHalt(Halt):
    """The model has no opinion on when to stop."""

    @property
    def spec(self) -> None:
        """No score."""
        return None

    def build(self, dim: int, init: Init) -> None:
        """Nothing."""


@dataclass(frozen=True, kw_only=True)
class HazardGate(Halt):
    """A logit per token: the probability of stopping here, given that it did not stop before."""

    bias: float = 0.0
    """Start of the bias."""

    @property
    def spec(self) -> HaltSpec:
        """Layout `hazard`, about this very step."""
        rule = "the first iteration whose summed exit probability reaches the threshold, else the last"
        return HaltSpec(layout="hazard", per="token", rule=rule)

    def build(self, dim: int, init: Init) -> "HazardGateModule":
        """The module state -> logits."""
        return HazardGateModule(dim, self.bias, init)


@dataclass(frozen=True, kw_only=True)
class LookaheadGate(HazardGate):
    """A logit per token: the probability of stopping after the next iteration, given that it did not stop before.

    The decision about iteration t + 1 is there when iteration t is, so the first iteration cannot be the last.
    """

    @property
    def spec(self) -> HaltSpec:
        """Layout `hazard`, one step ahead."""
        return replace(super().spec, horizon=1)


@dataclass(frozen=True, kw_only=True)
class QHead(Halt):
    """A logit per token: the probability of being done."""

    bias: float = 0.0
    """Start of the bias."""

    @property
    def spec(self) -> HaltSpec:
        """Layout `q_halt`, about this very step."""
        return HaltSpec(layout="q_halt", per="token", rule="q_halt > 0")

    def build(self, dim: int, init: Init) -> "HazardGateModule":
        """The module state -> logits."""
        return HazardGateModule(dim, self.bias, init)


class PreLoopGate(nn.Module):
    """W e + b: how likely each number of steps is, from the context before the loop."""

    def __init__(self, dim: int, steps: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(steps, dim))
        self.bias = nn.Parameter(torch.zeros(steps))

    def forward(self, embeds: Float[Tensor, "batch seq dim"]) -> Float[Tensor, "batch seq steps"]:
        """Logits of 1 .. steps, in float32 (float64 for float64 models). Untrained, all numbers are equally likely."""
        logits = nn.functional.linear(embeds, self.weight, self.bias)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


class HazardGateModule(nn.Module):
    """w . s + b."""

    def __init__(self, dim: int, bias: float, init: Init):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, dim))
        self.bias = nn.Parameter(torch.full((1,), float(bias)))
        init.matrix_(self.weight)

    def forward(self, state: Float[Tensor, "batch seq dim"]) -> Float[Tensor, "batch seq"]:
        """Logits of lambda, in float32 (float64 for float64 models)."""
        logit = nn.functional.linear(state, self.weight, self.bias)[..., 0]
        return logit.to(torch.promote_types(logit.dtype, torch.float32))
