"""What happens to the state at the end of each application.

NoBoundary       s
SharedFinalNorm  norm_f(s), the readout's own norm, which the readout then skips      Ouro, arXiv:2510.25741
OwnNorm          norm(s) with its own weight                                          arXiv:2604.21106
PlainRMS         s / rms(s)
EndNorm          c s / rms(s)                                    progress-aligned recurrence; c fixed or trained
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from looplab._types import Float
from looplab.nn.norm import Norm, RMSNormModule, rms_normalize


@dataclass(frozen=True, kw_only=True)
class Boundary(ABC):
    """The rule at the end of an application."""

    @abstractmethod
    def build(self, dim: int, *, norm: Norm, final_norm: nn.Module | None) -> nn.Module | None:
        """The module state -> state, or None for no change.

        Args:
            norm: The model's kind of norm.
            final_norm: The module that the readout norms with.
        """

    @property
    def readout_is_normed(self) -> bool:
        """Whether the state already went through the readout's norm."""
        return False


@dataclass(frozen=True, kw_only=True)
class NoBoundary(Boundary):
    """The state stays as it is."""

    def build(self, dim: int, *, norm: Norm, final_norm: nn.Module | None) -> None:
        """Nothing."""


@dataclass(frozen=True, kw_only=True)
class SharedFinalNorm(Boundary):
    """The readout's norm after every application."""

    def build(self, dim: int, *, norm: Norm, final_norm: nn.Module | None) -> "SharedNorm":
        """The module state -> state."""
        if final_norm is None:
            raise ValueError("SharedFinalNorm: final_norm must be a module. Got None. Give the model a final norm.")
        return SharedNorm(final_norm)

    @property
    def readout_is_normed(self) -> bool:
        """Whether the state already went through the readout's norm."""
        return True


@dataclass(frozen=True, kw_only=True)
class OwnNorm(Boundary):
    """A norm of the model's kind with its own weight."""

    def build(self, dim: int, *, norm: Norm, final_norm: nn.Module | None) -> nn.Module:
        """The module state -> state."""
        return norm.build(dim)


@dataclass(frozen=True, kw_only=True)
class PlainRMS(Boundary):
    """Division by the root mean square."""

    eps: float = 1e-6
    """Added to the mean square."""

    def build(self, dim: int, *, norm: Norm, final_norm: nn.Module | None) -> RMSNormModule:
        """The module state -> state."""
        return RMSNormModule(dim, eps=self.eps, affine=False)


@dataclass(frozen=True, kw_only=True)
class EndNorm(Boundary):
    """Pins the root mean square of the state to c."""

    c: float = 1.0
    """Root mean square of every state after an application."""
    learned_scale: bool = False
    """Whether c is trained, starting at `c`."""
    eps: float = 1e-18
    """Added to the mean square; small, so that the value is exact to 1e-6 down to states of size 1e-6."""

    def __post_init__(self):
        if self.c <= 0:
            raise ValueError(f"EndNorm.c must be positive. Got {self.c}. Progress-aligned recurrence has 1.")

    def build(self, dim: int, *, norm: Norm, final_norm: nn.Module | None) -> "EndNormModule":
        """The module state -> state."""
        return EndNormModule(self)


class SharedNorm(nn.Module):
    """Another module's norm, held in a tuple so that its weight is not registered a second time."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self._norm = (norm,)

    def forward(self, state: Float[Tensor, "batch seq dim"]) -> Float[Tensor, "batch seq dim"]:
        """The normed state."""
        return self._norm[0](state)


class EndNormModule(nn.Module):
    """c s / rms(s)."""

    def __init__(self, config: EndNorm):
        super().__init__()
        self.eps = config.eps
        self.c = nn.Parameter(torch.full((), float(config.c))) if config.learned_scale else config.c

    def forward(self, state: Float[Tensor, "batch seq dim"]) -> Float[Tensor, "batch seq dim"]:
        """The pinned state."""
        return self.c * rms_normalize(state, self.eps)
