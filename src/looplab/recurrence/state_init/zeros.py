"""Zero as first state."""

from dataclasses import dataclass

from torch import Tensor, nn

from looplab._types import Float
from looplab.nn.linear import Init
from looplab.recurrence.state_init.base import STATE_INITS, StateInit


@STATE_INITS.register("zeros")
@dataclass(frozen=True, kw_only=True)
class Zeros(StateInit):
    """s_0 = 0."""

    def build(self, state_dim: int, embed_dim: int, *, embed_scale: float, init: Init) -> "ZerosModule":
        """The module (embeds, noise) -> s_0."""
        return ZerosModule(state_dim)


class ZerosModule(nn.Module):
    """s_0 = 0."""

    def __init__(self, state_dim: int):
        super().__init__()
        self.state_dim = state_dim

    def forward(
        self, embeds: Float[Tensor, "batch seq embed_dim"], noise: None = None
    ) -> Float[Tensor, "batch seq state_dim"]:
        """Zeros of the context's type."""
        return embeds.new_zeros(*embeds.shape[:2], self.state_dim)
