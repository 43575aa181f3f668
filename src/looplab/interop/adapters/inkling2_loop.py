"""Inkling 2 with a looped core: every pass starts again from the prelude and hears of the pass before through messages
(transformers 5.24).

    h, B   = prelude(embed(tokens))                     B: inputs of the layers that open a residual block
    pass 0   (h, B) -> core(h, B)
    pass t   (h, B) -> core(h, B; m_t),  m_t[j] = message_input(blocks of pass t-1 without the first, its h, layer j)
    logits = softcap(head(norm(final_input(coda(h, B)))))

So the state of pass t - 1 enters pass t only through messages, and pass 0 ignores it: passes 1, 2, .. are one function,
pass 0 is another (`operator_class` = min(t, 1)). A pass t >= 1 that follows no pass was never trained: its messages are
then made of copies of the prelude's output.

Deviations. Rows that run pass 0 and rows that run a later one are separated inside `step`, which reads `iteration`:
running both functions on all rows would double the cost. `cost.blocks` counts a later pass; the messages, which pass 0
does not make, are `messages` of `Inkling2Loop`. No key-value cache: a slot of the library holds convolution states too.
Experts run one by one, so that only the chosen ones cost. Logits before a changed token move by rounding only, because
the experts' groups change. Nothing else; `Adapter.verify` compares the bits.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from looplab._types import Bool, Float, Int
from looplab.interop.adapters.base import ADAPTERS, Adapter
from looplab.interop.adapters.counts import AttentionShape, group, matrix_entries
from looplab.interop.adapters.replay import Calls, ReplayContext, replay
from looplab.models.base import count_parameters, prepare
from looplab.nn.cost import CostSpec, Group
from looplab.recurrence import state as states
from looplab.recurrence.depth import FixedDepth
from looplab.recurrence.kv import Cache, DepthIndexed
from looplab.recurrence.plan import ModelLoop
from looplab.recurrence.spec import BlockSpec, LoopSpec, StateField

PARTS = ("hidden", "blocks")
"""Fields of the state."""


class InklingState(NamedTuple):
    """The stream after a pass, and the residual blocks that the pass opened."""

    hidden: Float[Tensor, "batch seq dim"]
    blocks: Float[Tensor, "batch seq opened dim"]


class InklingContext(NamedTuple):
    """Context of Inkling 2; `embeds` is the prelude's output."""

    embeds: Float[Tensor, "batch seq dim"]
    positions: Int[Tensor, "batch seq"]
    valid: Bool[Tensor, "batch seq"] | None
    tensors: tuple[Tensor, ...]
    calls: Calls
    blocks: Float[Tensor, "batch seq opened dim"]
    """Residual blocks that the prelude opened."""


