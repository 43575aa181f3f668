"""Rules that move the state of a `Known` model. What depends on the iteration is a table with one row per iteration.

Maps       gain[iteration] truth + shift[iteration]
Towards    state + rate[block, iteration] (truth - state) + shift[block, iteration]
Writes     the features that (block, iteration) owns become `strength` times the truth; the others stay
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from looplab._types import Bool, Float, Int
from looplab.audit.positive_controls.known import as_hidden
from looplab.audit.positive_controls.letters import Chain


class Maps(nn.Module):
    """An affine map of the truth, feature by feature, whatever the state was."""

    def __init__(self, gain: Float[Tensor, "steps #dim"], shift: Float[Tensor, "steps #dim"]):
        super().__init__()
        self.gain, self.shift = nn.Parameter(gain), nn.Parameter(shift)

    def forward(
        self,
        state: Float[Tensor, "batch seq dim"],
        truth: Float[Tensor, "batch seq dim"],
        block: int,
        iteration: Int[Tensor, " batch"],
    ) -> Float[Tensor, "batch seq dim"]:
        return truth * self.gain[iteration][:, None] + self.shift[iteration][:, None]


class Towards(nn.Module):
    """A step from the state to the truth.

    Args:
        rates: One row per block, one rate per iteration. Rate 1 after rate r is the truth; rate 0 is the identity.
        shift: What the iteration adds; zeros are an index that is there and does nothing.
    """

    def __init__(self, rates: Sequence[Sequence[float]], shift: Float[Tensor, "blocks steps dim"] | None = None):
        super().__init__()
        self.rates = nn.Parameter(torch.tensor(rates, dtype=torch.float32))
        self.shift = None if shift is None else nn.Parameter(shift)

    def forward(
        self,
        state: Float[Tensor, "batch seq dim"],
        truth: Float[Tensor, "batch seq dim"],
        block: int,
        iteration: Int[Tensor, " batch"],
    ) -> Float[Tensor, "batch seq dim"]:
        moved = torch.lerp(state, truth, self.rates[block, iteration][:, None, None])
        return moved if self.shift is None else moved + self.shift[block, iteration][:, None]


class Writes(nn.Module):
    """Writes a part of the truth, whatever was there: every application is idempotent."""

    def __init__(self, owns: Bool[Tensor, "blocks steps dim"], strength: Float[Tensor, "blocks steps"]):
        super().__init__()
        self.register_buffer("owns", owns)
        self.strength = nn.Parameter(strength)

    def forward(
        self,
        state: Float[Tensor, "batch seq dim"],
        truth: Float[Tensor, "batch seq dim"],
        block: int,
        iteration: Int[Tensor, " batch"],
    ) -> Float[Tensor, "batch seq dim"]:
        written = truth * self.strength[block, iteration][:, None, None]
        owns: Tensor = self.owns  # type: ignore[assignment]
        return torch.where(owns[block, iteration][:, None], written, state)


def quarters(size: int, steps: int = 4) -> Bool[Tensor, "steps dim"]:
    """Row t holds the t-th of `steps` equal parts of the features."""
    return torch.arange(size)[None] * steps // size == torch.arange(steps)[:, None]


def stationary_start(chain: Chain) -> Maps:
    """The stationary law at iteration 0, the truth at iteration 1: cut short, a model is worse and still calibrated."""
    start = as_hidden(torch.from_numpy(np.log(chain.stationary)))
    return Maps(torch.tensor([[0.0], [1.0]]), torch.stack([start, torch.zeros_like(start)]))
