"""How the core's output h becomes the next state, given the state s before the application.

    Replace     s <- h
    EnergyGate  E = MLP[s ; h],  g = sigmoid(-(E + |E - E_prev| / 2) / tau),  s <- g o h + (1 - g) o s
    Selective   a = exp(-softplus(W (h - s)) o A),  s <- a o h + (1 - a) o s            LoopUS, arXiv:2605.11011
    Damped      s <- alpha h + (1 - alpha) s

EnergyGate follows dauhavanHaniAI/depth-control-protocol: public/vera_psi.py: the MLP is D/4 wide with SiLU, no first
bias, and a last bias of -1.5 tau, so gates start near 0.82; E is per token and carried over all blocks; the very first
application has no previous E and no difference term. A of Selective is exp(a_log), positive, 1 at the start (ours).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from looplab._types import Float
from looplab.nn.linear import Init, linear

Extra = Mapping[str, Tensor]
"""State fields that an update declares, by name: Float[B T width]."""


@dataclass(frozen=True, kw_only=True)
class Update(ABC):
    """The rule of the next state."""

    @property
    def fields(self) -> dict[str, int]:
        """State fields of its own, name -> width per token. All start at 0."""
        return {}

    @abstractmethod
    def build(self, dim: int, init: Init) -> nn.Module | None:
        """The module (old, new, extra) -> (state, extra), or None where the state is the core's output."""

    def matmul_params(self, dim: int) -> int:
        """Entries of the matrices that one token is multiplied with."""
        return 0


@dataclass(frozen=True, kw_only=True)
class Replace(Update):
    """The core's output is the next state."""

    def build(self, dim: int, init: Init) -> None:
        """Nothing."""


@dataclass(frozen=True, kw_only=True)
class EnergyGate(Update):
    """A gate from the energy of the step."""

    hidden: int
    """Width of the MLP; its authors have a quarter of the stream's."""
    tau: float = 1.0
    """Temperature of the gate."""

    def __post_init__(self):
        if self.hidden < 1:
            raise ValueError(f"EnergyGate.hidden must be at least 1. Got {self.hidden}. Its authors have dim // 4.")
        if self.tau <= 0:
            raise ValueError(f"EnergyGate.tau must be positive. Got {self.tau}. Its authors have 1.")

    @property
    def fields(self) -> dict[str, int]:
        """`energy`: the last E, and 1 once there is one."""
        return {"energy": 2}

    def build(self, dim: int, init: Init) -> "EnergyGateModule":
        """The module (old, new, extra) -> (state, extra)."""
        return EnergyGateModule(self, dim, init)

    def matmul_params(self, dim: int) -> int:
        """Entries of the matrices that one token is multiplied with."""
        return (2 * dim + 1) * self.hidden


@dataclass(frozen=True, kw_only=True)
class Selective(Update):
    """A decay per channel from the change that the step proposes."""

    def build(self, dim: int, init: Init) -> "SelectiveModule":
        """The module (old, new, extra) -> (state, extra)."""
        return SelectiveModule(dim, init)

    def matmul_params(self, dim: int) -> int:
        """Entries of the matrices that one token is multiplied with."""
        return dim * dim


@dataclass(frozen=True, kw_only=True)
class Damped(Update):
    """A fixed part of the step."""

    alpha: float
    """Part of the core's output in the next state; 1 is Replace."""

    def __post_init__(self):
        if not 0 < self.alpha <= 1:
            raise ValueError(f"Damped.alpha must be above 0 and at most 1. Got {self.alpha}. 1 is Replace().")

    def build(self, dim: int, init: Init) -> "DampedModule":
        """The module (old, new, extra) -> (state, extra)."""
        return DampedModule(self.alpha)


class EnergyGateModule(nn.Module):
    """g o h + (1 - g) o s."""

    def __init__(self, config: EnergyGate, dim: int, init: Init):
        super().__init__()
        self.tau = config.tau
        self.up = linear(2 * dim, config.hidden, init=init)
        self.down = linear(config.hidden, 1, init=init, bias=True)
        nn.init.constant_(self.down.bias, -1.5 * config.tau)

    def forward(
        self, old: Float[Tensor, "batch seq dim"], new: Float[Tensor, "batch seq dim"], extra: Extra
    ) -> tuple[Float[Tensor, "batch seq dim"], dict[str, Tensor]]:
        """The next state and the energy it was gated with."""
        energy = self.down(F.silu(self.up(torch.cat([old, new], dim=-1))))
        previous, known = extra["energy"].split(1, dim=-1)
        change = known * (energy - previous).abs()
        gate = torch.sigmoid(-(energy + change / 2) / self.tau)
        state = gate * new + (1 - gate) * old
        return state, {"energy": torch.cat([energy, torch.ones_like(energy)], dim=-1)}


class SelectiveModule(nn.Module):
    """a o h + (1 - a) o s."""

    def __init__(self, dim: int, init: Init):
        super().__init__()
        self.w = linear(dim, dim, init=init)
        self.a_log = nn.Parameter(torch.zeros(dim))

    def forward(
        self, old: Float[Tensor, "batch seq dim"], new: Float[Tensor, "batch seq dim"], extra: Extra
    ) -> tuple[Float[Tensor, "batch seq dim"], dict[str, Tensor]]:
        """The next state."""
        a = torch.exp(-F.softplus(self.w(new - old)) * self.a_log.exp())
        return a * new + (1 - a) * old, {}


class DampedModule(nn.Module):
    """alpha h + (1 - alpha) s."""

    def __init__(self, alpha: float):
        super().__init__()
        self.alpha = alpha

    def forward(
        self, old: Float[Tensor, "batch seq dim"], new: Float[Tensor, "batch seq dim"], extra: Extra
    ) -> tuple[Float[Tensor, "batch seq dim"], dict[str, Tensor]]:
        """The next state."""
        return self.alpha * new + (1 - self.alpha) * old, {}
