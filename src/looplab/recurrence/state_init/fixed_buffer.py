"""A stored vector, never trained, as first state of every token.

References: TRM, arXiv:2510.04871; HRM, arXiv:2506.21734.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from looplab._types import Float
from looplab.nn.linear import Init
from looplab.recurrence.state_init.base import STATE_INITS, StateInit


@STATE_INITS.register("fixed_buffer")
@dataclass(frozen=True, kw_only=True)
class FixedBuffer(StateInit):
    """s_0 = a stored vector, drawn once when the model is made."""

    std: float = 1.0
    """Standard deviation of the draw, truncated at two of them."""

    def __post_init__(self):
        if self.std < 0:
            raise ValueError(f"FixedBuffer.std must be at least 0. Got {self.std}. TRM and HRM have 1.")

    def build(self, state_dim: int, embed_dim: int, *, embed_scale: float, init: Init) -> "FixedBufferModule":
        """The module (embeds, noise) -> s_0."""
        return FixedBufferModule(state_dim, self.std)


class FixedBufferModule(nn.Module):
    """The stored vector, for every token."""

    start: Tensor

    def __init__(self, state_dim: int, std: float):
        super().__init__()
        start = torch.zeros(state_dim)
        if std > 0:
            nn.init.trunc_normal_(start, std=std, a=-2 * std, b=2 * std)
        self.register_buffer("start", start)

    def forward(
        self, embeds: Float[Tensor, "batch seq embed_dim"], noise: None = None
    ) -> Float[Tensor, "batch seq state_dim"]:
        """The vector, for every token."""
        return self.start.expand(*embeds.shape[:2], -1)
