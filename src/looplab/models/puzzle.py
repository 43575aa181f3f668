"""What TRM and HRM share: puzzles as grids of tokens, solved by a small network that is applied many times.

    x    = sqrt(D) [prefix ; E[tokens]]                 learned positions: sqrt(D / 2) ([prefix ; E[tokens]] + P)
    low  <- layers(low + (high + x))                    block 0
    high <- layers(high + low)                          block 1
    logits = W high[:, P:];   q = W_q high[:, 0] + b    (halt, continue)

The prefix is a vector of the puzzle's own, zero-padded and cut into P slots of width D; its table is a buffer, as in
the originals, whose optimizer for it is another one. high and low start at stored vectors, the same at every slot, and
are P + T long. Not causal, no key-value cache, no padding; an application is one call of the layers.

References: TRM, arXiv:2510.04871; HRM, arXiv:2506.21734. Their names: high = y = z_H, low = z = z_L.
"""

import math
from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from looplab._types import Bool, Float, Int
from looplab.models.base import LoopedLM, count_parameters, prepare, values_known
from looplab.models.looped import Levels
from looplab.models.published import KeyMap, Rename, Rule, Split
from looplab.nn.attention import Attention, Scope
from looplab.nn.cost import CostSpec, Group
from looplab.nn.embedding import Head, TokenEmbedding
from looplab.nn.layer import Layer
from looplab.nn.linear import Init, linear
from looplab.nn.mlp import SwiGLU
from looplab.nn.norm import PostSum, RMSNorm
from looplab.nn.rope import Learned, NoPE, Rope
from looplab.recurrence.depth import FixedDepth
from looplab.recurrence.kv import Cache, DepthIndexed
from looplab.recurrence.plan import DeepSupervision
from looplab.recurrence.spec import BlockSpec, HaltSpec, LoopSpec, StateField
from looplab.recurrence.state_init import FixedBuffer

HIDDEN_MULTIPLE = 256
TRUNCATED_STD = 0.8796256610342398
"""Standard deviation of a standard normal cut at two, by which the originals divide."""
HALT_BIAS = -5.0

HaltRule = Literal["q_halt > 0", "q_halt > q_continue"]

EXCEPTIONS = {
    "causality": "a cell of a grid sees all others",
    "cache": "later cells change earlier ones, so there is nothing to keep",
    "padding": "a grid has all its cells, and the originals mask none",
    "bfloat16": "each application norms its sum, so the state outgrows no rounding error: errors of all of them add up",
}
"""Points of the contract suite that do not hold, and why."""


