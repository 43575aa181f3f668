"""Looped: the configurable family. Every axis is an object; published architectures are points of it.

    e       = prelude(embed(tokens))                        NoEnvelope: e = embed(tokens)
    s_0     = state_init(e, noise)
    u       = signal(injection(s_k, e, t), t)               t the iteration index of this application
    s_{k+1} = boundary(update(s_k, layers(u)))
    hidden  = norm(coda(projection(exit_norm(s_K))))
    logits  = head(hidden)

    two levels:  low <- layers_L(injection(low + high, e)),  high <- layers_H(injection(high + low, e));  high_0 = e

Reference: the axes are those of Huginn (arXiv:2502.05171), Ouro (arXiv:2510.25741), Parcae (arXiv:2604.12946),
    iso-depth looped models (arXiv:2604.21106), LoopFormer (arXiv:2602.11451), HRM (arXiv:2506.21734) and TRM
    (arXiv:2510.04871).
Deviations: none of them is reproduced here; files of their own name map their checkpoints onto this family.
"""

from collections import namedtuple
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from looplab._config import LATER
from looplab._types import Bool, Float, Int
from looplab.models.base import (
    MODELS,
    PRESETS,
    LoopedLM,
    count_parameters,
    gather_index,
    longest_context,
    prepare,
)
from looplab.nn.attention import Attention, Scope
from looplab.nn.cost import CostSpec, Group
from looplab.nn.embedding import Head, TokenEmbedding
from looplab.nn.layer import Layer
from looplab.nn.linear import Init, linear
from looplab.nn.mlp import FeedForward, SwiGLU
from looplab.nn.norm import Norm, Placement, PreNorm, RMSNorm
from looplab.nn.residual import Residual, UnitResidual
from looplab.nn.rope import Learned as LearnedPositions
from looplab.nn.rope import NoPE, Rope, check_unrotated
from looplab.recurrence.boundary import Boundary, NoBoundary, SharedFinalNorm
from looplab.recurrence.depth import Depth, DepthSampler, FixedDepth, Grid, PrefixDepth, UniformDepth, Unknown
from looplab.recurrence.halting import Halt, NoHalt
from looplab.recurrence.injection import Add, Concat, Injection, NoInjection
from looplab.recurrence.injection.base import Reinjection
from looplab.recurrence.kv import Anchor, Average, Cache, CopyLast, DepthIndexed, First, KVRule, Modulo, Single, Skip
from looplab.recurrence.plan import (
    CODA,
    PRELUDE,
    Blocks,
    DeepSupervision,
    LayerLoop,
    ModelLoop,
    PlanOrder,
    Sequential,
    TwoLevel,
)
from looplab.recurrence.signal import AdaLN, NoSignal, Signal, StepEmbedding
from looplab.recurrence.spec import Beyond, BlockSpec, ClampLast, LoopSpec, Refuse, StateField
from looplab.recurrence.state_init import FromEmbeds, Normal, StateInit, Zeros
from looplab.recurrence.update import Replace, Update


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """Layers before and after the core."""

    prelude: int = 2
    coda: int = 2

    def __post_init__(self) -> None:
        if self.prelude < 0 or self.coda < 0:
            raise ValueError(f"Envelope.prelude and coda must be at least 0. Got {self.prelude} and {self.coda}.")


@dataclass(frozen=True, kw_only=True)
class NoEnvelope:
    """The core alone: e is the embedding."""

    prelude: Literal[0] = 0
    coda: Literal[0] = 0


