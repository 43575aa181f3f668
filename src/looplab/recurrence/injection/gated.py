"""A gate between state and context: u = g o s + (1 - g) o e, g = sigmoid(W_g [s ; e] + b_g).

W_g and b_g start at 0, so u is the mean of the two. Ours.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from looplab._types import Float, Int
from looplab.nn.linear import Init
from looplab.recurrence.injection.base import INJECTIONS, Reinjection


@INJECTIONS.register("gated")
@dataclass(frozen=True, kw_only=True)
class Gated(Reinjection):
    """u = g o s + (1 - g) o e."""

    def rule(self, state_dim: int, embed_dim: int, init: Init) -> "GatedModule":
        """The module (state, embeds, iteration) -> u."""
        self._equal_widths(state_dim, embed_dim)
        return GatedModule(state_dim)

    def matmul_params(self, state_dim: int, embed_dim: int) -> int:
        """Entries of the matrices that one token is multiplied with."""
        return (state_dim + embed_dim) * state_dim


class GatedModule(nn.Module):
    """g o s + (1 - g) o e."""

    def __init__(self, dim: int):
        super().__init__()
        self.gate = nn.Linear(2 * dim, dim)
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)

    def forward(
        self,
        state: Float[Tensor, "batch seq dim"],
        embeds: Float[Tensor, "batch seq dim"],
        iteration: Int[Tensor, " batch"],
    ) -> Float[Tensor, "batch seq dim"]:
        """u."""
        g = torch.sigmoid(self.gate(torch.cat([state, embeds], dim=-1)))
        return g * state + (1 - g) * embeds