@dataclass(frozen=True, kw_only=True)
class PuzzlePrefix:
    """A vector per puzzle, laid over the first slots."""

    entries: int
    """Puzzles in the table."""
    width: int
    """Numbers per puzzle."""
    slots: int
    """Slots they are laid over."""

    def __post_init__(self) -> None:
        for name in ("entries", "width", "slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"PuzzlePrefix.{name} must be at least 1. Got {getattr(self, name)}.")


@dataclass(frozen=True, kw_only=True)
class PuzzleConfig(ABC):
    """The settings that TRM and HRM share."""

    dim: int
    """Width of the stream."""
    vocab: int
    """Columns of the logits."""
    h_cycles: int
    """High cycles of one supervision step."""
    l_cycles: int
    """Low applications of one high cycle."""
    steps: int
    """Supervision steps; evaluation runs them all."""
    position: Rope | Learned | NoPE
    prefix: PuzzlePrefix | None
    cells: int | None
    """Tokens of a row; None: the checkpoint does not say."""
    expansion: float = 4.0
    """Inner width of a feed-forward is 2/3 of this times the outer one, rounded up to a multiple of 256."""
    eps: float = 1e-5
    """Added to the mean square of every norm."""

    def __post_init__(self) -> None:
        name = type(self).__name__
        for field in ("dim", "vocab", "h_cycles", "l_cycles", "steps"):
            if getattr(self, field) < 1:
                raise ValueError(f"{name}.{field} must be at least 1. Got {getattr(self, field)}.")
        if self.prefix is not None and self.prefix.width > self.prefix.slots * self.dim:
            raise ValueError(
                f"{name}.prefix.width must fit {self.prefix.slots} slots of {self.dim}. Got {self.prefix.width}. "
                f"Use {-(-self.prefix.width // self.dim)} slots."
            )
        if isinstance(self.position, Learned) and (self.cells is None or self.position.max != self.slots(self.cells)):
            raise ValueError(
                f"{name}.position.max must be the slots of prefix and cells together. Got {self.position.max} "
                f"for {self.slots(0)} and {self.cells}."
            )

    def slots(self, tokens: int) -> int:
        """Positions that the layers run over, for a row of `tokens` tokens."""
        return tokens + (0 if self.prefix is None else self.prefix.slots)

    def feed_forward(self, width: int) -> SwiGLU:
        """The feed-forward of a stream of `width`."""
        exact = round(self.expansion * width * 2 / 3)
        return SwiGLU(hidden=-(-exact // HIDDEN_MULTIPLE) * HIDDEN_MULTIPLE)

    def attention(self, heads: int) -> Attention:
        """Attention of every cell to all cells."""
        if heads < 1 or self.dim % heads:
            raise ValueError(f"{type(self).__name__}.heads must divide dim ({self.dim}). Got {heads}.")
        return Attention(heads=heads, kv_heads=heads, head_dim=self.dim // heads, position=self.position, causal=False)


class PuzzleContext(NamedTuple):
    """Context of a grid."""

    embeds: Float[Tensor, "batch seq dim"]
    """Slots of the tokens: the last ones of `slots`."""
    positions: Int[Tensor, "batch seq"]
    valid: None
    slots: Float[Tensor, "batch slots dim"]
    """x: prefix and tokens."""
    scope: Scope | None
    """Rotary tables of all slots; None where no layer attends."""


class PuzzleModel(LoopedLM):
    """Embedding, prefix, two levels, and two heads; a subclass brings the layers of both blocks."""

    contract_exceptions = EXCEPTIONS

    def __init__(
        self,
        config: PuzzleConfig,
        *,
        name: str,
        attention: Attention | None,
        layers: Sequence[nn.Module],
        block_layers: tuple[tuple[int, ...], tuple[int, ...]],
        cost: Group,
        halt_rule: HaltRule,
        fixed_length: int | None = None,
    ):
        """Builds the ends around `layers`.

        Args:
            attention: Of the layers, where they attend.
            block_layers: Indices of the layers of block 0 (low) and of block 1 (high).
            cost: Of one layer.
            halt_rule: When the trained model stops.
            fixed_length: Tokens of a row, where the layers are made for no other number.
        """
        super().__init__()
        self.config: Any = config
        self.attention, self.block_layers = attention, block_layers
        init = Init(std=config.dim**-0.5 / TRUNCATED_STD, cut=2.0)
        self.embedding = TokenEmbedding(config.vocab, config.dim, init=init)
        self.position_weight: nn.Parameter | None = None
        if isinstance(config.position, Learned):
            self.position_weight = nn.Parameter(torch.empty(config.position.max, config.dim))
            init.matrix_(self.position_weight)
        self.puzzles = None if config.prefix is None else PuzzleTable(config.prefix, config.dim)
        self.core = nn.ModuleList(layers)
        for module in self.core.modules():
            if isinstance(module, nn.Linear):
                Init(std=module.in_features**-0.5 / TRUNCATED_STD, cut=2.0).matrix_(module.weight)
        start = FixedBuffer()
        self.high_start = start.build(config.dim, config.dim, embed_scale=1.0, init=init)
        self.low_start = start.build(config.dim, config.dim, embed_scale=1.0, init=init)
        self.lm_head = Head(tied=False).build(config.dim, vocab=config.vocab, embedding=self.embedding, init=init)
        self.q_head = linear(config.dim, 2, init=Init(std=0.0), bias=True)
        nn.init.constant_(self.q_head.bias, HALT_BIAS)
        self.spec = _spec(self, name, cost, halt_rule, fixed_length)

    def encode(
        self,
        tokens: Int[Tensor, "batch seq"],
        cache: Cache | None = None,
        *,
        positions: Int[Tensor, "batch seq"] | None = None,
        valid: Bool[Tensor, "batch seq"] | None = None,
        extras: Mapping[str, Tensor] | None = None,
    ) -> PuzzleContext:
        seq = tokens.shape[1]
        if self.spec.fixed_length not in (None, seq):
            raise ValueError(f"{self.spec.name} (mlp mixer) is built for {self.spec.fixed_length} cells; got {seq}")
        if positions is not None:
            raise ValueError(
                f"encode: positions of {self.spec.name} must be None: a cell is known by its place in the grid. "
                "Send grids whole"
            )
        positions, _ = prepare(self.spec, tokens, cache, None, valid, extras)
        x = self.embedding(tokens, positions)
        if self.puzzles is not None:
            assert extras is not None  # `prepare` saw to it
            x = torch.cat([self.puzzles(extras["puzzle_ids"]).to(x.dtype), x], dim=1)
        scale = math.sqrt(self.config.dim)
        if self.position_weight is not None:
            x, scale = x + self.position_weight[: x.shape[1]], scale * math.sqrt(0.5)
        x = scale * x
        places = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
        scope = None if self.attention is None else self.attention.scope(places, dtype=x.dtype)
        return PuzzleContext(x[:, -seq:], positions, None, x, scope)

    def init_state(self, context: PuzzleContext, noise: Float[Tensor, "batch seq noise"] | None) -> Levels:
        if noise is not None:
            raise ValueError(f"init_state: this model draws no noise; got width {noise.shape[-1]}. Pass noise=None")
        return Levels(high=self.high_start(context.slots), low=self.low_start(context.slots))

    def step(
        self,
        state: Levels,
        context: PuzzleContext,
        block: int,
        iteration: Int[Tensor, " batch"],
        cache: Cache | None = None,
        *,
        record: dict[str, Tensor] | None = None,
    ) -> Levels:
        h = state.high + state.low if block else state.low + (state.high + context.slots)
        for layer in self.block_layers[block]:
            h = self.core[layer](h, context.scope)
        return state._replace(high=h) if block else state._replace(low=h)

    def coda(self, state: Levels, context: PuzzleContext, cache: Cache | None = None) -> Float[Tensor, "batch seq dim"]:
        return state.high[:, -context.embeds.shape[1] :]

    def head(self, hidden: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch vocab"]:
        return self.lm_head(hidden)

    def halt(self, state: Levels) -> Float[Tensor, "batch 2"]:
        """Logits (halt, continue) of every row, in float32 (float64 for float64 models), from the first slot."""
        q = self.q_head(state.high[:, 0])
        return q.to(torch.promote_types(q.dtype, torch.float32))


class PuzzleTable(nn.Module):
    """The vectors of `PuzzlePrefix`, starting at zero."""

    table: Tensor

    def __init__(self, config: PuzzlePrefix, dim: int):
        super().__init__()
        self.config, self.dim = config, dim
        self.register_buffer("table", torch.zeros(config.entries, config.width))

    def forward(self, puzzle_ids: Int[Tensor, " batch"]) -> Float[Tensor, "batch prefix dim"]:
        """The slots of the rows' puzzles, not yet scaled.

        Raises:
            ValueError: An id outside the table (checked on the CPU).
        """
        if values_known(puzzle_ids):
            self._check(puzzle_ids)
        vectors = F.embedding(puzzle_ids, self.table)
        padded = F.pad(vectors, (0, self.config.slots * self.dim - self.config.width))
        return padded.unflatten(1, (self.config.slots, self.dim))

    def _check(self, puzzle_ids: Tensor) -> None:
        smallest, largest = int(puzzle_ids.min()), int(puzzle_ids.max())
        if smallest < 0:
            raise ValueError(f"puzzle_ids: {smallest} < 0")
        if largest >= self.config.entries:
            raise ValueError(f"puzzle_ids: {largest} >= {self.config.entries} entries")


def attention_layer(config: PuzzleConfig, attention: Attention) -> tuple[Layer, Group]:
    """A layer of attention and feed-forward, each normed after the sum, and what it costs."""
    ffn = config.feed_forward(config.dim)
    norm = RMSNorm(eps=config.eps, affine=False)
    layer = Layer(config.dim, attention=attention, ffn=ffn, norm=norm, placement=PostSum(), init=Init())
    matmul = attention.matmul_params(config.dim) + ffn.matmul_params(config.dim)
    return layer, Group(matmul=matmul, attention_width=attention.width, layers=1, prefix=config.slots(0))


def _spec(model: PuzzleModel, name: str, layer: Group, halt_rule: HaltRule, fixed_length: int | None) -> LoopSpec:
    c = model.config
    params = count_parameters(
        [[p for i in layers for p in model.core[i].parameters()] for layers in model.block_layers],
        embedding=model.embedding.parameters(),
        position=[] if model.position_weight is None else [model.position_weight],
        head=model.lm_head.parameters(),
        halt=model.q_head.parameters(),
    )
    writes = ("low", "high")
    level = {"width": c.dim, "init": "FixedBuffer", "prefix": c.slots(0)}
    return LoopSpec(
        name=name,
        version="1",
        blocks=tuple(
            BlockSpec(layers=layers, params=count, reads=("high", "low"), writes=(field,))
            for layers, count, field in zip(model.block_layers, params.core, writes, strict=True)
        ),
        order=DeepSupervision(steps=c.steps, h=c.h_cycles, l=c.l_cycles),
        trained_depth=FixedDepth(num_steps=c.steps),
        state={"high": StateField(**level), "low": StateField(**level, read_by_coda=False)},
        kv_rule=DepthIndexed(),
        kv_rules=(),
        causal=False,
        padding=frozenset(),
        max_positions=c.cells,
        fixed_length=fixed_length,
        vocab=(c.vocab, c.vocab),
        readout=("head",),
        halt=HaltSpec(layout="q_halt_continue", per="row", rule=halt_rule),
        params=params,
        cost=CostSpec(
            prelude=Group(),
            blocks=tuple(_times(layer, len(layers)) for layers in model.block_layers),
            coda=Group(),
            head=Group(matmul=c.dim * c.vocab),
        ),
        extras={} if c.prefix is None else {"puzzle_ids": True},
    )


def _times(layer: Group, count: int) -> Group:
    return Group(
        matmul=count * layer.matmul,
        matmul_per_row=count * layer.matmul_per_row,
        attention_width=count * layer.attention_width,
        layers=count,
        prefix=layer.prefix,
    )


def shared_settings(
    family: str,
    facts: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    prefix_slots: int,
    needs: tuple[str, ...],
) -> dict[str, Any]:
    """Fields of `PuzzleConfig` out of the original's settings (those of its data set from the weights if need be).

    Args:
        facts: Settings as `settings_of` gives them.
        shapes: Shapes of the original's tensors.
        prefix_slots: Slots of the prefix; 0: as many as the vector fills.
        needs: Settings that the family reads itself.
    Raises:
        ValueError: A setting that is missing or of another kind than the family has.
    """
    names = ("hidden_size", "H_cycles", "L_cycles", "halt_max_steps", "expansion", "pos_encodings")
    missing = [name for name in (*names, *needs) if name not in facts]
    if missing:
        raise ValueError(f"load: {family} needs the settings {', '.join(missing)}. Copy its configuration file again.")
    dim, cells = facts["hidden_size"], facts.get("seq_len")
    rows, width = shapes.get("puzzle_emb.weights", (0, 0))
    width = facts.get("puzzle_emb_ndim", width)
    prefix = None
    if width:
        slots = prefix_slots or -(-width // dim)
        prefix = PuzzlePrefix(entries=facts.get("num_puzzle_identifiers", rows), width=width, slots=slots)
    before = 0 if prefix is None else prefix.slots
    if cells is None and "embed_pos.embedding_weight" in shapes:
        cells = shapes["embed_pos.embedding_weight"][0] - before
    return {
        "dim": dim,
        "vocab": facts.get("vocab_size", shapes.get("embed_tokens.embedding_weight", (0,))[0]),
        "h_cycles": facts["H_cycles"],
        "l_cycles": facts["L_cycles"],
        "steps": facts["halt_max_steps"],
        "position": _position(family, facts, before, cells),
        "prefix": prefix,
        "cells": cells,
        "expansion": float(facts["expansion"]),
        "eps": facts.get("rms_norm_eps", 1e-5),
    }


def settings_of(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """The model's settings: the whole file, or its part `arch` where the file is that of a training run."""
    arch = facts.get("arch")
    return {**facts, **arch} if isinstance(arch, Mapping) else facts


def _position(family: str, facts: Mapping[str, Any], before: int, cells: int | None) -> Rope | Learned | NoPE:
    kind = facts["pos_encodings"]
    if kind == "rope":
        return Rope(base=facts.get("rope_theta", 10000.0))
    if kind == "learned" and cells is not None:
        return Learned(max=before + cells)
    if kind == "none":
        return NoPE()
    raise ValueError(
        f"load: pos_encodings of {family} must be 'rope', 'learned' (with seq_len) or 'none'. Got {kind!r}."
    )


def shared_rules(config: PuzzleConfig) -> tuple[Rule, ...]:
    """Key map of the ends."""
    rules = [
        Rename("embed_tokens.embedding_weight", "embedding.weight"),
        Rename("lm_head.weight", "lm_head.own_weight"),
        Rename("q_head.weight", "q_head.weight"),
        Rename("q_head.bias", "q_head.bias"),
        Rename("H_init", "high_start.start"),
        Rename("L_init", "low_start.start"),
    ]
    if isinstance(config.position, Learned):
        rules.append(Rename("embed_pos.embedding_weight", "position_weight"))
    if config.prefix is not None:
        rules.append(Rename("puzzle_emb.weights", "puzzles.table"))
    return tuple(rules)


def attention_rules(config: PuzzleConfig, theirs: str, ours: str) -> tuple[Rule, ...]:
    """Key map of the attention of one layer: query, key and value rows lie in one matrix, heads in order."""
    fused = tuple((f"{ours}.attn.{part}.weight", config.dim) for part in "qkv")
    return (
        Split(f"{theirs}.self_attn.qkv_proj.weight", fused),
        Rename(f"{theirs}.self_attn.o_proj.weight", f"{ours}.attn.o.weight"),
    )


def feed_forward_rules(ffn: SwiGLU, theirs: str, ours: str) -> tuple[Rule, ...]:
    """Key map of one feed-forward: rows of the gate, then those of up, in one matrix."""
    fused = tuple((f"{ours}.{part}.weight", ffn.hidden) for part in ("gate", "up"))
    return (
        Split(f"{theirs}.gate_up_proj.weight", fused),
        Rename(f"{theirs}.down_proj.weight", f"{ours}.down.weight"),
    )


IGNORABLE = (r"puzzle_emb\.local_(weights|ids)", r"rotary_emb\.(cos|sin)_cached")
"""Buffers of a training batch, and tables that are made anew."""


def key_map_of(config: PuzzleConfig, rules: Sequence[Rule]) -> KeyMap:
    """The key map of a family whose layers have `rules`."""
    return KeyMap((*shared_rules(config), *rules), ignorable=IGNORABLE)