@dataclass(frozen=True, kw_only=True)
class LoopedConfig:
    """Everything that fixes a model of this family. Combinations that make no sense are refused here."""

    dim: int
    """Width of the stream."""
    vocab: int
    """Columns of the logits."""
    attention: Attention
    ffn: FeedForward
    order: PlanOrder
    """How blocks are repeated; holds the default number of steps."""
    trained_depth: Depth
    """The law of training."""
    blocks: tuple[int, ...] = (4,)
    """Layers per block. LayerLoop makes every one of these layers a block of its own."""
    envelope: Envelope | NoEnvelope = field(default_factory=Envelope)
    core_attention: Attention | None = None
    """Attention of the core's layers; None: `attention`. The two share positions, rotary tables and mask."""
    core_ffn: FeedForward | None = None
    """Feed-forward of the core's layers; None: `ffn`."""
    value_tables: tuple[int, ...] | None = None
    """Stored layers (prelude, core, coda, counted through) that have a table of value embeddings; None: all, where
    `attention.value_embedding` is set."""
    value_gates: tuple[int, ...] | None = None
    """Stored layers that have the gate of value embeddings; None: all. A layer adds them if it has gate and table."""
    unrotated_layers: tuple[int, ...] = ()
    """Stored layers whose attention leaves rotary positions out, as SmolLM3's NoPE layers do."""
    injection: Injection = field(default_factory=NoInjection)
    state_init: StateInit = field(default_factory=FromEmbeds)
    boundary: Boundary = field(default_factory=NoBoundary)
    exit_norm: Literal["none", "own", "final"] = "none"
    """Once after the loop, before the coda; "final": the same weights as the final norm."""
    norm: Norm = field(default_factory=RMSNorm)
    final_norm: Norm | None = None
    """The norm that the readout reads through; None: `norm`."""
    placement: Placement = field(default_factory=PreNorm)
    residual: Residual = field(default_factory=UnitResidual, metadata=LATER)
    """Weight of the branches of the core's layers."""
    signal: Signal = field(default_factory=NoSignal)
    update: Update = field(default_factory=Replace)
    halt: Halt = field(default_factory=NoHalt)
    head: Head = field(default_factory=lambda: Head(tied=True))
    embed_scale: float = 1.0
    """Factor of the embeddings."""
    embed_norm: Norm | None = None
    prelude_norm: Norm | None = None
    state_dim: int | None = None
    """Width of the state; None: `dim`."""
    projection: bool = False
    """A learned matrix from state to stream before the coda; needed where the widths differ."""
    kv_rule: KVRule = field(default_factory=DepthIndexed)
    beyond: Beyond = field(default_factory=Refuse)
    """What an iteration index past the table of the signal means."""
    padded_vocab: int | None = None
    """Rows of the embedding, where padded beyond `vocab`."""
    max_positions: int | None = None
    """Longest trained context, in tokens."""
    init: Init = field(default_factory=Init)

    def __post_init__(self) -> None:
        for name in ("dim", "vocab"):
            if getattr(self, name) < 1:
                raise ValueError(f"LoopedConfig.{name} must be at least 1. Got {getattr(self, name)}.")
        if not self.blocks or min(self.blocks) < 1:
            raise ValueError(f"LoopedConfig.blocks must hold layer counts of at least 1. Got {self.blocks}.")
        _refuse_order(self)
        _refuse_blind_core(self)
        _refuse_widths(self)
        _refuse_core_parts(self)
        check_unrotated("LoopedConfig", self.unrotated_layers, self.attention.position, self.stored_layers)
        _refuse_short_index(self)

    @property
    def width(self) -> int:
        """Width of the state."""
        return self.dim if self.state_dim is None else self.state_dim

    @property
    def stored_layers(self) -> int:
        """Layers of prelude, core and coda, each counted once."""
        return self.envelope.prelude + sum(self.blocks) + self.envelope.coda

    @property
    def valued_layers(self) -> tuple[int, ...]:
        """Stored layers that add value embeddings."""
        tables = self.stored_tables
        return tuple(i for i in range(self.stored_layers) if i in tables and self.parts(i)[0].value_embedding)

    @property
    def stored_tables(self) -> tuple[int, ...]:
        """Stored layers that have a table of value embeddings."""
        if not self.attention.value_embedding:
            return ()
        return tuple(range(self.stored_layers)) if self.value_tables is None else self.value_tables

    def parts(self, layer: int) -> tuple[Attention, FeedForward]:
        """Attention and feed-forward of a stored layer."""
        attention, ffn = self.attention, self.ffn
        if 0 <= layer - self.envelope.prelude < sum(self.blocks):
            attention, ffn = self.core_attention or attention, self.core_ffn or ffn
        if self.value_gates is not None and layer not in self.value_gates:
            attention = replace(attention, value_embedding=False)
        if layer in self.unrotated_layers:
            attention = replace(attention, position=NoPE())
        return attention, ffn


