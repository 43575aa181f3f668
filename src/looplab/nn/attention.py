"""Multi-head attention over a stream, with grouped key-value heads, every position rule, and a cache that is handed in.

    q, k, v = W_q x, W_k x, W_v x                 per head; query head i reads key-value head i // (heads / kv_heads)
    q, k    = q + b_q, k + b_k                    `qk_bias`, before rotary
    q, k    = norm(rotate(q)), norm(rotate(k))    or rotate(norm(.)), by Rope.order
    v       = v + 2 sigmoid(G x[:32]) o V[token]  `value_embedding`, arXiv:2604.12946
    score   = q . k / sqrt(head_dim);  with `softcap` c: c tanh(score / c);  + bias of the position rule
    y       = W_o (softmax(score) v);  with `output_gate`: W_o (sigmoid(W_g x) o softmax(score) v), arXiv:2505.06708

Keys enter the cache after rotary and after QK-norm. A query without a visible key (padding) attends to itself, so that
no row ever holds a NaN.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from looplab._types import Bool, Float, Int
from looplab.nn.linear import Deltas, Init, linear, project
from looplab.nn.norm import RMSNormModule
from looplab.nn.rope import (
    ALiBi,
    ALiBiModule,
    FallingBias,
    FallingBiasModule,
    Position,
    RelativeBias,
    RelativeBiasModule,
    Rope,
    Rotary,
)

BAND = 16
"""A window is narrow where at least so many of them fit into the row."""
VALUE_GATE_WIDTH = 32
"""Channels of the input that the gate of value embeddings reads."""


@runtime_checkable
class KVView(Protocol):
    """What a cache offers to one attention layer at one application."""

    @property
    def positions(self) -> Int[Tensor, "batch visible"]:
        """Positions of all visible keys; valid after `append`."""

    def append(
        self, keys: Float[Tensor, "batch kv_heads seq head_dim"], values: Float[Tensor, "batch kv_heads seq head_dim"]
    ) -> tuple[
        Float[Tensor, "batch kv_heads visible head_dim"],
        Float[Tensor, "batch kv_heads visible head_dim"],
        Bool[Tensor, "batch 1 seq visible"] | None,
    ]:
        """Stores the new keys and values; returns all visible ones and who may see what, a query of padding itself.

        None means that every query sees every key.
        """


class Scope(NamedTuple):
    """What all layers of one attention shape share over all applications: positions, rotary tables and the mask."""

    positions: Int[Tensor, "batch seq"]
    rotary: Rotary | None
    mask: Bool[Tensor, "batch 1 seq seq"] | None
    """None: plain causal (or plain full) attention, a cache that brings its own mask, or a narrow band."""
    band: bool = False
    """Whether every row is whole and in order, and the window so narrow that queries fetch their few keys."""


@dataclass(frozen=True, kw_only=True)
class RMS:
    """QK-norm by the root mean square."""

    affine: bool
    """Whether a weight follows."""
    over: Literal["head", "full"]
    """Each head by itself, or all heads of a token together."""
    eps: float
    """Added to the mean square. Where a paper's code says "the type's epsilon" in float32: 2**-23."""

    def __post_init__(self):
        if self.over not in ("head", "full"):
            raise ValueError(f"RMS.over must be 'head' or 'full'. Got {self.over!r}. Choose one of them.")

    def build(self, heads: int, head_dim: int) -> RMSNormModule:
        """The norm of queries (or keys) of `heads` heads."""
        width = head_dim if self.over == "head" else heads * head_dim
        return RMSNormModule(width, eps=self.eps, affine=self.affine)

    def apply(self, norm: nn.Module, x: Tensor) -> Tensor:
        """`norm` on a tensor B H T d."""
        if self.over == "head":
            return norm(x)
        heads = x.shape[1]
        return norm(x.transpose(1, 2).flatten(2)).unflatten(-1, (heads, -1)).transpose(1, 2)


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Shape and choices of an attention branch."""

    heads: int
    kv_heads: int
    head_dim: int
    position: Position
    qk_norm: RMS | None = None
    qk_bias: bool = False
    """A trained bias per query head and per key head, [2, heads, head_dim]."""
    qkv_bias: bool = False
    """Biases of the maps q, k and v."""
    window: int | None = None
    """Number of last positions a query sees, itself included."""
    output_gate: bool = False
    value_embedding: bool = False
    """Whether the layer has a gate for value embeddings; the tables belong to the model."""
    softcap: float | None = None
    """Bound of the scores."""
    causal: bool = True

    def __post_init__(self):
        for name in ("heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"attention.{name} must be at least 1. Got {getattr(self, name)}. Give a positive size."
                )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads}). "
                f"Got remainder {self.heads % self.kv_heads}. Choose a divisor of heads."
            )
        if self.qk_bias and self.kv_heads != self.heads:
            raise ValueError(
                f"attention.qk_bias has one key bias per query head; kv_heads must equal heads ({self.heads}). "
                f"Got {self.kv_heads}. Set kv_heads={self.heads} or qk_bias=False"
            )
        if not isinstance(self.position, Position):
            raise ValueError(
                "attention.position: must be one of Rope, NoPE, ALiBi, Learned, RelativeBias, FallingBias. "
                f"Got {self.position!r}. Give one rule"
            )
        if isinstance(self.position, Rope) and self.head_dim % 2:
            raise ValueError(
                f"attention.head_dim must be even for Rope. Got {self.head_dim}. Use {self.head_dim + 1} or NoPE()"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(
                f"attention.window must be at least 1 (the token itself). Got {self.window}. Use None for all."
            )
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"attention.softcap must be positive. Got {self.softcap}. Use None for no bound.")

    @property
    def width(self) -> int:
        """heads * head_dim, the attention width of the cost formulas."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Numbers that one cache slot keeps per token."""
        return 2 * self.kv_heads * self.head_dim

    def linears(self, dim: int) -> dict[str, tuple[int, int]]:
        """Name of each large linear map -> (inputs, outputs)."""
        keys = self.kv_heads * self.head_dim
        maps = {"q": (dim, self.width), "k": (dim, keys), "v": (dim, keys), "o": (self.width, dim)}
        return maps | ({"g": (dim, self.width)} if self.output_gate else {})

    def matmul_params(self, dim: int) -> int:
        """Entries of the matrices that one token is multiplied with."""
        gate = min(VALUE_GATE_WIDTH, dim) * self.kv_heads if self.value_embedding else 0
        return sum(a * b for a, b in self.linears(dim).values()) + gate

    def build(self, dim: int, init: Init) -> "AttentionModule":
        """The branch on a stream of width `dim`."""
        return AttentionModule(self, dim, init)

    def scope(
        self,
        positions: Int[Tensor, "batch seq"],
        valid: Bool[Tensor, "batch seq"] | None = None,
        *,
        document_ids: Int[Tensor, "batch seq"] | None = None,
        cached: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> Scope:
        """What every layer of this shape needs for these tokens; made once per `encode`.

        Args:
            positions: Position of every token in its row.
            valid: False on padding; None: no padding.
            document_ids: Tokens of one row see each other only where these are equal.
            cached: Whether the layers are given a `KVView`, whose mask then rules.
            dtype: Type of the stream.
        Raises:
            ValueError: `document_ids` together with a cache.
        """
        if cached and document_ids is not None:
            raise ValueError(
                "scope: document_ids must be None under a cache. Got both. Decode one document per row instead."
            )
        rotary = None
        if isinstance(self.position, Rope):
            rotary = self.position.tables(positions, self.head_dim, torch.promote_types(dtype, torch.float32))
        plain = not cached and valid is None and document_ids is None and self.softcap is None
        narrow = plain and self.causal and self.window is not None and positions.shape[1] >= BAND * self.window
        # A compiled graph cannot branch on values; fake tensors have none and stand for whole rows.
        band = narrow and not torch.compiler.is_compiling() and _in_order(positions)
        mask = None if cached or band else self._mask(positions, valid, document_ids)
        return Scope(positions, rotary, mask, band)

    def _mask(self, positions: Tensor, valid: Tensor | None, document_ids: Tensor | None) -> Tensor | None:
        """Who sees whom without a cache, B 1 T T; None where plain attention says the same."""
        biased = isinstance(self.position, (ALiBi, RelativeBias, FallingBias)) or self.softcap is not None
        if valid is None and document_ids is None and self.window is None and not (biased and self.causal):
            return None
        batch, seq = positions.shape
        mask = torch.ones(seq, seq, dtype=torch.bool, device=positions.device)
        mask = (mask.tril() if self.causal else mask).expand(batch, 1, seq, seq)
        if self.window is not None:
            mask = mask & _near(positions, positions, self.window)
        if document_ids is not None:
            mask = mask & (document_ids[:, None, :, None] == document_ids[:, None, None, :])
        if valid is not None:
            mask = _see_yourself(mask & valid[:, None, None, :])
        return mask


class AttentionModule(nn.Module):
    """The branch of `Attention`."""

    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    o: nn.Linear
    g: nn.Linear

    def __init__(self, config: Attention, dim: int, init: Init):
        super().__init__()
        self.config = config
        for name, (inputs, outputs) in config.linears(dim).items():
            bias = config.qkv_bias and name in ("q", "k", "v")
            self.add_module(name, linear(inputs, outputs, init=init, bias=bias, output=name == "o"))
        if config.value_embedding:
            self.value_gate = linear(min(VALUE_GATE_WIDTH, dim), config.kv_heads, init=init)
        if config.qk_norm is not None:
            self.q_norm = config.qk_norm.build(config.heads, config.head_dim)
            self.k_norm = config.qk_norm.build(config.kv_heads, config.head_dim)
        if config.qk_bias:
            self.qk_bias = nn.Parameter(torch.zeros(2, config.heads, config.head_dim))
        self.bias: Callable[[Tensor], Tensor] | None = None
        if isinstance(config.position, RelativeBias):
            self.bias = RelativeBiasModule(config.heads, config.position.max)
        elif isinstance(config.position, FallingBias):
            self.bias = FallingBiasModule(config.heads, config.position)
        elif isinstance(config.position, ALiBi):
            self.bias = ALiBiModule(config.position, config.heads)

    def forward(
        self,
        x: Float[Tensor, "batch seq dim"],
        scope: Scope,
        view: KVView | None = None,
        *,
        value_embeds: Float[Tensor, "batch seq kv_width"] | None = None,
        deltas: Deltas | None = None,
    ) -> Float[Tensor, "batch seq dim"]:
        """The branch's output.

        Args:
            scope: Of `config.scope` for these tokens.
            view: Where keys and values are kept; None: the tokens see each other only.
            value_embeds: Looked-up value embeddings, kv_heads * head_dim wide.
            deltas: Low-rank changes of the linear maps, one per row.
        Raises:
            ValueError: `value_embeds` for a layer without the gate.
        """
        deltas = deltas or {}
        q = self._heads(project(self.q, x, deltas.get("q")))
        k = self._heads(project(self.k, x, deltas.get("k")))
        v = self._heads(project(self.v, x, deltas.get("v")))
        q, k = self._prepare(q, k, scope.rotary)
        if value_embeds is not None:
            v = v + self._value(x, value_embeds)
        if scope.band:
            y = self._attend_band(q, k, v)
            return self._finish(y, x, deltas)
        mask, keys_at = scope.mask, scope.positions
        if view is not None:
            k, v, mask = view.append(k, v)
            if self.bias is not None or self.config.window is not None:
                keys_at = view.positions
            if self.config.window is not None:
                near = _near(scope.positions, keys_at, self.config.window)
                mask = near if mask is None else mask & near
        bias = None if self.bias is None else self.bias(_distance(scope.positions, keys_at)).to(q.dtype)
        return self._finish(self._attend(q, k, v, mask, bias, plain=view is None), x, deltas)

    def _finish(self, y: Tensor, x: Tensor, deltas: Deltas) -> Tensor:
        """Heads joined, gated and mapped back to the stream."""
        y = y.transpose(1, 2).flatten(2)
        if self.config.output_gate:
            y = torch.sigmoid(project(self.g, x, deltas.get("g"))) * y
        return project(self.o, y, deltas.get("o"))

    def _heads(self, y: Tensor) -> Tensor:
        return y.view(*y.shape[:2], -1, self.config.head_dim).transpose(1, 2)  # B H T d

    def _prepare(self, q: Tensor, k: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor]:
        """Biases, rotary and QK-norm, in the configured order."""
        if self.config.qk_bias:
            q, k = q + self.qk_bias[0, :, None], k + self.qk_bias[1, :, None]
        norm, rope = self.config.qk_norm, self.config.position
        if rotary is not None and isinstance(rope, Rope) and rope.order == "before_norm":
            q, k = self._rotated(rope, q, k, rotary)
        if norm is not None:
            q, k = norm.apply(self.q_norm, q), norm.apply(self.k_norm, k)
        if rotary is not None and isinstance(rope, Rope) and rope.order == "after_norm":
            q, k = self._rotated(rope, q, k, rotary)
        return q, k

    def _rotated(self, rope: Rope, q: Tensor, k: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Both turned in one go: half the launches, which is what decoding one token waits for."""
        if self.config.softcap is not None:  # whose matrix products would copy the two parts of one tensor
            return rope.rotate(q, rotary), rope.rotate(k, rotary)
        turned = rope.rotate(torch.cat([q, k], dim=1), rotary)
        return turned[:, : q.shape[1]], turned[:, q.shape[1] :]

    def _value(self, x: Tensor, value_embeds: Tensor) -> Tensor:
        """What value embeddings add to v."""
        if not self.config.value_embedding:
            raise ValueError(
                "attention: value_embeds must be None for a layer without a gate. Got a tensor. "
                "Set value_embedding=True."
            )
        gate = 2 * torch.sigmoid(self.value_gate(x[..., : self.value_gate.in_features]))  # B T Hkv
        return (gate[..., None] * value_embeds.unflatten(-1, (self.config.kv_heads, -1))).transpose(1, 2)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, *, plain: bool
    ) -> Tensor:
        grouped = self.config.kv_heads != self.config.heads
        if self.config.softcap is not None:
            return self._attend_capped(q, k, v, mask, bias, self.config.softcap)
        if bias is not None and mask is not None:
            bias = bias.masked_fill(~mask, -torch.inf)
        score = mask if bias is None else bias
        is_causal = plain and score is None and self.config.causal
        return F.scaled_dot_product_attention(q, k, v, attn_mask=score, is_causal=is_causal, enable_gqa=grouped)

    def _attend_band(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention over the last `window` positions: work and memory grow with seq * window, not seq^2."""
        assert self.config.window is not None
        groups = self.config.heads // self.config.kv_heads
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        distances = torch.arange(self.config.window, device=q.device)
        # Row i of `near` is what stood i positions back; before the start of the row there is nothing.
        near = [F.pad(k, (0, 0, i, 0))[:, :, : k.shape[2]] for i in range(self.config.window)]
        score = torch.stack([(q * past).sum(-1) for past in near], dim=-1) * self.config.head_dim**-0.5
        if self.bias is not None:
            score = score + self.bias(distances[None, None]).to(q.dtype)
        seen = torch.arange(q.shape[2], device=q.device)[:, None] >= distances
        weights = score.masked_fill(~seen, -torch.inf).softmax(-1)
        shifted = [F.pad(v, (0, 0, i, 0))[:, :, : v.shape[2]] for i in range(self.config.window)]
        return sum((weights[..., i : i + 1] * past for i, past in enumerate(shifted)), torch.zeros_like(q))

    def _attend_capped(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, cap: float
    ) -> Tensor:
        """The same, with bounded scores, which no fused kernel offers."""
        kv_heads, heads = self.config.kv_heads, self.config.heads
        queries = q.unflatten(1, (kv_heads, -1)).flatten(2, 3)  # B Hkv group*T d: keys and values are not repeated
        score = (queries @ k.contiguous().mT) * self.config.head_dim**-0.5
        score = cap * torch.tanh(score / cap)
        score = score.unflatten(2, (heads // kv_heads, -1)).flatten(1, 2)  # B H T S
        if bias is not None:
            score = score + bias
        if mask is not None:
            score = score.masked_fill(~mask, -torch.inf)
        weights = score.softmax(-1, dtype=torch.promote_types(score.dtype, torch.float32)).to(v.dtype)
        mixed = weights.unflatten(1, (kv_heads, -1)).flatten(2, 3) @ v.contiguous()
        return mixed.unflatten(2, (heads // kv_heads, -1)).flatten(1, 2)


def _distance(queries: Tensor, keys: Tensor) -> Tensor:
    """Positions of queries minus positions of keys, B T S."""
    return queries[:, :, None] - keys[:, None, :]


def _in_order(positions: Tensor) -> bool:
    """Whether every row counts its positions one by one."""
    return torch._guards.active_fake_mode() is not None or bool((positions.diff(dim=1) == 1).all())


def _near(queries: Tensor, keys: Tensor, window: int) -> Tensor:
    """Which keys lie within the window of which query, B 1 T S."""
    return (_distance(queries, keys).abs() < window)[:, None]


def _see_yourself(mask: Tensor) -> Tensor:
    """`mask` (B 1 T T), where a query that sees nothing sees itself."""
    own = torch.eye(mask.shape[-1], dtype=torch.bool, device=mask.device)
    return mask | (own & ~mask.any(-1, keepdim=True))
