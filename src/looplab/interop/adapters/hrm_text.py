"""HRM-Text: two stacks, a slow and a fast one, each with its own state (transformers 5.24).

    high = embedding_scale * embed(tokens);  low = z_L_init
    low  = L(low + high)          block 0, l times per cycle
    high = H(high + low)          block 1, once per cycle
    logits = head(high)

Each stack ends in its final norm, without a weight. The library takes the numbers of cycles from its configuration and
turns gradients off in early low cycles, even in eval mode; here depth is an argument and gradients follow the gradient
strategy. Prompts that attend in both directions need `extras={"token_type": ...}` (1 on the prompt); without it
attention is causal, and `notes` says so. Deviations from the native forward: none, `Adapter.verify` compares the bits.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from looplab._types import Bool, Float, Int
from looplab.interop.adapters.base import ADAPTERS, Adapter
from looplab.interop.adapters.counts import AttentionShape, group, matrix_entries
from looplab.interop.adapters.replay import ReplayContext, replay
from looplab.models.base import count_parameters, prepare
from looplab.nn.cost import CostSpec, Group
from looplab.recurrence.depth import FixedDepth
from looplab.recurrence.kv import Cache, DepthIndexed
from looplab.recurrence.plan import TwoLevel
from looplab.recurrence.spec import BlockSpec, LoopSpec, StateField

TOKEN_TYPE = "token_type"


class HrmState(NamedTuple):
    """The two states; the head reads `high`."""

    high: Float[Tensor, "batch seq dim"]
    low: Float[Tensor, "batch seq dim"]


@ADAPTERS.register("hrm_text")
class HrmText(Adapter):
    """The two-level decoder of the library."""

    since = "5.24"

    def __init__(self, inner: Any):
        super().__init__()
        self.inner = inner
        self.stacks = (inner.model.L_module, inner.model.H_module)
        self.layers = [layer for stack in self.stacks for layer in stack.layers]
        self.spec = _spec(self)
        if inner.config.prefix_lm:
            self.notes = ("trained with prompts that attend in both directions; run causally without token types",)

    @classmethod
    def wrap(cls, inner: Any) -> "HrmText":
        return cls(inner)

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
    ) -> ReplayContext:
        positions, valid = prepare(self.spec, tokens, cache, positions, valid, extras)
        body: Any = self.inner.model
        inputs = {"inputs_embeds": body.embed_tokens(tokens)}
        if extras is not None and TOKEN_TYPE in extras:
            if valid is not None:
                raise ValueError(
                    f"encode: valid has padding but hrm_text supports none with {TOKEN_TYPE}. Send equal lengths"
                )
            inputs["token_type_ids"] = extras[TOKEN_TYPE]
        _, tensors, calls = self.record(inputs, positions, valid, cache, drop=frozenset({"cycle_offset"}))
        return ReplayContext(inputs["inputs_embeds"] * body.embedding_scale, positions, valid, tensors, calls)

    def start(self, context: ReplayContext) -> HrmState:
        high = context.embeds
        return HrmState(high, self.inner.model.z_L_init.to(high.dtype).expand_as(high).contiguous())

    def step(
        self,
        state: HrmState,
        context: ReplayContext,
        block: int,
        iteration: Int[Tensor, " batch"],
        cache: Cache | None = None,
        *,
        record: dict[str, Tensor] | None = None,
    ) -> HrmState:
        hidden = state.low + state.high if block == 0 else state.high + state.low
        stack, first = self.stacks[block], block * len(self.stacks[0].layers)
        for place, layer in enumerate(stack.layers):
            view = None if cache is None else cache.view(block, place, iteration)
            hidden = replay(layer, context, first + place, hidden, view=view)
        hidden = stack.final_norm(hidden)
        return state._replace(low=hidden) if block == 0 else state._replace(high=hidden)

    def coda(
        self, state: HrmState, context: ReplayContext, cache: Cache | None = None
    ) -> Float[Tensor, "batch seq dim"]:
        return state.high

    def head(self, hidden: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch vocab"]:
        return self.inner.lm_head(hidden).float()


def _spec(adapter: HrmText) -> LoopSpec:
    config, inner = adapter.inner.config, adapter.inner
    params = count_parameters(
        [stack.parameters() for stack in adapter.stacks],
        embedding=inner.model.embed_tokens.parameters(),
        prelude=[inner.model.z_L_init],
        head=inner.lm_head.parameters(),
    )
    depth, width = len(adapter.stacks[0].layers), config.num_attention_heads * config.head_dim
    shapes = [AttentionShape(width=width, kv_width=2 * width)] * depth
    states = {"reads": ("low", "high")}
    return LoopSpec(
        name="hrm_text",
        version="1",
        blocks=(
            BlockSpec(layers=tuple(range(depth)), params=params.core[0], writes=("low",), **states),
            BlockSpec(layers=tuple(range(depth, 2 * depth)), params=params.core[1], writes=("high",), **states),
        ),
        order=TwoLevel(h=config.H_cycles, l=config.L_cycles, share=False),
        trained_depth=FixedDepth(num_steps=config.H_cycles),
        state={
            "high": StateField(width=config.hidden_size, init="the scaled embedding"),
            "low": StateField(width=config.hidden_size, init="a stored vector", read_by_coda=False),
        },
        kv_rule=DepthIndexed(),
        kv_rules=(DepthIndexed(),),
        max_positions=config.max_position_embeddings,
        vocab=(inner.lm_head.weight.shape[0], inner.model.embed_tokens.weight.shape[0]),
        readout=("head",),
        params=params,
        cost=CostSpec(
            prelude=Group(),
            blocks=tuple(group(stack.layers, shapes) for stack in adapter.stacks),
            coda=Group(),
            head=Group(matmul=matrix_entries([inner.lm_head])),
        ),
        extras={TOKEN_TYPE: False} if config.prefix_lm else {},
    )
