"""A linear carry with one decay per channel.

    u = exp(-dt a) o s + dt o (W e)        dt = softplus(b), a = exp(A_log)

At the start a = 1, W = I and dt = -log(initial_decay): Parcae has initial_decay = sqrt(1/5) without weight decay on
A_log, b and W; the three-axis ablation (ifm-ai/xllm-loop) has exp(-1), so dt = 1, with weight decay. The spectral
radius of the carry is max exp(-dt a), which is below 1 for every value of the parameters.

Reference: Parcae, arXiv:2604.12946.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from looplab._types import Float, Int
from looplab.nn.linear import Init
from looplab.recurrence.injection.base import INJECTIONS, Reinjection


@dataclass(frozen=True, kw_only=True)
class LinearCarry(Reinjection):
    """An injection with a decay per channel and a matrix for the context."""

    initial_decay: float
    """exp(-dt a) at the start, between 0 and 1."""
    decay_params: bool = False
    """Whether the optimizer's weight decay acts on A_log, b and W."""

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.initial_decay < 1:
            raise ValueError(
                f"{type(self).__name__}.initial_decay must lie between 0 and 1. Got {self.initial_decay}. "
                "Parcae has 5**-0.5, the three-axis ablation exp(-1)."
            )

    def matmul_params(self, state_dim: int, embed_dim: int) -> int:
        """Entries of the matrices that one token is multiplied with."""
        return state_dim * embed_dim


class LinearCarryModule(nn.Module):
    """The two summands exp(-dt a) o s and dt o (W e)."""

    def __init__(self, config: LinearCarry, state_dim: int, embed_dim: int):
        super().__init__()
        self.no_weight_decay = () if config.decay_params else ("a_log", "dt_bias", "w.weight")
        dt = -math.log(config.initial_decay)
        self.a_log = nn.Parameter(torch.zeros(state_dim))
        self.dt_bias = nn.Parameter(torch.full((state_dim,), math.log(math.expm1(dt))))
        self.w = nn.Linear(embed_dim, state_dim, bias=False)
        nn.init.eye_(self.w.weight)  # the shared channels where the widths differ

    def decay(self) -> tuple[Tensor, Tensor]:
        """exp(-dt a) and dt, in float32 (float64 for float64 models)."""
        wide = torch.promote_types(self.dt_bias.dtype, torch.float32)
        dt = F.softplus(self.dt_bias.to(wide))
        return torch.exp(-dt * self.a_log.to(wide).exp()), dt


@INJECTIONS.register("diagonal")
@dataclass(frozen=True, kw_only=True)
class Diagonal(LinearCarry):
    """u = exp(-dt a) o s + dt o (W e)."""

    def rule(self, state_dim: int, embed_dim: int, init: Init) -> "DiagonalModule":
        """The module (state, embeds, iteration) -> u."""
        return DiagonalModule(self, state_dim, embed_dim)


class DiagonalModule(LinearCarryModule):
    """exp(-dt a) o s + dt o (W e)."""

    def forward(
        self,
        state: Float[Tensor, "batch seq state_dim"],
        embeds: Float[Tensor, "batch seq embed_dim"],
        iteration: Int[Tensor, " batch"],
    ) -> Float[Tensor, "batch seq state_dim"]:
        """u."""
        decay, dt = self.decay()
        return decay.to(state.dtype) * state + dt.to(state.dtype) * self.w(embeds)
