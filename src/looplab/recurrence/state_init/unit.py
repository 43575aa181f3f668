"""A random first state whose every token has mean 0 and standard deviation 1 over its channels.

    s_0 = (z - mean(z)) / (std(z) + 1e-8)        std over D - 1

Reference: `state_init="unit"` of Parcae's code, arXiv:2604.12946.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from looplab._types import Float
from looplab.nn.linear import Init
from looplab.recurrence.state_init.base import STATE_INITS, StateInit


@STATE_INITS.register("unit")
@dataclass(frozen=True, kw_only=True)
class Unit(StateInit):
    """Standardised noise."""

    def noise_width(self, state_dim: int) -> int:
        """Standard normal numbers per token that the start needs."""
        return state_dim

    def build(self, state_dim: int, embed_dim: int, *, embed_scale: float, init: Init) -> "UnitModule":
        """The module (embeds, noise) -> s_0."""
        return UnitModule()


class UnitModule(nn.Module):
    """(z - mean(z)) / (std(z) + 1e-8)."""

    def forward(
        self, embeds: Float[Tensor, "batch seq embed_dim"], noise: Float[Tensor, "batch seq noise"]
    ) -> Float[Tensor, "batch seq noise"]:
        """The standardised noise, in the type of the context."""
        z = noise.to(torch.promote_types(embeds.dtype, torch.float32))
        std, mean = torch.std_mean(z, dim=-1, keepdim=True)
        return ((z - mean) / (std + 1e-8)).to(embeds.dtype)
