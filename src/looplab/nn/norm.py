"""Norms, and where a layer puts them.

    RMSNorm(x)    = w o x / sqrt(mean_D(x^2) + eps)               zero-centred: (1 + w) in place of w
    LayerNorm(x)  = w o (x - mean_D(x)) / sqrt(var_D(x) + eps) + b

Statistics and division in float32 (float64 for float64 models), then cast back, then times the weight.

A layer has two branches f (attention, then feed-forward) on the stream h, with n1 before and n2 after f:

    PreNorm        h <- h + f(n1(h))
    SandwichSum    h <- n2(h + f(n1(h)))        Huginn, arXiv:2502.05171
    PreAndBranch   h <- h + n2(f(n1(h)))        Ouro, arXiv:2510.25741
    BranchOnly     h <- h + n2(f(h))            OLMo-2, arXiv:2501.00656
    PostSum        h <- n2(h + f(h))            TRM, arXiv:2510.04871
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from looplab._types import Float

Map = Callable[[Tensor], Tensor]
Gate = Tensor | float | None
"""What a branch is multiplied with before it is added; None: nothing."""


def rms_normalize(x: Float[Tensor, "*any dim"], eps: float) -> Float[Tensor, "*any dim"]:
    """x / rms(x) over the last axis, in the type of `x`."""
    return torch.rms_norm(x, x.shape[-1:], None, eps)  # in float32 inside


class RMSNormModule(nn.Module):
    """RMSNorm over the last axis."""

    def __init__(self, dim: int, *, eps: float, affine: bool, zero_centred: bool = False):
        super().__init__()
        self.eps = eps
        self.zero_centred = zero_centred
        self.weight = nn.Parameter(torch.zeros(dim) if zero_centred else torch.ones(dim)) if affine else None

    def forward(self, x: Float[Tensor, "*any dim"]) -> Float[Tensor, "*any dim"]:
        """The normed input."""
        x, weight = rms_normalize(x, self.eps), self.weight
        if weight is None:
            return x
        return x * (1 + weight if self.zero_centred else weight)


class LayerNormModule(nn.Module):
    """LayerNorm over the last axis."""

    def __init__(self, dim: int, *, eps: float, affine: bool):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim)) if affine else None
        self.bias = nn.Parameter(torch.zeros(dim)) if affine else None

    def forward(self, x: Float[Tensor, "*any dim"]) -> Float[Tensor, "*any dim"]:
        """The normed input."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        centred = wide - wide.mean(-1, keepdim=True)
        x = (centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        return x if self.weight is None or self.bias is None else x * self.weight + self.bias


@dataclass(frozen=True, kw_only=True)
class Norm(ABC):
    """A kind of norm."""

    @abstractmethod
    def build(self, dim: int) -> nn.Module:
        """The norm of vectors of width `dim`."""


@dataclass(frozen=True, kw_only=True)
class RMSNorm(Norm):
    """Division by the root mean square."""

    eps: float = 1e-6
    """Added to the mean square."""
    affine: bool = True
    """Whether a weight follows."""
    zero_centred: bool = False
    """Whether the weight is stored as its difference from 1, so that weight decay pulls it towards 1."""

    def build(self, dim: int) -> RMSNormModule:
        """The norm of vectors of width `dim`."""
        return RMSNormModule(dim, eps=self.eps, affine=self.affine, zero_centred=self.zero_centred)


@dataclass(frozen=True, kw_only=True)
class LayerNorm(Norm):
    """Division by the standard deviation after centring."""

    eps: float = 1e-5
    """Added to the variance."""
    affine: bool = True
    """Whether a weight and a bias follow."""

    def build(self, dim: int) -> LayerNormModule:
        """The norm of vectors of width `dim`."""
        return LayerNormModule(dim, eps=self.eps, affine=self.affine)


@dataclass(frozen=True, kw_only=True)
class Placement(ABC):
    """Where the norms of a branch stand. `gate`, where given, scales what the branch adds to the stream."""

    norms: ClassVar[tuple[str, ...]]
    """Which norms exist: "in" (before the branch), "out" (after it)."""

    @abstractmethod
    def apply(self, h: Tensor, branch: Map, before: Map, after: Map, gate: Gate) -> Tensor:
        """The stream after one branch; a norm that `norms` lacks is not called."""


def _gated(gate: Gate, x: Tensor) -> Tensor:
    return x if gate is None else gate * x


@dataclass(frozen=True, kw_only=True)
class PreNorm(Placement):
    """h + f(n1(h))."""

    norms: ClassVar[tuple[str, ...]] = ("in",)

    def apply(self, h: Tensor, branch: Map, before: Map, after: Map, gate: Gate) -> Tensor:
        """The stream after one branch."""
        return h + _gated(gate, branch(before(h)))


@dataclass(frozen=True, kw_only=True)
class SandwichSum(Placement):
    """n2(h + f(n1(h)))."""

    norms: ClassVar[tuple[str, ...]] = ("in", "out")

    def apply(self, h: Tensor, branch: Map, before: Map, after: Map, gate: Gate) -> Tensor:
        """The stream after one branch."""
        return after(h + _gated(gate, branch(before(h))))


@dataclass(frozen=True, kw_only=True)
class PreAndBranch(Placement):
    """h + n2(f(n1(h)))."""

    norms: ClassVar[tuple[str, ...]] = ("in", "out")

    def apply(self, h: Tensor, branch: Map, before: Map, after: Map, gate: Gate) -> Tensor:
        """The stream after one branch."""
        return h + _gated(gate, after(branch(before(h))))


@dataclass(frozen=True, kw_only=True)
class BranchOnly(Placement):
    """h + n2(f(h))."""

    norms: ClassVar[tuple[str, ...]] = ("out",)

    def apply(self, h: Tensor, branch: Map, before: Map, after: Map, gate: Gate) -> Tensor:
        """The stream after one branch."""
        return h + _gated(gate, after(branch(h)))


@dataclass(frozen=True, kw_only=True)
class PostSum(Placement):
    """n2(h + f(h))."""

    norms: ClassVar[tuple[str, ...]] = ("out",)

    def apply(self, h: Tensor, branch: Map, before: Map, after: Map, gate: Gate) -> Tensor:
        """The stream after one branch."""
        return after(h + _gated(gate, branch(h)))
