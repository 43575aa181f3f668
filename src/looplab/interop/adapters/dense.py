"""Dense decoders of the library: every layer is a block that runs once.

    s_0 = what enters layer 0;  s_k+1 = layer_k(s_k);  logits = head(final norm(s_L))

Deviations from the native forward: none, `Adapter.verify` compares the bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from looplab._types import Bool, Float, Int
from looplab.interop.adapters.base import ADAPTERS, Adapter, softcapped
from looplab.interop.adapters.counts import attention_of, group, matrix_entries
from looplab.interop.adapters.replay import ReplayContext, replay
from looplab.models.base import count_parameters, prepare
from looplab.nn.cost import CostSpec, Group
from looplab.recurrence.depth import FixedDepth
from looplab.recurrence.kv import Cache, DepthIndexed
from looplab.recurrence.plan import Sequential
from looplab.recurrence.spec import BlockSpec, LoopSpec, StateField


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where a family keeps its parts. A part that a model lacks is None there, and left out."""

    body: str
    """Path of what embeds and runs the layers; the other parts are its own."""
    embedding: str
    layers: str
    readout: tuple[str, ...]
    """What runs between the last layer and the head, in order."""
    positions: str = ""
    """Table of learned positions."""
    project_in: str = ""


class DenseAdapter(Adapter):
    """A decoder stack; layer k is block k."""

    layout: ClassVar[Layout]

    def __init__(self, inner: Any):
        super().__init__()
        self.inner = inner
        self.layers = list(self.part(self.layout.layers))
        self.spec = _spec(self)

    @classmethod
    def wrap(cls, inner: Any) -> "DenseAdapter":
        if getattr(inner.config, "use_bidirectional_attention", None):
            raise ValueError(
                f"adapter {inner.config.model_type}: use_bidirectional_attention must be off. Got on, which is no "
                "language model of next tokens. Use the causal checkpoint of the family."
            )
        return cls(inner)

    @property
    def body(self) -> nn.Module:
        return self.inner.get_submodule(self.layout.body)

    def part(self, name: str) -> Any:
        """A module of the body, or None where this model has none."""
        return getattr(self.body, name, None) if name else None

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
        stream, tensors, calls = self.record({"input_ids": tokens}, positions, valid, cache)
        return ReplayContext(stream, positions, valid, tensors, calls)

    def step(
        self,
        state: Float[Tensor, "batch seq dim"],
        context: ReplayContext,
        block: int,
        iteration: Int[Tensor, " batch"],
        cache: Cache | None = None,
        *,
        record: dict[str, Tensor] | None = None,
    ) -> Float[Tensor, "batch seq dim"]:
        view = None if cache is None else cache.view(block, 0, iteration)
        return replay(self.layers[block], context, block, state, view=view)

    def coda(
        self, state: Float[Tensor, "batch seq dim"], context: ReplayContext, cache: Cache | None = None
    ) -> Float[Tensor, "batch seq width"]:
        for name in self.layout.readout:
            module = self.part(name)
            state = state if module is None else module(state)
        return state

    def head(self, hidden: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch vocab"]:
        logits = self.inner.get_output_embeddings()(hidden)
        return softcapped(logits, getattr(self.inner.config, "final_logit_softcapping", None)).float()


def _spec(adapter: DenseAdapter) -> LoopSpec:
    config, layout = adapter.inner.config, adapter.layout
    head = adapter.inner.get_output_embeddings()
    embedding, positions, project = (
        _listed(adapter.part(path)) for path in (layout.embedding, layout.positions, layout.project_in)
    )
    readout = [module for path in layout.readout for module in _listed(adapter.part(path))]
    params = count_parameters(
        [layer.parameters() for layer in adapter.layers],
        embedding=_parameters(embedding),
        position=_parameters(positions),
        prelude=_parameters(project),
        readout=_parameters(readout),
        head=head.parameters(),
    )
    shapes = [attention_of(config, index) for index in range(len(adapter.layers))]
    return LoopSpec(
        name=config.model_type,
        version="1",
        blocks=tuple(BlockSpec(layers=(i,), params=count) for i, count in enumerate(params.core)),
        order=Sequential(),
        trained_depth=FixedDepth(num_steps=1),
        state={"state": StateField(width=config.hidden_size, init="the embedded tokens")},
        kv_rule=DepthIndexed(),
        kv_rules=(DepthIndexed(),),
        max_positions=config.max_position_embeddings,
        vocab=(head.weight.shape[0], embedding[0].weight.shape[0]),
        readout=(*(path for path in layout.readout if adapter.part(path) is not None), "head"),
        params=params,
        cost=CostSpec(
            prelude=Group(matmul=matrix_entries(project)),
            blocks=tuple(group([layer], [shape]) for layer, shape in zip(adapter.layers, shapes, strict=True)),
            coda=Group(matmul=matrix_entries(readout)),
            head=Group(matmul=matrix_entries([head])),
        ),
    )


def _listed(module: nn.Module | None) -> list[Any]:
    return [] if module is None else [module]


def _parameters(modules: list[Any]) -> list[nn.Parameter]:
    return [parameter for module in modules for parameter in module.parameters()]


@ADAPTERS.register("llama")
@ADAPTERS.register("qwen2")
@ADAPTERS.register("qwen3")
@ADAPTERS.register("mistral")
@ADAPTERS.register("olmo")
@ADAPTERS.register("olmo2")
@ADAPTERS.register("smollm3")
@ADAPTERS.register("gemma")
@ADAPTERS.register("gemma2")
@ADAPTERS.register("gemma3_text")
class LlamaLike(DenseAdapter):
    """Families with the parts of Llama; what happens inside a layer is the family's own."""

    layout = Layout(body="model", embedding="embed_tokens", layers="layers", readout=("norm",))


@ADAPTERS.register("gpt_neox")
class GPTNeoX(DenseAdapter):
    """Pythia and its relatives."""

    layout = Layout(body="gpt_neox", embedding="embed_in", layers="layers", readout=("final_layer_norm",))


@ADAPTERS.register("gpt2")
class GPT2(DenseAdapter):
    """GPT-2, whose layers take some arguments by position."""

    layout = Layout(body="transformer", embedding="wte", positions="wpe", layers="h", readout=("ln_f",))


@ADAPTERS.register("opt")
class OPT(DenseAdapter):
    """OPT in both norm orders: the final norm may be missing, and narrow embeddings are projected in and out."""

    layout = Layout(
        body="model.decoder",
        embedding="embed_tokens",
        positions="embed_positions",
        project_in="project_in",
        layers="layers",
        readout=("final_layer_norm", "project_out"),
    )
