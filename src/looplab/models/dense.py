"""Dense: a plain decoder stack through the same contract. Every layer is a block that runs once.

    s_0 = embed(tokens);  s_{k+1} = layer_k(s_k);  logits = head(norm(s_L))

It is the negative control of an audit: the same interventions where nothing is repeated.
Reference: the Llama layout, arXiv:2302.13971. Deviations: none.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor, nn

from looplab._types import Bool, Float, Int
from looplab.models.base import MODELS, PRESETS, LoopedLM, count_parameters, longest_context, prepare
from looplab.nn.attention import Attention, Scope
from looplab.nn.cost import CostSpec, Group
from looplab.nn.embedding import Head, TokenEmbedding
from looplab.nn.layer import Layer
from looplab.nn.linear import Init
from looplab.nn.mlp import FeedForward, SwiGLU
from looplab.nn.norm import Norm, Placement, PreNorm, RMSNorm
from looplab.nn.rope import Learned as LearnedPositions
from looplab.nn.rope import NoPE, Rope, check_unrotated
from looplab.recurrence.depth import FixedDepth
from looplab.recurrence.kv import Cache, DepthIndexed
from looplab.recurrence.plan import Sequential
from looplab.recurrence.spec import BlockSpec, LoopSpec, StateField


@dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """Everything that fixes a dense model."""

    dim: int
    """Width of the stream."""
    vocab: int
    """Columns of the logits."""
    layers: int
    attention: Attention
    ffn: FeedForward
    norm: Norm = field(default_factory=RMSNorm)
    placement: Placement = field(default_factory=PreNorm)
    head: Head = field(default_factory=lambda: Head(tied=True))
    embed_scale: float = 1.0
    padded_vocab: int | None = None
    """Rows of the embedding, where padded beyond `vocab`."""
    max_positions: int | None = None
    """Longest trained context, in tokens."""
    unrotated_layers: tuple[int, ...] = ()
    """Layers whose attention leaves rotary positions out, as SmolLM3's NoPE layers do."""
    init: Init = field(default_factory=Init)

    def __post_init__(self) -> None:
        for name in ("dim", "vocab", "layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"DenseConfig.{name} must be at least 1. Got {getattr(self, name)}.")
        check_unrotated("DenseConfig", self.unrotated_layers, self.attention.position, self.layers)

    def attention_of(self, layer: int) -> Attention:
        """Attention of one layer."""
        return replace(self.attention, position=NoPE()) if layer in self.unrotated_layers else self.attention


class DenseContext(NamedTuple):
    """Context of a dense model."""

    embeds: Float[Tensor, "batch seq dim"]
    positions: Int[Tensor, "batch seq"]
    valid: Bool[Tensor, "batch seq"] | None
    scope: Scope


@MODELS.register("dense")
class Dense(LoopedLM):
    """A decoder stack; layer k is block k."""

    config_class = DenseConfig
    reference = "dense control; arXiv:2302.13971"

    def __init__(self, config: DenseConfig):
        super().__init__()
        c = self.config = config
        learned = c.attention.position if isinstance(c.attention.position, LearnedPositions) else None
        self.embedding = TokenEmbedding(
            c.padded_vocab or c.vocab, c.dim, scale=c.embed_scale, positions=learned, init=c.init
        )
        self.layers = nn.ModuleList(
            Layer(c.dim, attention=c.attention_of(i), ffn=c.ffn, norm=c.norm, placement=c.placement, init=c.init)
            for i in range(c.layers)
        )
        self.final_norm = c.norm.build(c.dim)
        self.lm_head = c.head.build(c.dim, vocab=c.vocab, embedding=self.embedding, init=c.init)
        self.spec = _spec(self)

    def encode(
        self,
        tokens: Int[Tensor, "batch seq"],
        cache: Cache | None = None,
        *,
        positions: Int[Tensor, "batch seq"] | None = None,
        valid: Bool[Tensor, "batch seq"] | None = None,
        extras: Mapping[str, Tensor] | None = None,
    ) -> DenseContext:
        positions, valid = prepare(self.spec, tokens, cache, positions, valid, extras)
        embeds = self.embedding(tokens, positions)
        documents = None if extras is None else extras.get("document_ids")
        scope = self.config.attention.scope(
            positions, valid, document_ids=documents, cached=cache is not None, dtype=embeds.dtype
        )
        return DenseContext(embeds, positions, valid, scope)

    def init_state(
        self, context: DenseContext, noise: Float[Tensor, "batch seq noise"] | None
    ) -> Float[Tensor, "batch seq dim"]:
        if noise is not None:
            raise ValueError(f"init_state: this model draws no noise; got width {noise.shape[-1]}. Pass noise=None")
        return context.embeds

    def step(
        self,
        state: Float[Tensor, "batch seq dim"],
        context: DenseContext,
        block: int,
        iteration: Int[Tensor, " batch"],
        cache: Cache | None = None,
        *,
        record: dict[str, Tensor] | None = None,
    ) -> Float[Tensor, "batch seq dim"]:
        view = None if cache is None else cache.view(block, 0, iteration)
        return self.layers[block](state, context.scope, view, record=record)

    def coda(
        self, state: Float[Tensor, "batch seq dim"], context: DenseContext, cache: Cache | None = None
    ) -> Float[Tensor, "batch seq dim"]:
        return self.final_norm(state)

    def head(self, hidden: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch vocab"]:
        return self.lm_head(hidden)


def _spec(model: Dense) -> LoopSpec:
    c = model.config
    position = model.embedding.position_weight
    params = count_parameters(
        [layer.parameters() for layer in model.layers],
        embedding=[model.embedding.weight],
        position=[] if position is None else [position],
        readout=model.final_norm.parameters(),
        head=model.lm_head.parameters(),
    )
    group = Group(
        matmul=c.attention.matmul_params(c.dim) + c.ffn.matmul_params(c.dim),
        attention_width=c.attention.width,
        layers=1,
        kv_width=c.attention.kv_width,
        window=c.attention.window,
    )
    return LoopSpec(
        name="dense",
        version="1",
        blocks=tuple(BlockSpec(layers=(i,), params=params.core[i]) for i in range(c.layers)),
        order=Sequential(),
        trained_depth=FixedDepth(num_steps=1),
        state={"state": StateField(width=c.dim, init="FromEmbeds")},
        kv_rule=DepthIndexed(),
        kv_rules=(DepthIndexed(),),
        causal=c.attention.causal,
        max_positions=longest_context(c.max_positions, c.attention.position),
        vocab=(c.head.columns(c.vocab), c.padded_vocab or c.vocab),
        token_ids=c.vocab,
        cells=c.head.cells,
        readout=("final_norm", "head"),
        params=params,
        cost=CostSpec(
            prelude=Group(),
            blocks=(group,) * c.layers,
            coda=Group(),
            head=Group(matmul=c.head.matmul_params(c.dim, c.vocab)),
        ),
        extras={"document_ids": False},
    )


@PRESETS.register("tiny-dense")
def tiny_dense() -> DenseConfig:
    """Three layers."""
    return DenseConfig(
        dim=32,
        vocab=64,
        layers=3,
        attention=Attention(heads=2, kv_heads=2, head_dim=16, position=Rope(base=10000.0)),
        ffn=SwiGLU(hidden=48),
        init=Init(std=0.15),
    )
