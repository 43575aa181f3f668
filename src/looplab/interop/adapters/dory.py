"""Dory: a core of layers on the unit sphere, repeated between a prelude and a coda (transformers 5.24).

    h = prelude(embed(tokens));  e = norm(h);  s_0 = h
    s_t+1 = core(norm(s_t) + e)
    logits = head(norm(coda(s_R)))

norm is the L2 norm without a weight. The library reads the number of loops from its configuration at every forward;
here it is an argument. The library's cache "per_loop" is `DepthIndexed`, "last_loop" is `Single`, which does not equal
recomputation. Deviations from the native forward: none, `Adapter.verify` compares the bits.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from looplab._types import Bool, Float, Int
from looplab.interop.adapters.base import ADAPTERS, Adapter
from looplab.interop.adapters.counts import attention_of, group, matrix_entries
from looplab.interop.adapters.replay import Calls, ReplayContext, replay
from looplab.models.base import count_parameters, prepare
from looplab.nn.cost import CostSpec, Group
from looplab.recurrence.depth import FixedDepth
from looplab.recurrence.kv import Cache, DepthIndexed, Single
from looplab.recurrence.plan import CODA, PRELUDE, ModelLoop
from looplab.recurrence.spec import BlockSpec, LoopSpec, StateField

LIBRARY_CACHE = frozenset({"cache_offset", "shared_kv_states"})
"""Arguments by which the library's own cache tells loops apart; ours does it by slot."""


class DoryContext(NamedTuple):
    """Context of Dory; `embeds` is the prelude's output."""

    embeds: Float[Tensor, "batch seq dim"]
    positions: Int[Tensor, "batch seq"]
    valid: Bool[Tensor, "batch seq"] | None
    tensors: tuple[Tensor, ...]
    calls: Calls
    injected: Float[Tensor, "batch seq dim"]
    """norm of the prelude's output, added before every application."""


@ADAPTERS.register("dory")
class Dory(Adapter):
    """The looped decoder of the library."""

    since = "5.24"

    def __init__(self, inner: Any):
        super().__init__()
        self.inner = inner
        self.layers = list(inner.model.layers)
        config = inner.config
        start, stop = config.n_input_layers, config.n_input_layers + config.n_recurrent_layers
        self.prelude_layers = range(start)
        self.core_layers = range(start, stop)
        self.coda_layers = range(config.num_hidden_layers - config.n_output_layers, config.num_hidden_layers)
        self.spec = _spec(self)

    @classmethod
    def wrap(cls, inner: Any) -> "Dory":
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
    ) -> DoryContext:
        positions, valid = prepare(self.spec, tokens, cache, positions, valid, extras)
        stream, tensors, calls = self.record({"input_ids": tokens}, positions, valid, cache, drop=LIBRARY_CACHE)
        plain = ReplayContext(stream, positions, valid, tensors, calls)
        embeds = self._run(self.prelude_layers, plain, stream, PRELUDE, None, cache)
        return DoryContext(embeds, positions, valid, tensors, calls, self.inner.model.norm(embeds))

    def step(
        self,
        state: Float[Tensor, "batch seq dim"],
        context: DoryContext,
        block: int,
        iteration: Int[Tensor, " batch"],
        cache: Cache | None = None,
        *,
        record: dict[str, Tensor] | None = None,
    ) -> Float[Tensor, "batch seq dim"]:
        hidden = self.inner.model.norm(state) + context.injected
        return self._run(self.core_layers, context, hidden, block, iteration, cache)

    def coda(
        self, state: Float[Tensor, "batch seq dim"], context: DoryContext, cache: Cache | None = None
    ) -> Float[Tensor, "batch seq dim"]:
        return self.inner.model.norm(self._run(self.coda_layers, context, state, CODA, None, cache))

    def head(self, hidden: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch vocab"]:
        return self.inner.lm_head(hidden).float()

    def _run(
        self, numbers: Iterable[int], context: Any, hidden: Tensor, block: int, iteration: Any, cache: Cache | None
    ) -> Tensor:
        for place, number in enumerate(numbers):
            view = None if cache is None else cache.view(block, place, iteration)
            hidden = replay(self.layers[number], context, number, hidden, view=view)
        return hidden


def _spec(adapter: Dory) -> LoopSpec:
    config, inner = adapter.inner.config, adapter.inner
    parts = {"prelude": adapter.prelude_layers, "core": adapter.core_layers, "coda": adapter.coda_layers}
    layers = {name: [adapter.layers[i] for i in numbers] for name, numbers in parts.items()}
    held = {name: [p for layer in chosen for p in layer.parameters()] for name, chosen in layers.items()}
    costs = {name: group(layers[name], [attention_of(config, i) for i in parts[name]]) for name in parts}
    params = count_parameters(
        [held["core"]],
        embedding=inner.model.embed_tokens.parameters(),
        prelude=held["prelude"],
        coda=held["coda"],
        head=inner.lm_head.parameters(),
    )
    rules = {"per_loop": DepthIndexed(), "last_loop": Single()}
    return LoopSpec(
        name="dory",
        version="1",
        blocks=(BlockSpec(layers=tuple(adapter.core_layers), params=params.core[0]),),
        order=ModelLoop(num_steps=config.n_recurrent_loops),
        trained_depth=FixedDepth(num_steps=config.n_recurrent_loops),
        state={"state": StateField(width=config.hidden_size, init="the prelude's output")},
        kv_rule=rules[config.recurrent_kv_cache_mode],
        kv_rules=tuple(rules.values()),
        max_positions=config.max_position_embeddings,
        vocab=(inner.lm_head.weight.shape[0], inner.model.embed_tokens.weight.shape[0]),
        readout=("coda", "norm", "head"),
        params=params,
        cost=CostSpec(
            prelude=costs["prelude"],
            blocks=(costs["core"],),
            coda=costs["coda"],
            head=Group(matmul=matrix_entries([inner.lm_head])),
        ),
    )