def _refuse_order(c: LoopedConfig) -> None:
    if isinstance(c.order, Sequential):
        raise ValueError(
            "LoopedConfig.order must repeat a block. Got Sequential(). Use models.dense for a dense stack."
        )
    if isinstance(c.order, DeepSupervision):
        raise ValueError(
            f"LoopedConfig.order must be ModelLoop, LayerLoop, Blocks or TwoLevel. Got {c.order}. "
            "Use models.trm or models.hrm."
        )
    if isinstance(c.order, ModelLoop | LayerLoop | TwoLevel) and len(c.blocks) != 1:
        name = type(c.order).__name__
        raise ValueError(f"LoopedConfig.blocks must have one entry for {name}. Got {c.blocks}. Use Blocks(...).")
    if isinstance(c.order, Blocks) and len(c.blocks) != len(c.order.num_steps):
        raise ValueError(
            f"LoopedConfig.blocks must have one entry per count of {c.order}. Got {c.blocks}. Make them equally long."
        )
    if isinstance(c.order, TwoLevel):
        if not c.order.share and c.blocks[0] % 2:
            raise ValueError(f"LoopedConfig.blocks must be even for TwoLevel(share=False). Got {c.blocks}.")
        for name, plain in (("signal", NoSignal), ("update", Replace)):
            if not isinstance(getattr(c, name), plain):
                raise ValueError(
                    f"TwoLevel(...) does not combine with {type(getattr(c, name)).__name__}: "
                    "its high cycle has no single loop index"
                )
        if not isinstance(c.residual, UnitResidual):
            raise ValueError(
                f"TwoLevel(...) does not combine with {type(c.residual).__name__}: its layers have no single number of "
                "loops. Use residual=UnitResidual()."
            )


def _refuse_blind_core(c: LoopedConfig) -> None:
    if isinstance(c.envelope, NoEnvelope) and isinstance(c.injection, Reinjection) and c.injection.source == "prelude":
        raise ValueError(
            "LoopedConfig.injection.source must be 'embeds' without an envelope. Got 'prelude'. "
            "Set source='embeds' or add Envelope(...)"
        )
    starts_blind = not isinstance(c.state_init, FromEmbeds) and not isinstance(c.order, TwoLevel)  # whose high is e
    if isinstance(c.injection, NoInjection) and starts_blind:
        raise ValueError("the core would never see the tokens: add an injection or use state_init=FromEmbeds()")
    reads_embeds = isinstance(c.injection, Reinjection) and c.injection.source == "embeds"
    if c.envelope.prelude > 0 and reads_embeds and starts_blind:
        raise ValueError(
            "LoopedConfig.envelope.prelude must be 0 where nothing reads it: the injection and the start read the "
            f"embeddings. Got {c.envelope.prelude}. Set injection.source='prelude' or state_init=FromEmbeds()"
        )
    if isinstance(c.boundary, SharedFinalNorm) and c.envelope.coda > 0:
        raise ValueError(
            "boundary=SharedFinalNorm() needs NoEnvelope(): the coda would read normed states. Use OwnNorm()"
        )


def _refuse_widths(c: LoopedConfig) -> None:
    if c.width == c.dim:
        return
    if not c.projection:
        raise ValueError(f"LoopedConfig.projection must be True where state_dim ({c.width}) is not dim ({c.dim}).")
    if isinstance(c.injection, Concat) and c.injection.init == "identity":
        raise ValueError(f"identity init needs equal widths. Got state {c.width}, embeds {c.dim}. Use init='normal'")
    if isinstance(c.injection, NoInjection | Add) or isinstance(c.state_init, FromEmbeds):
        raise ValueError(
            f"LoopedConfig.state_dim must equal dim ({c.dim}) where the context enters unmapped. Got {c.width}. "
            "Use an injection with a matrix and a start that is not FromEmbeds()."
        )
    if isinstance(c.boundary, SharedFinalNorm) or c.exit_norm == "final" or isinstance(c.order, TwoLevel):
        raise ValueError(
            f"LoopedConfig.state_dim must equal dim ({c.dim}) for a norm or level they share. Got {c.width}."
        )


def _refuse_core_parts(c: LoopedConfig) -> None:
    core = c.core_attention or c.attention
    rotary = ("head_dim",) if isinstance(c.attention.position, Rope) else ()
    for name in ("position", *rotary, "window", "softcap", "causal", "value_embedding"):
        if getattr(core, name) != getattr(c.attention, name):
            raise ValueError(
                f"LoopedConfig.core_attention.{name} must be that of attention ({getattr(c.attention, name)}), whose "
                f"positions and mask the core shares. Got {getattr(core, name)}. Change heads or kv_heads only."
            )
    for name in ("value_tables", "value_gates"):
        layers = getattr(c, name)
        if layers is None:
            continue
        if not c.attention.value_embedding:
            raise ValueError(f"LoopedConfig.{name} must be None without value embeddings. Got {layers}.")
        if tuple(sorted(set(layers))) != layers or not all(0 <= i < c.stored_layers for i in layers):
            raise ValueError(
                f"LoopedConfig.{name} must name stored layers 0..{c.stored_layers - 1} in order. Got {layers}."
            )
    for layer in c.valued_layers:
        width = c.parts(layer)[0].kv_width // 2
        if width != c.attention.kv_width // 2:
            raise ValueError(
                f"LoopedConfig.core_attention must have kv_heads * head_dim = {c.attention.kv_width // 2} where layer "
                f"{layer} adds value embeddings, whose tables are that wide. Got {width}. Leave out its gate or table."
            )


