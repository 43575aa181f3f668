"""A random first state from the noise z that is handed in.

    s_0 = std * embed_scale * trunc(z)        trunc(z) = Phi^-1(Phi(-c) + Phi(z) (Phi(c) - Phi(-c)))

trunc maps standard normal numbers to normal numbers within c standard deviations, so the same z serves every scale.
`std="like_init"` is sqrt(2 / (5 D)), Huginn's start of matrices: with its embed_scale sqrt(D) that is 0.6325 per entry
before truncation, which at c = 3 leaves 0.98658 of it. Without a cut, trunc(z) = z.

Reference: Huginn, arXiv:2502.05171.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from looplab._types import Float
from looplab.nn.linear import Init
from looplab.recurrence.state_init.base import STATE_INITS, StateInit
from looplab.recurrence.state_init.zeros import ZerosModule


@STATE_INITS.register("normal")
@dataclass(frozen=True, kw_only=True)
class Normal(StateInit):
    """A normal start, truncated unless `cut` is None."""

    std: float | Literal["like_init"]
    """Standard deviation before the factor of the embeddings and before truncation; 0 is the same as Zeros."""
    cut: float | None = 3.0
    """Truncation, in standard deviations; None: no truncation."""

    def __post_init__(self):
        if self.std != "like_init" and not (isinstance(self.std, (int, float)) and self.std >= 0):
            raise ValueError(
                f"Normal.std must be at least 0 or 'like_init'. Got {self.std!r}. Use Zeros() for no noise."
            )
        if self.cut is not None and self.cut <= 0:
            raise ValueError(f"Normal.cut must be positive. Got {self.cut}. Huginn has 3.")

    def noise_width(self, state_dim: int) -> int:
        """Standard normal numbers per token that the start needs."""
        return 0 if self.std == 0 else state_dim

    def build(self, state_dim: int, embed_dim: int, *, embed_scale: float, init: Init) -> "NormalModule | ZerosModule":
        """The module (embeds, noise) -> s_0."""
        if self.std == 0:
            return ZerosModule(state_dim)
        std = math.sqrt(2 / (5 * state_dim)) if self.std == "like_init" else self.std
        return NormalModule(std * embed_scale, self.cut)


class NormalModule(nn.Module):
    """std trunc(z)."""

    def __init__(self, std: float, cut: float | None):
        super().__init__()
        self.std = std
        self.cut = cut

    def forward(
        self, embeds: Float[Tensor, "batch seq embed_dim"], noise: Float[Tensor, "batch seq noise"]
    ) -> Float[Tensor, "batch seq noise"]:
        """The truncated and scaled noise, in the type of the context."""
        z = noise.to(torch.promote_types(embeds.dtype, torch.float32))
        if self.cut is None:
            return (self.std * z).to(embeds.dtype)
        low = 0.5 * math.erfc(self.cut / math.sqrt(2))
        x = torch.special.ndtri(low + torch.special.ndtr(z) * (1 - 2 * low))
        return (self.std * x.clamp(-self.cut, self.cut)).to(embeds.dtype)