@ADAPTERS.register("inkling2_loop")
@ADAPTERS.register("inkling2_loop_text")
class Inkling2Loop(Adapter):
    """The looped mixture-of-experts decoder of the library; of the composite model, its text half.

    Attributes:
        messages: Cost of the messages of one pass t >= 1, which `spec.cost.blocks[0]` includes.
    """

    since = "5.24"
    ignored = r"^model\.vision_tower\."
    notes = ("a pass t >= 1 that follows no pass, such as suffix(k), was never trained",)

    def __init__(self, inner: Any):
        super().__init__()
        self.inner = inner
        config = inner.config
        self.layers = list(inner.model.layers)
        self.prelude_layers = range(config.loop_layer_index_start)
        self.core_layers = range(config.loop_layer_index_start, config.loop_layer_index_end)
        self.coda_layers = range(config.loop_layer_index_end, config.num_hidden_layers)
        self.opened = sum(self.layers[i].is_block_boundary for i in self.core_layers)
        self.messages = _messages(self)
        self.spec = _spec(self)

    @classmethod
    def wrap(cls, inner: Any) -> "Inkling2Loop":
        inner.set_experts_implementation("eager")
        return cls(inner)

    @staticmethod
    def text_half(inner: Any) -> Any:
        """The text decoder of the library's composite model, with the composite's own modules."""
        with torch.device("meta"):
            text = transformers.Inkling2LoopForCausalLM(inner.config.text_config)
        text.model, text.lm_head = inner.model.language_model, inner.lm_head
        return text

    @property
    def body(self) -> nn.Module:
        return self.inner.model

    def encode(
        self,
        tokens: Int[Tensor, "batch seq"],
        cache: Cache | None = None,
        *,
        positions: Int[Tensor, "batch seq"] | None = None,
        valid: Bool[Tensor, "batch seq"] | None = None,
        extras: Mapping[str, Tensor] | None = None,
    ) -> InklingContext:
        if cache is not None:
            raise ValueError(
                "cache: inkling2_loop is not decoded here, its slots hold convolution states too. Pass cache=None"
            )
        positions, valid = prepare(self.spec, tokens, cache, positions, valid, extras)
        rows = tokens.shape[0]
        stream, tensors, calls = self.record(
            {"input_ids": tokens},
            positions,
            valid,
            None,
            drop=frozenset({"cache_offset"}),
            own_positional=True,
            per_row={"relative_distance": lambda distance: distance.expand(rows, 1, *distance.shape)},
            idle=[self.inner.model.message_input],
        )
        plain = ReplayContext(stream, positions, valid, tensors, calls)
        none_open = stream.new_zeros(*stream.shape[:-1], 0, stream.shape[-1])
        embeds, blocks = self._run(self.prelude_layers, plain, stream, none_open)
        return InklingContext(embeds, positions, valid, tensors, calls, blocks)

    def start(self, context: InklingContext) -> InklingState:
        hidden = context.embeds
        return InklingState(hidden, hidden.unsqueeze(-2).repeat(1, 1, self.opened, 1))

    def step(
        self,
        state: InklingState,
        context: InklingContext,
        block: int,
        iteration: Int[Tensor, " batch"],
        cache: Cache | None = None,
        *,
        record: dict[str, Tensor] | None = None,
    ) -> InklingState:
        first = iteration == 0
        if bool(first.all()):
            return self._pass(None, context)
        if not bool(first.any()):
            return self._pass(state, context)
        new = self._pass(None, states.select(context, first))
        later = self._pass(states.select(state, ~first), states.select(context, ~first))
        return states.map(lambda whole, a, b: _merged(whole, first, a, b), state, new, later)

    def coda(
        self, state: InklingState, context: InklingContext, cache: Cache | None = None
    ) -> Float[Tensor, "batch seq dim"]:
        model: Any = self.inner.model
        blocks = torch.cat([context.blocks, state.blocks], dim=-2)
        hidden, blocks = self._run(self.coda_layers, context, state.hidden, blocks)
        return model.norm(model.final_input(blocks, hidden)[0]).to(context.embeds.dtype)

    def head(self, hidden: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch vocab"]:
        return self.inner.logit_softcap(self.inner.lm_head(hidden).float())

    def _pass(self, before: InklingState | None, context: InklingContext) -> InklingState:
        hidden, blocks = self._run(self.core_layers, context, context.embeds, context.blocks, before)
        return InklingState(hidden, blocks[..., context.blocks.shape[-2] :, :])

    def _run(
        self,
        numbers: Iterable[int],
        context: Any,
        hidden: Tensor,
        blocks: Tensor,
        before: InklingState | None = None,
    ) -> tuple[Tensor, Tensor]:
        for place, number in enumerate(numbers):
            own = [blocks]
            if before is not None:
                own.append(self.inner.model.message_input(before.blocks[..., 1:, :], before.hidden, place))
            new = replay(self.layers[number], context, number, hidden, *own)
            if self.layers[number].is_block_boundary:
                blocks = torch.cat([blocks, hidden.unsqueeze(-2)], dim=-2)
            hidden = new
        return hidden, blocks


def first_or_later(block: int, iteration: int) -> int:
    """The operator class: pass 0 hears no messages, all others do."""
    return min(iteration, 1)


def _merged(whole: Tensor, rows: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    merged = torch.empty_like(whole)
    merged[rows], merged[~rows] = yes, no
    return merged


def _spec(adapter: Inkling2Loop) -> LoopSpec:
    config, inner = adapter.inner.config, adapter.inner
    parts = {"prelude": adapter.prelude_layers, "core": adapter.core_layers, "coda": adapter.coda_layers}
    held = {name: [p for i in numbers for p in adapter.layers[i].parameters()] for name, numbers in parts.items()}
    model = inner.model
    params = count_parameters(
        [[*held["core"], *model.message_input.parameters()]],
        embedding=model.embed_tokens.parameters(),
        prelude=held["prelude"],
        coda=held["coda"],
        readout=[*model.final_input.parameters(), *model.norm.parameters()],
        head=inner.lm_head.parameters(),
    )
    final = Group(matmul=_mixing(1, _sources(adapter, config.num_hidden_layers), config.hidden_size))
    core = _layers(adapter, parts["core"])
    return LoopSpec(
        name="inkling2_loop",
        version="1",
        blocks=(BlockSpec(layers=tuple(adapter.core_layers), params=params.core[0], reads=PARTS, writes=PARTS),),
        order=ModelLoop(num_steps=config.loop_num_passes),
        trained_depth=FixedDepth(num_steps=config.loop_num_passes),
        operator_class=first_or_later,
        index_parts=frozenset({"message"}),
        state={
            "hidden": StateField(width=config.hidden_size, init="the prelude's output"),
            "blocks": StateField(width=adapter.opened * config.hidden_size, init="copies of the prelude's output"),
        },
        kv_rule=DepthIndexed(),
        kv_rules=(DepthIndexed(),),
        max_positions=config.max_position_embeddings,
        vocab=(inner.lm_head.weight.shape[0], model.embed_tokens.weight.shape[0]),
        readout=("coda", "final_input", "norm", "head", "softcap"),
        params=replace(params, active=params.total - _idle_experts(adapter)),
        cost=CostSpec(
            prelude=_layers(adapter, parts["prelude"]),
            blocks=(_plus(core, adapter.messages),),
            coda=_plus(_layers(adapter, parts["coda"]), final),
            head=Group(matmul=matrix_entries([inner.lm_head])),
        ),
    )


def _layers(adapter: Inkling2Loop, numbers: range) -> Group:
    """The cost of these layers in a pass without messages."""
    layers = [adapter.layers[i] for i in numbers]
    gates = [gate for layer in layers for gate in _message_gates(layer)]
    convolutions = [m for layer in layers for m in layer.modules() if isinstance(m, nn.Conv1d)]
    return group(
        layers,
        [_attention(adapter.inner.config, i) for i in numbers],
        extra=sum(_besides(adapter, i) for i in numbers) - matrix_entries(gates) + _entries(convolutions),
        # The library convolves a padded row and cuts what hangs over.
        per_row=sum((conv.kernel_size[0] - 1) * conv.weight.numel() for conv in convolutions),
    )


def _besides(adapter: Inkling2Loop, index: int) -> int:
    """Matrix entries of one layer that are not in linear modules: router, chosen experts, position bias, mixing."""
    config, layer = adapter.inner.config, adapter.layers[index]
    dim, experts = config.hidden_size, layer.mlp.experts
    chosen = config.num_experts_per_tok * (experts.gate_up_proj[0].numel() + experts.down_proj[0].numel())
    bias = layer.self_attn.relative_position_bias
    sources = _sources(adapter, index)
    queries = 0 if layer.attention_input is None else layer.attention_input.query.numel() // dim
    mixing = _mixing(queries, sources, dim) + _mixing(1, sources + layer.is_block_boundary, dim)
    return layer.mlp.gate.weight.numel() + chosen + bias.num_heads * bias.proj.numel() + mixing


def _messages(adapter: Inkling2Loop) -> Group:
    layers = [adapter.layers[i] for i in adapter.core_layers]
    gates = matrix_entries(gate for layer in layers for gate in _message_gates(layer))
    return Group(matmul=gates + len(layers) * _mixing(4, adapter.opened, adapter.inner.config.hidden_size))


def _message_gates(layer: Any) -> list[nn.Module]:
    return [module for name, module in layer.named_children() if name.endswith("_message_gate")]


def _attention(config: Any, index: int) -> AttentionShape:
    slides = config.layer_types[index] == "hybrid_sliding"
    prefix = "swa_" if slides else ""
    heads, kv_heads, head_dim = (
        getattr(config, prefix + name) for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    window = config.sliding_window_size if slides else None
    return AttentionShape(width=heads * head_dim, kv_width=2 * kv_heads * head_dim, window=window)


def _sources(adapter: Inkling2Loop, index: int) -> int:
    """What a layer's residual attention reads: the blocks opened before it, and the stream."""
    return 1 + sum(layer.is_block_boundary for layer in adapter.layers[:index])


def _mixing(queries: int, sources: int, dim: int) -> int:
    """Matrix entries that stand for attention of learned queries over `sources` vectors: scores and sum."""
    return 2 * queries * sources * dim


def _entries(modules: Iterable[nn.Conv1d]) -> int:
    return sum(module.weight.numel() for module in modules)


def _idle_experts(adapter: Inkling2Loop) -> int:
    """Parameters of experts that a token does not visit."""
    config = adapter.inner.config
    idle = config.n_routed_experts - config.num_experts_per_tok
    experts = [layer.mlp.experts for layer in adapter.layers]
    return sum(idle * (e.gate_up_proj[0].numel() + e.down_proj[0].numel()) for e in experts)


def _plus(group: Group, other: Group) -> Group:
    return replace(group, matmul=group.matmul + other.matmul)
