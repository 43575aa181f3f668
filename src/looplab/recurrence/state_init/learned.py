"""A trained vector as first state of every token."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from looplab._types import Float
from looplab.nn.linear import Init
from looplab.recurrence.state_init.base import STATE_INITS, StateInit


@STATE_INITS.register("learned")
@dataclass(frozen=True, kw_only=True)
class Learned(StateInit):
    """s_0 = a trained vector."""

    def build(self, state_dim: int, embed_dim: int, *, embed_scale: float, init: Init) -> "LearnedModule":
        """The module (embeds, noise) -> s_0."""
        return LearnedModule(state_dim, init)


class LearnedModule(nn.Module):
    """The vector, for every token."""

    def __init__(self, state_dim: int, init: Init):
        super().__init__()
        self.start = nn.Parameter(torch.empty(state_dim))
        init.matrix_(self.start)

    def forward(
        self, embeds: Float[Tensor, "batch seq embed_dim"], noise: None = None
    ) -> Float[Tensor, "batch seq state_dim"]:
        """The vector, for every token."""
        return self.start.expand(*embeds.shape[:2], -1)