def _refuse_short_index(c: LoopedConfig) -> None:
    stepwise = isinstance(c.signal, AdaLN)
    limit = len(_grids(c)[0]) if stepwise else c.signal.limit
    if limit is None or not isinstance(c.trained_depth, DepthSampler) or not (stepwise or isinstance(c.beyond, Refuse)):
        return
    num_blocks = c.blocks[0] if isinstance(c.order, LayerLoop) else len(c.blocks)
    steps = c.order.default_steps if c.trained_depth.of_prefix else max(c.trained_depth.support())
    needed = max(c.order.plan(steps, num_blocks).iterations().values())
    if needed > limit:
        signal = "AdaLN()" if stepwise else f"{type(c.signal).__name__}(max={limit})"
        remedy = f"Set the order's num_steps to {needed}" if stepwise else f"Set max={needed}"
        raise ValueError(
            f"signal={signal} is shorter than trained_depth: {c.trained_depth} draws up to {needed}. {remedy}"
        )


class LoopedContext(NamedTuple):
    """Context of this family."""

    embeds: Float[Tensor, "batch seq dim"]
    positions: Int[Tensor, "batch seq"]
    valid: Bool[Tensor, "batch seq"] | None
    injected: Float[Tensor, "batch seq dim"]
    """What the injection reads: prelude output, or the embeddings."""
    scope: Scope
    """Rotary tables and mask, the same for all layers."""
    values: tuple[Float[Tensor, "batch seq kv"] | None, ...]
    """Value embeddings of the tokens, one entry per stored layer (prelude, core, coda); None: the layer adds none."""
    times: Float[Tensor, "batch ids"] | None
    step_sizes: Float[Tensor, "batch ids"] | None
    """Time and step size that each iteration id stands for (AdaLN)."""


class Levels(NamedTuple):
    """State of a two-level model; the coda reads `high`."""

    high: Float[Tensor, "batch seq dim"]
    low: Float[Tensor, "batch seq dim"]


