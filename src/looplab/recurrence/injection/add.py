"""Addition: u = s + g_t e, with a rule for the weight g_t.

Constant       g_t = value
LearnedScalar  g_t e = alpha RMSNorm(e) for t >= 1, nothing at t = 0      RecurTrace, arXiv:2609.03379
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from looplab._types import Float, Int
from looplab.nn.linear import Init
from looplab.nn.norm import RMSNormModule
from looplab.recurrence.injection.base import INJECTIONS, Reinjection


@dataclass(frozen=True, kw_only=True)
class Weight(ABC):
    """The weight of the context at iteration t."""

    @abstractmethod
    def build(self, dim: int) -> nn.Module:
        """The module (embeds, iteration) -> g_t e."""

    @abstractmethod
    def operator_class(self, iteration: int) -> int:
        """Equal for iterations of equal weight."""


@dataclass(frozen=True, kw_only=True)
class Constant(Weight):
    """The same weight at all iterations."""

    value: float = 1.0

    def build(self, dim: int) -> "ConstantModule":
        """The module (embeds, iteration) -> value e."""
        return ConstantModule(self.value)

    def operator_class(self, iteration: int) -> int:
        """Equal for iterations of equal weight."""
        return 0


@dataclass(frozen=True, kw_only=True)
class LearnedScalar(Weight):
    """A trained scalar times the normed context."""

    init: float = 0.0
    """Start of the scalar; 0 starts as no injection."""
    norm: bool = True
    """Whether the context is RMS-normed first, with a weight."""
    skip_first: bool = True
    """Whether iteration 0 is left alone."""
    eps: float = 1e-6
    """Of the norm."""

    def build(self, dim: int) -> "LearnedScalarModule":
        """The module (embeds, iteration) -> alpha norm(e)."""
        return LearnedScalarModule(self, dim)

    def operator_class(self, iteration: int) -> int:
        """Equal for iterations of equal weight."""
        return min(iteration, 1) if self.skip_first else 0


class ConstantModule(nn.Module):
    """value e."""

    def __init__(self, value: float):
        super().__init__()
        self.value = value

    def forward(
        self, embeds: Float[Tensor, "batch seq dim"], iteration: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch seq dim"]:
        """The weighted context."""
        return embeds if self.value == 1 else self.value * embeds


class LearnedScalarModule(nn.Module):
    """alpha norm(e)."""

    def __init__(self, config: LearnedScalar, dim: int):
        super().__init__()
        self.skip_first = config.skip_first
        self.alpha = nn.Parameter(torch.full((), float(config.init)))
        self.norm = RMSNormModule(dim, eps=config.eps, affine=True) if config.norm else None

    def forward(
        self, embeds: Float[Tensor, "batch seq dim"], iteration: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch seq dim"]:
        """The weighted context, zero in rows at iteration 0 under `skip_first`."""
        weighted = self.alpha * (embeds if self.norm is None else self.norm(embeds))
        return weighted * (iteration > 0)[:, None, None] if self.skip_first else weighted


@INJECTIONS.register("add")
@dataclass(frozen=True, kw_only=True)
class Add(Reinjection):
    """u = s + g_t e."""

    weight: Weight = Constant()

    def rule(self, state_dim: int, embed_dim: int, init: Init) -> "AddModule":
        """The module (state, embeds, iteration) -> u."""
        self._equal_widths(state_dim, embed_dim)
        return AddModule(self.weight.build(embed_dim))

    def matmul_params(self, state_dim: int, embed_dim: int) -> int:
        """Entries of the matrices that one token is multiplied with."""
        return 0

    def operator_class(self, iteration: int) -> int:
        """Equal values: the same function of (state, context)."""
        return max(self.when.operator_class(iteration), self.weight.operator_class(iteration))


class AddModule(nn.Module):
    """s + g_t e."""

    def __init__(self, weight: nn.Module):
        super().__init__()
        self.weight = weight

    def forward(
        self,
        state: Float[Tensor, "batch seq dim"],
        embeds: Float[Tensor, "batch seq dim"],
        iteration: Int[Tensor, " batch"],
    ) -> Float[Tensor, "batch seq dim"]:
        """u."""
        return state + self.weight(embeds, iteration)
