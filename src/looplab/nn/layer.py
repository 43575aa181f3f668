"""One transformer layer: attention and feed-forward, each as a branch under a norm placement (nn/norm.py).

With a modulation (AdaLN, arXiv:2602.11451) each branch f of a row becomes  g o f(n(h) o (1 + k)):  k scales what the
branch reads, g what it adds to the stream. A layer may have a constant g for all rows too (nn/residual.py); the two are
multiplied.
"""

from typing import NamedTuple

from torch import Tensor, nn

from looplab._types import Float, Int
from looplab.nn.attention import Attention, KVView, Scope
from looplab.nn.linear import Deltas, Init
from looplab.nn.mlp import FeedForward
from looplab.nn.norm import Gate, Norm, Placement


class Modulation(NamedTuple):
    """Gains of the two branches, one set per row."""

    attn_gate: Float[Tensor, "batch 1 dim"]
    ffn_gate: Float[Tensor, "batch 1 dim"]
    attn_scale: Float[Tensor, "batch 1 dim"]
    ffn_scale: Float[Tensor, "batch 1 dim"]


class Layer(nn.Module):
    """Attention, then feed-forward. Norms are named attn_in, attn_out, ffn_in, ffn_out; unused ones are identities."""

    attn_in: nn.Module
    attn_out: nn.Module
    ffn_in: nn.Module
    ffn_out: nn.Module

    def __init__(
        self,
        dim: int,
        *,
        attention: Attention,
        ffn: FeedForward,
        norm: Norm,
        placement: Placement,
        init: Init,
        residual: float = 1.0,
    ):
        """Builds the layer; `residual` is the weight of what its branches add to the stream."""
        super().__init__()
        self.placement, self.residual = placement, residual
        self.attn = attention.build(dim, init)
        self.ffn = ffn.build(dim, init)
        for branch in ("attn", "ffn"):
            for side in ("in", "out"):
                self.add_module(f"{branch}_{side}", norm.build(dim) if side in placement.norms else nn.Identity())

    @staticmethod
    def linears(dim: int, attention: Attention, ffn: FeedForward) -> dict[str, tuple[int, int]]:
        """Name of each large linear map of such a layer -> (inputs, outputs)."""
        return attention.linears(dim) | ffn.linears(dim)

    def forward(
        self,
        h: Float[Tensor, "batch seq dim"],
        scope: Scope,
        view: KVView | None = None,
        *,
        iteration: Int[Tensor, " batch"] | None = None,
        modulation: Modulation | None = None,
        deltas: Deltas | None = None,
        value_embeds: Float[Tensor, "batch seq kv_width"] | None = None,
        record: dict | None = None,
    ) -> Float[Tensor, "batch seq dim"]:
        """The stream after the layer.

        Args:
            scope: Of `Attention.scope` for these tokens.
            view: The layer's place in a cache at this application.
            iteration: Index of the application per row, for branches that depend on it.
            modulation: Gains of AdaLN.
            deltas: Low-rank changes of the linear maps, one per row.
            value_embeds: Looked-up value embeddings.
            record: Where a branch may put named tensors.
        """
        gates = self._gates(modulation)
        scales = (None, None) if modulation is None else modulation[2:]

        def attention(u: Tensor) -> Tensor:
            return self.attn(_scaled(u, scales[0]), scope, view, value_embeds=value_embeds, deltas=deltas)

        def feed_forward(u: Tensor) -> Tensor:
            return self.ffn(_scaled(u, scales[1]), iteration=iteration, record=record, deltas=deltas)

        h = self.placement.apply(h, attention, self.attn_in, self.attn_out, gates[0])
        return self.placement.apply(h, feed_forward, self.ffn_in, self.ffn_out, gates[1])

    def _gates(self, modulation: Modulation | None) -> tuple[Gate, Gate]:
        """What scales the two branches."""
        own = None if self.residual == 1 else self.residual
        if modulation is None or own is None:
            return (own, own) if modulation is None else (modulation.attn_gate, modulation.ffn_gate)
        return own * modulation.attn_gate, own * modulation.ffn_gate


def _scaled(u: Tensor, scale: Tensor | None) -> Tensor:
    return u if scale is None else u * (1 + scale)