@MODELS.register("looped")
class Looped(LoopedLM):
    """Prelude, looped core and coda out of exchangeable parts."""

    config_class = LoopedConfig
    reference = "configurable family; axes of arXiv:2502.05171, 2510.25741, 2604.12946, 2604.21106"

    def __init__(self, config: LoopedConfig):
        super().__init__()
        c = self.config = config
        envelope, width = c.envelope, c.width
        positions = c.attention.position if isinstance(c.attention.position, LearnedPositions) else None
        self.embedding = TokenEmbedding(
            c.padded_vocab or c.vocab, c.dim, scale=c.embed_scale, positions=positions, init=c.init
        )
        self.embed_norm = c.embed_norm.build(c.dim) if c.embed_norm else None
        core, coda = envelope.prelude, envelope.prelude + sum(c.blocks)
        self.prelude = nn.ModuleList(self._layer(i) for i in range(core))
        self.prelude_norm = c.prelude_norm.build(c.dim) if c.prelude_norm else None
        self.core = nn.ModuleList(self._layer(i) for i in range(core, coda))
        self.coda_layers = nn.ModuleList(self._layer(i) for i in range(coda, c.stored_layers))
        self.final_norm = (c.final_norm or c.norm).build(c.dim)
        self.start = c.state_init.build(width, c.dim, embed_scale=c.embed_scale, init=c.init)
        self.block_layers = _block_layers(c)
        blocks = range(len(self.block_layers))
        shared = not isinstance(c.injection, Reinjection) or c.injection.shared_over_blocks
        self.injections = _modules(
            [c.injection.build(width, c.dim, c.init) for _ in (blocks[:1] if shared else blocks)]
        )
        self.signals = _modules([c.signal.build(width, c.init) for _ in blocks])
        linears = Layer.linears(width, *c.parts(core))
        self.layer_signals = _modules([c.signal.build_layer(width, linears, c.init) for _ in self.core])
        self.updates = _modules([c.update.build(width, c.init) for _ in blocks])
        self.gate = c.halt.build(width, c.init)
        self.boundary = c.boundary.build(width, norm=c.norm, final_norm=self.final_norm)
        self.exit_norm = c.norm.build(width) if c.exit_norm == "own" else None
        self.project = linear(width, c.dim, init=c.init) if c.projection else None
        self.lm_head = c.head.build(c.dim, vocab=c.vocab, embedding=self.embedding, init=c.init)
        self.value_tables = _value_tables(c) if c.stored_tables else None
        self.valued_layers, self.stored_layers = c.valued_layers, c.stored_layers
        # A state with the extra fields of the update; a plain tensor where there are none.
        self._state_type = namedtuple("LoopedState", ("state", *c.update.fields)) if c.update.fields else None
        self.spec = _spec(self)

    def _layer(self, index: int) -> Layer:
        c = self.config
        attention, ffn = c.parts(index)
        place = index - c.envelope.prelude
        core = 0 <= place < sum(c.blocks)
        return Layer(
            c.width if core else c.dim,
            attention=attention,
            ffn=ffn,
            norm=c.norm,
            placement=c.placement,
            init=c.init,
            residual=_residual_weight(c, place) if core else 1.0,
        )

    def encode(
        self,
        tokens: Int[Tensor, "batch seq"],
        cache: Cache | None = None,
        *,
        positions: Int[Tensor, "batch seq"] | None = None,
        valid: Bool[Tensor, "batch seq"] | None = None,
        extras: Mapping[str, Tensor] | None = None,
    ) -> LoopedContext:
        positions, valid = prepare(self.spec, tokens, cache, positions, valid, extras)
        documents = None if extras is None else extras.get("document_ids")
        embeds = self.embedding(tokens, positions)
        scope = self.config.attention.scope(
            positions, valid, document_ids=documents, cached=cache is not None, dtype=embeds.dtype
        )
        values: tuple[Tensor | None, ...] = tuple(
            self.value_tables[str(i)](tokens) if self.value_tables is not None and i in self.valued_layers else None
            for i in range(self.stored_layers)
        )
        e = embeds if self.embed_norm is None else self.embed_norm(embeds)
        injected = e
        for index, layer in enumerate(self.prelude):
            view = None if cache is None else cache.view(PRELUDE, index, None)
            e = layer(e, scope, view, value_embeds=values[index])
        e = e if self.prelude_norm is None else self.prelude_norm(e)
        if not isinstance(self.config.injection, Reinjection) or self.config.injection.source == "prelude":
            injected = e
        times, sizes = _time_table(self.config, extras, tokens.shape[0], e)
        return LoopedContext(e, positions, valid, injected, scope, values, times, sizes)

    def init_state(self, context: LoopedContext, noise: Float[Tensor, "batch seq noise"] | None) -> Any:
        width = self.spec.noise_width
        if (noise is None) != (width == 0) or (noise is not None and noise.shape[-1] != width):
            what = f"starts from noise of width {width}" if width else "draws no noise"
            got = "None" if noise is None else f"width {noise.shape[-1]}"
            remedy = "Use standard_noise(...)" if width else "Pass noise=None"
            raise ValueError(f"init_state: this model {what}; got {got}. {remedy}")
        start = self.start(context.embeds, noise)
        if isinstance(self.config.order, TwoLevel):
            return Levels(high=context.embeds, low=start)
        if self._state_type is None:
            return start
        zeros = (start.new_zeros(*start.shape[:-1], width) for width in self.config.update.fields.values())
        return self._state_type(start, *zeros)

    def step(
        self,
        state: Any,
        context: LoopedContext,
        block: int,
        iteration: Int[Tensor, " batch"],
        cache: Cache | None = None,
        *,
        record: dict[str, Tensor] | None = None,
    ) -> Any:
        index = gather_index(self.spec, iteration)
        if isinstance(state, Levels):
            new = self._run_block(state.low + state.high, context, block, iteration, index, cache, record)
            new = new if self.boundary is None else self.boundary(new)
            return state._replace(high=new) if block else state._replace(low=new)
        old = state if self._state_type is None else state.state
        new = self._run_block(old, context, block, iteration, index, cache, record)
        extra: Mapping[str, Tensor] = {}
        update = self.updates[block] if self.updates is not None else None
        if update is not None:
            carried = (
                {} if self._state_type is None else {name: getattr(state, name) for name in self.config.update.fields}
            )
            new, extra = update(old, new, carried)
        new = new if self.boundary is None else self.boundary(new)
        return new if self._state_type is None else self._state_type(new, **extra)

    def _run_block(
        self,
        s: Tensor,
        context: LoopedContext,
        block: int,
        iteration: Tensor,
        index: Tensor,
        cache: Cache | None,
        record: dict[str, Tensor] | None,
    ) -> Tensor:
        """Injection, signal and layers of one block."""
        h = s
        if self.injections is not None:
            h = self.injections[block if len(self.injections) > 1 else 0](s, context.injected, iteration)
        code = None
        if self.signals is not None:
            if isinstance(self.config.signal, AdaLN):
                code = self.signals[block](context.times, context.step_sizes, index)
            else:
                h = self.signals[block](h, index)
        repeats = self.config.order.repeats if isinstance(self.config.order, TwoLevel) else 1
        layers = self.block_layers[block]
        for run, layer in enumerate(layers * repeats):
            modulation = deltas = None
            if self.layer_signals is not None:
                extra = self.layer_signals[layer]
                modulation, deltas = (extra(code), None) if code is not None else (None, extra(index))
            h = self.core[layer](
                h,
                context.scope,
                None if cache is None else cache.view(block, run, iteration),
                iteration=index,
                modulation=modulation,
                deltas=deltas,
                value_embeds=context.values[len(self.prelude) + layer],
                record=record,
            )
        return h

    def coda(self, state: Any, context: LoopedContext, cache: Cache | None = None) -> Float[Tensor, "batch seq dim"]:
        h = self._stream(state)
        if self.exit_norm is not None:
            h = self.exit_norm(h)
        if self.config.exit_norm == "final":
            h = self.final_norm(h)
        if self.project is not None:
            h = self.project(h)
        first = len(self.prelude) + len(self.core)
        for index, layer in enumerate(self.coda_layers):
            view = None if cache is None else cache.view(CODA, index, None)
            h = layer(h, context.scope, view, value_embeds=context.values[first + index])
        return h if self.config.boundary.readout_is_normed else self.final_norm(h)

    def head(self, hidden: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch vocab"]:
        return self.lm_head(hidden)

    def halt(self, state: Any) -> Tensor:
        return super().halt(state) if self.gate is None else self.gate(self._stream(state))

    def _stream(self, state: Any) -> Tensor:
        """The part of the state that the coda and the stopping score read."""
        if isinstance(state, Levels):
            return state.high
        return state if self._state_type is None else state.state


def _modules(built: list[nn.Module | None]) -> nn.ModuleList | None:
    """The modules, or None where the choice has nothing to build."""
    made = [module for module in built if module is not None]
    return nn.ModuleList(made) if made else None


def _block_layers(c: LoopedConfig) -> tuple[tuple[int, ...], ...]:
    """Stored core layers of every block."""
    total = sum(c.blocks)
    if isinstance(c.order, LayerLoop):
        return tuple((layer,) for layer in range(total))
    if isinstance(c.order, TwoLevel):
        everything = tuple(range(total))
        if c.order.share:
            return (everything, everything)
        return (everything[total // 2 :], everything[: total // 2])  # block 0 is low; the first half is high
    starts = [sum(c.blocks[:i]) for i in range(len(c.blocks))]
    return tuple(tuple(range(start, start + count)) for start, count in zip(starts, c.blocks, strict=True))


def _residual_weight(c: LoopedConfig, place: int) -> float:
    """Weight of the branches of a stored core layer, by the loops and layers of the entry of `blocks` it belongs to."""
    steps = c.order.default_steps
    for entry, layers in enumerate(c.blocks):
        if place < layers:
            return c.residual.weight(steps if isinstance(steps, int) else steps[entry], layers)
        place -= layers
    raise AssertionError("a core layer belongs to a block")


def _value_tables(c: LoopedConfig) -> nn.ModuleDict:
    """Tables of value embeddings by stored layer."""
    width = c.attention.kv_heads * c.attention.head_dim
    tables = nn.ModuleDict({str(i): nn.Embedding(c.padded_vocab or c.vocab, width) for i in c.stored_tables})
    for table in tables.values():
        c.init.matrix_(table.weight)  # type: ignore[union-attr,arg-type]
    return tables


def _grids(c: LoopedConfig) -> list[tuple[float, ...]]:
    """Step sizes that the iteration ids of AdaLN stand for: the trained grid, then k equal steps for every other k."""
    depth = c.trained_depth
    if isinstance(depth, Grid):
        trained = depth.sizes
    else:
        steps = c.order.default_steps
        count = steps if isinstance(steps, int) else max(steps)
        trained = (1.0 / count,) * count
    end = sum(trained)
    return [trained] + [(end / k,) * k for k in range(1, len(trained))]


def _grid_ids(c: LoopedConfig, k: int) -> tuple[int, ...]:
    grids = _grids(c)
    if not 1 <= k <= len(grids[0]):
        raise ValueError(
            f"grid: k must be 1..{len(grids[0])}, the steps of the trained grid. Got {k}. Take fewer steps"
        )
    index = 0 if k == len(grids[0]) else k
    first = sum(len(grid) for grid in grids[:index])
    return tuple(range(first, first + len(grids[index])))


def _time_table(
    c: LoopedConfig, extras: Mapping[str, Tensor] | None, rows: int, like: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Time before each iteration id, and its step size, per row."""
    if not isinstance(c.signal, AdaLN):
        return None, None
    given = None if extras is None else extras.get("step_sizes")
    if given is not None:
        smallest, total = float(given.min()), float(given.sum(dim=1).max())
        if smallest <= 0 or total > 1 + 1e-6:
            got = smallest if smallest <= 0 else total
            raise ValueError(
                f"step_sizes must be positive and sum to at most 1 (got {got:.3g}). Divide each row by its sum"
            )
        sizes = given.to(like.dtype)
        return torch.cat([torch.zeros_like(sizes[:, :1]), sizes.cumsum(dim=1)[:, :-1]], dim=1), sizes
    grids = _grids(c)
    sizes = torch.tensor([size for grid in grids for size in grid], dtype=like.dtype, device=like.device)
    times = torch.tensor(
        [sum(grid[:i]) for grid in grids for i in range(len(grid))], dtype=like.dtype, device=like.device
    )
    return times.expand(rows, -1), sizes.expand(rows, -1)


def _spec(model: Looped) -> LoopSpec:
    c = model.config
    signal_part = c.signal.index_part
    injection_part = "injection" if c.injection.operator_class(0) != c.injection.operator_class(1) else None
    limit = c.signal.limit
    if isinstance(c.signal, AdaLN):
        limit = sum(len(grid) for grid in _grids(c))
    two = isinstance(c.order, TwoLevel)
    blocks = []
    params = _parameters(model)
    for index, layers in enumerate(model.block_layers):
        reads, writes = ("state", *c.update.fields), ("state", *c.update.fields)
        if two:
            reads, writes = ("high", "low"), (("high",) if index else ("low",))
        blocks.append(BlockSpec(layers=layers, params=params.core[index], reads=reads, writes=writes))
    start = type(c.state_init).__name__
    noise = c.state_init.noise_width(c.width)
    if two:
        state = {
            "high": StateField(width=c.dim, init="FromEmbeds"),
            "low": StateField(width=c.dim, init=start, random=noise > 0, read_by_coda=False),
        }
    else:
        state = {"state": StateField(width=c.width, init=start, random=noise > 0)}
        state |= {n: StateField(width=w, init="zeros", read_by_coda=False) for n, w in c.update.fields.items()}
    extras = {"document_ids": False} | ({"step_sizes": False} if isinstance(c.signal, AdaLN) else {})
    readout = [
        *(["exit_norm"] if c.exit_norm != "none" else []),
        *(["projection"] if c.projection else []),
        *(["coda"] if c.envelope.coda else []),
        *([] if c.boundary.readout_is_normed else ["final_norm"]),
        "head",
    ]

    def operator_class(block: int, iteration: int) -> int:
        acts = c.injection.operator_class(iteration)
        if signal_part is None:
            return acts
        if limit is None or isinstance(c.beyond, Refuse):
            return iteration
        index = min(iteration, limit - 1) if isinstance(c.beyond, ClampLast) else iteration % limit
        return index + limit * acts

    return LoopSpec(
        name="looped",
        version="1",
        blocks=tuple(blocks),
        order=c.order,
        trained_depth=c.trained_depth,
        operator_class=operator_class,
        index_parts=frozenset(part for part in (signal_part, injection_part) if part),
        max_iteration=limit,
        beyond=c.beyond,
        state=state,
        noise_width=noise,
        kv_rule=c.kv_rule,
        kv_rules=(
            DepthIndexed(),
            DepthIndexed(missing=CopyLast()),
            DepthIndexed(missing=Skip()),
            Single(),
            First(),
            Average(),
            Modulo(m=1),
            Anchor(n=1),
        ),
        causal=c.attention.causal,
        max_positions=longest_context(c.max_positions, c.attention.position),
        grid=(lambda k: _grid_ids(c, k)) if isinstance(c.signal, AdaLN) else None,
        vocab=(c.head.columns(c.vocab), c.padded_vocab or c.vocab),
        token_ids=c.vocab,
        cells=c.head.cells,
        readout=tuple(readout),
        halt=c.halt.spec,
        params=params,
        cost=_cost(model),
        extras=extras,
    )


def _parameters(model: Looped) -> Any:
    """Parameters by group; a block's group holds its layers and what only it owns."""

    def of(*modules: nn.Module | None) -> list[nn.Parameter]:
        return [p for module in modules if module is not None for p in module.parameters()]

    core = []
    for block, layers in enumerate(model.block_layers):
        own: list[nn.Module] = [model.core[layer] for layer in layers]
        for family in (model.signals, model.updates):
            own += [] if family is None else [family[block]]
        if model.layer_signals is not None:
            own += [model.layer_signals[layer] for layer in layers]
        core.append(of(*own))
    position = model.embedding.position_weight
    return count_parameters(
        core,
        embedding=[model.embedding.weight, *of(model.embed_norm)],
        position=[] if position is None else [position],
        prelude=of(model.prelude, model.prelude_norm, model.value_tables),
        injection=of(model.injections, model.start),
        coda=of(model.coda_layers, model.project, model.exit_norm),
        readout=of(model.final_norm, model.boundary),
        head=of(model.lm_head),
        halt=of(model.gate),
    )


def _cost(model: Looped) -> CostSpec:
    c, width = model.config, model.config.width

    def layers(stored: tuple[int, ...], dim: int, *, matmul: int = 0, per_row: int = 0) -> Group:
        valued = c.valued_layers  # a gate without a table is not computed
        parts = [(replace(a, value_embedding=i in valued), f) for i in stored for a, f in [c.parts(i)]]
        return Group(
            matmul=sum(a.matmul_params(dim) + f.matmul_params(dim) for a, f in parts) + matmul,
            matmul_per_row=per_row,
            attention_width=sum(a.width for a, _ in parts),
            layers=len(parts),
            kv_width=sum(a.kv_width for a, _ in parts),
            window=c.attention.window,
        )

    core, coda = c.envelope.prelude, c.envelope.prelude + sum(c.blocks)
    linears = Layer.linears(width, *c.parts(core))
    repeats = c.order.repeats if isinstance(c.order, TwoLevel) else 1
    blocks = []
    for stored in model.block_layers:
        run = tuple(core + layer for layer in stored) * repeats
        extra = c.injection.matmul_params(width, c.dim) + c.update.matmul_params(width)
        blocks.append(
            layers(
                run,
                width,
                matmul=extra + len(run) * c.signal.matmul_params(linears),
                per_row=c.signal.matmul_params_per_row(width, len(run)),
            )
        )
    return CostSpec(
        prelude=layers(tuple(range(core)), c.dim),
        blocks=tuple(blocks),
        coda=layers(tuple(range(coda, c.stored_layers)), c.dim, matmul=width * c.dim if c.projection else 0),
        head=Group(matmul=c.head.matmul_params(c.dim, c.vocab)),
    )


def _tiny(**changes: Any) -> LoopedConfig:
    base: dict[str, Any] = {
        "dim": 32,
        "vocab": 64,
        "attention": Attention(heads=2, kv_heads=2, head_dim=16, position=Rope(base=10000.0)),
        "ffn": SwiGLU(hidden=48),
        "envelope": Envelope(prelude=1, coda=1),
        "init": Init(std=0.15),
    }
    return LoopedConfig(**{**base, **changes})


@PRESETS.register("tiny-blocks")
def tiny_blocks() -> LoopedConfig:
    """Two blocks of 4 iterations with iteration embeddings, trained at every prefix."""
    return _tiny(
        order=Blocks(num_steps=(4, 4)),
        blocks=(1, 1),
        signal=StepEmbedding(max=4),
        trained_depth=PrefixDepth(law=UniformDepth(low=1, high=8)),
    )


@PRESETS.register("tiny-core")
def tiny_core() -> LoopedConfig:
    """One index-free core of two layers with a random start, as in Huginn's shape."""
    return _tiny(
        order=ModelLoop(num_steps=4),
        blocks=(2,),
        injection=Concat(order="state_first", init="normal"),
        state_init=Normal(std="like_init"),
        trained_depth=UniformDepth(low=1, high=8),
        exit_norm="final",
    )


@PRESETS.register("tiny-layer-loop")
def tiny_layer_loop() -> LoopedConfig:
    """Three layers, each run twice before the next."""
    return _tiny(order=LayerLoop(num_steps=2), blocks=(3,), trained_depth=FixedDepth(num_steps=2))


@PRESETS.register("tiny-two-level")
def tiny_two_level() -> LoopedConfig:
    """Two high cycles of three low steps over shared layers."""
    return _tiny(
        order=TwoLevel(h=2, l=3),
        blocks=(2,),
        injection=Add(),
        state_init=Zeros(),
        trained_depth=FixedDepth(num_steps=2),
    )


@PRESETS.register("tiny-no-envelope")
def tiny_no_envelope() -> LoopedConfig:
    """The whole stack loops, its normed state fed back, as in Ouro's shape."""
    return _tiny(
        order=ModelLoop(num_steps=4),
        blocks=(2,),
        envelope=NoEnvelope(),
        boundary=SharedFinalNorm(),
        trained_depth=Unknown(),
        head=Head(tied=False),
    )
