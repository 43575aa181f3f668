"""Feed-forward branches.

SwiGLU            down(silu(gate x) o up x)              arXiv:2002.05202
GeGLU             down(gelu(gate x) o up x)              arXiv:2002.05202
GatedReluSquared  down(scale relu(gate x)^2 o up x)
Silu              down(silu(up x))
ReluSquared       down(scale relu(up x)^2)               arXiv:2109.08668; Parcae has scale 0.5
Gelu              down(gelu(up x))                       arXiv:1606.08415, exact erf
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from looplab._types import Float, Int
from looplab.nn.linear import Deltas, Init, linear, project


@dataclass(frozen=True, kw_only=True)
class FeedForward(ABC):
    """A feed-forward branch. Modules take `iteration` and `record` because a mixture of experts needs them."""

    @abstractmethod
    def build(self, dim: int, init: Init) -> nn.Module:
        """The branch on a stream of width `dim`."""

    @abstractmethod
    def linears(self, dim: int) -> dict[str, tuple[int, int]]:
        """Name of each linear map -> (inputs, outputs)."""

    @abstractmethod
    def matmul_params(self, dim: int) -> int:
        """Entries of the matrices that one token is multiplied with."""


@dataclass(frozen=True, kw_only=True)
class _Dense(FeedForward):
    """Up to `hidden`, an activation, and down again."""

    hidden: int
    """Inner width."""
    maps_in: ClassVar[tuple[str, ...]] = ("up",)

    def __post_init__(self):
        if self.hidden < 1:
            raise ValueError(
                f"{type(self).__name__}.hidden must be at least 1. Got {self.hidden}. Give the inner width."
            )

    @abstractmethod
    def activate(self, *inputs: Tensor) -> Tensor:
        """What stands between the maps in and the map down."""

    def build(self, dim: int, init: Init) -> "DenseModule":
        """The branch on a stream of width `dim`."""
        return DenseModule(self, dim, init)

    def linears(self, dim: int) -> dict[str, tuple[int, int]]:
        """Name of each linear map -> (inputs, outputs)."""
        return {name: (dim, self.hidden) for name in self.maps_in} | {"down": (self.hidden, dim)}

    def matmul_params(self, dim: int) -> int:
        """Entries of the matrices that one token is multiplied with."""
        return sum(a * b for a, b in self.linears(dim).values())


class DenseModule(nn.Module):
    """`down(activate(maps in))`."""

    down: nn.Linear

    def __init__(self, config: _Dense, dim: int, init: Init):
        super().__init__()
        self.config = config
        for name, (inputs, outputs) in config.linears(dim).items():
            self.add_module(name, linear(inputs, outputs, init=init, output=name == "down"))

    def forward(
        self,
        x: Float[Tensor, "batch seq dim"],
        *,
        iteration: Int[Tensor, " batch"] | None = None,
        record: dict | None = None,
        deltas: Deltas | None = None,
    ) -> Float[Tensor, "batch seq dim"]:
        """The branch's output. A dense branch neither depends on `iteration` nor records."""
        deltas = deltas or {}
        inner = self.config.activate(*(project(getattr(self, n), x, deltas.get(n)) for n in self.config.maps_in))
        return project(self.down, inner, deltas.get("down"))


@dataclass(frozen=True, kw_only=True)
class SwiGLU(_Dense):
    """down(silu(gate x) o up x)."""

    maps_in: ClassVar[tuple[str, ...]] = ("gate", "up")

    def activate(self, *inputs: Tensor) -> Tensor:
        """silu(gate) o up."""
        gate, up = inputs
        return F.silu(gate) * up


@dataclass(frozen=True, kw_only=True)
class ReluSquared(_Dense):
    """down(scale relu(up x)^2)."""

    scale: float = 1.0
    """Factor of the square."""

    def activate(self, *inputs: Tensor) -> Tensor:
        """scale relu(up)^2."""
        square = F.relu(inputs[0]).square()
        return square if self.scale == 1 else self.scale * square


@dataclass(frozen=True, kw_only=True)
class Gelu(_Dense):
    """down(gelu(up x)), the exact form."""

    def activate(self, *inputs: Tensor) -> Tensor:
        """x Phi(x)."""
        return F.gelu(inputs[0])


@dataclass(frozen=True, kw_only=True)
class Silu(_Dense):
    """down(silu(up x))."""

    def activate(self, *inputs: Tensor) -> Tensor:
        """x sigmoid(x)."""
        return F.silu(inputs[0])


@dataclass(frozen=True, kw_only=True)
class GeGLU(_Dense):
    """down(gelu(gate x) o up x), the exact form."""

    maps_in: ClassVar[tuple[str, ...]] = ("gate", "up")

    def activate(self, *inputs: Tensor) -> Tensor:
        """gelu(gate) o up."""
        gate, up = inputs
        return F.gelu(gate) * up


@dataclass(frozen=True, kw_only=True)
class GatedReluSquared(_Dense):
    """down(scale relu(gate x)^2 o up x)."""

    maps_in: ClassVar[tuple[str, ...]] = ("gate", "up")
    scale: float = 1.0
    """Factor of the square."""

    def activate(self, *inputs: Tensor) -> Tensor:
        """scale relu(gate)^2 o up."""
        gate, up = inputs
        return self.scale * F.relu(gate).square() * up
