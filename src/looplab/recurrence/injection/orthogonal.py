"""A linear carry that drops what the state already says in the direction of the input.

    r = exp(-dt a) o s,  i = dt o (W e)
    u = r - (<r, i> / (|i|^2 + eps)) i + i        per token, in float32

Reference: arXiv:2610.06833; `eps` is not given there, ours is 1e-6. Parameters and their start as in `Diagonal`.
"""

from dataclasses import dataclass

from torch import Tensor

from looplab._types import Float, Int
from looplab.nn.linear import Init
from looplab.recurrence.injection.base import INJECTIONS
from looplab.recurrence.injection.diagonal import LinearCarry, LinearCarryModule


@INJECTIONS.register("orthogonal")
@dataclass(frozen=True, kw_only=True)
class Orthogonal(LinearCarry):
    """The carried state, made orthogonal to the input, plus the input."""

    eps: float = 1e-6
    """Added to the squared length of the input."""

    def rule(self, state_dim: int, embed_dim: int, init: Init) -> "OrthogonalModule":
        """The module (state, embeds, iteration) -> u."""
        return OrthogonalModule(self, state_dim, embed_dim)


class OrthogonalModule(LinearCarryModule):
    """r - (<r, i> / (|i|^2 + eps)) i + i."""

    def __init__(self, config: Orthogonal, state_dim: int, embed_dim: int):
        super().__init__(config, state_dim, embed_dim)
        self.eps = config.eps

    def forward(
        self,
        state: Float[Tensor, "batch seq state_dim"],
        embeds: Float[Tensor, "batch seq embed_dim"],
        iteration: Int[Tensor, " batch"],
    ) -> Float[Tensor, "batch seq state_dim"]:
        """u."""
        decay, dt = self.decay()
        carried = decay * state.to(decay.dtype)
        entering = dt * self.w(embeds).to(dt.dtype)
        overlap = (carried * entering).sum(-1, keepdim=True) / (entering.square().sum(-1, keepdim=True) + self.eps)
        return (carried - overlap * entering + entering).to(state.dtype)
