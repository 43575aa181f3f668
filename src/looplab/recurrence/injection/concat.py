"""Concatenation: u = W [first ; second].

    order "embeds_first"  [e ; s]    arXiv:2604.21106, started at W = [I | 0], so u = e
    order "state_first"   [s ; e]    Huginn (arXiv:2502.05171) and Parcae's linear variant

The two differ by a swap of W's halves only, so a checkpoint cannot tell them apart: the order is always stated.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from looplab._types import Float, Int
from looplab.nn.linear import Init, linear
from looplab.recurrence.injection.base import INJECTIONS, Reinjection


@INJECTIONS.register("concat")
@dataclass(frozen=True, kw_only=True)
class Concat(Reinjection):
    """u = W [first ; second]."""

    order: Literal["embeds_first", "state_first"]
    """Which of context and state stands first."""
    init: Literal["identity", "normal"]
    """identity: u = e at the start; normal: the model's start of matrices."""
    bias: bool = False

    def __post_init__(self):
        super().__post_init__()
        for name, value, known in (
            ("order", self.order, ("embeds_first", "state_first")),
            ("init", self.init, ("identity", "normal")),
        ):
            if value not in known:
                raise ValueError(
                    f"Concat.{name} must be {known[0]!r} or {known[1]!r}. Got {value!r}. Choose one of them."
                )

    def rule(self, state_dim: int, embed_dim: int, init: Init) -> "ConcatModule":
        """The module (state, embeds, iteration) -> u."""
        if self.init == "identity" and state_dim != embed_dim:
            raise ValueError(
                f"identity init needs equal widths. Got state {state_dim}, embeds {embed_dim}. Use init='normal'"
            )
        return ConcatModule(self, state_dim, embed_dim, init)

    def matmul_params(self, state_dim: int, embed_dim: int) -> int:
        """Entries of the matrices that one token is multiplied with."""
        return (state_dim + embed_dim) * state_dim


class ConcatModule(nn.Module):
    """W [first ; second]."""

    def __init__(self, config: Concat, state_dim: int, embed_dim: int, init: Init):
        super().__init__()
        self.order = config.order
        self.w = linear(state_dim + embed_dim, state_dim, init=init, bias=config.bias)
        if config.init == "identity":
            eye, zero = torch.eye(state_dim), torch.zeros(state_dim, state_dim)
            with torch.no_grad():
                self.w.weight.copy_(torch.cat([eye, zero] if self.order == "embeds_first" else [zero, eye], dim=1))

    def forward(
        self,
        state: Float[Tensor, "batch seq state_dim"],
        embeds: Float[Tensor, "batch seq embed_dim"],
        iteration: Int[Tensor, " batch"],
    ) -> Float[Tensor, "batch seq state_dim"]:
        """u."""
        both = (embeds, state) if self.order == "embeds_first" else (state, embeds)
        return self.w(torch.cat(both, dim=-1))
