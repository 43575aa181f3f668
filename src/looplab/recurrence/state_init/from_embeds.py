"""The context as first state: s_0 = e."""

from dataclasses import dataclass

from torch import Tensor, nn

from looplab._types import Float
from looplab.nn.linear import Init
from looplab.recurrence.state_init.base import STATE_INITS, StateInit


@STATE_INITS.register("from_embeds")
@dataclass(frozen=True, kw_only=True)
class FromEmbeds(StateInit):
    """s_0 = e."""

    def build(self, state_dim: int, embed_dim: int, *, embed_scale: float, init: Init) -> "FromEmbedsModule":
        """The module (embeds, noise) -> s_0."""
        if state_dim != embed_dim:
            raise ValueError(
                f"FromEmbeds needs equal widths. Got state {state_dim}, embeds {embed_dim}. Use Zeros() or Normal(...)"
            )
        return FromEmbedsModule()


class FromEmbedsModule(nn.Module):
    """s_0 = e."""

    def forward(self, embeds: Float[Tensor, "batch seq dim"], noise: None = None) -> Float[Tensor, "batch seq dim"]:
        """The context itself."""
        return embeds
