"""ALBERT: groups of layers whose weights every repetition shares, read by a masked-language head.

    s_0 = mapping_in(embeddings(tokens));  s_i+1 = group_g(s_i), g = int(i / (L / groups))
    logits = predictions(s_L)

Not causal, no key-value cache; only masked positions have a loss (`mask_token` is the id to put there). The head's
bias exists twice in the library, and in some checkpoints the two differ: `predictions.bias` is the trained one, so the
other is tied to it.
Deviations from the native forward: none, `Adapter.verify` compares the bits.
Reference: Lan et al., arXiv:1909.11942.
"""

import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from looplab._types import Bool, Float, Int
from looplab.interop.adapters.base import ADAPTERS, Adapter
from looplab.interop.adapters.counts import AttentionShape, group, matrix_entries
from looplab.interop.adapters.replay import ReplayContext, replay
from looplab.models.base import count_parameters, prepare
from looplab.nn.cost import CostSpec, Group
from looplab.recurrence.depth import FixedDepth
from looplab.recurrence.kv import Cache, DepthIndexed
from looplab.recurrence.plan import Blocks, ModelLoop, PlanOrder
from looplab.recurrence.spec import BlockSpec, LoopSpec, StateField

BIAS_NOTE = "predictions.decoder.bias was not tied to predictions.bias; tied, with the values of predictions.bias"


@ADAPTERS.register("albert")
class Albert(Adapter):
    """The weight-tied masked language model of the library; a group of layers is a block.

    Attributes:
        mask_token: Id of the mask; None where the folder has no tokenizer that names it.
    """

    auto_class = "AutoModelForMaskedLM"
    ignored = r"^(albert\.pooler|sop_classifier)\."  # of the pretraining model; the masked head does not read them
    mask_token: int | None = None

    def __init__(self, inner: Any):
        super().__init__()
        self.inner = inner
        self.layers = list(inner.albert.encoder.albert_layer_groups)
        predictions = inner.predictions
        if predictions.decoder.bias is not predictions.bias:
            predictions.decoder.bias = predictions.bias
            self.notes = (BIAS_NOTE,)
            warnings.warn(f"adapter albert: {BIAS_NOTE}", stacklevel=3)
        self.spec = _spec(self)

    @classmethod
    def wrap(cls, inner: Any) -> "Albert":
        return cls(inner)

    @property
    def body(self) -> nn.Module:
        return self.inner.albert

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
        stream, tensors, calls = self.record({"input_ids": tokens}, positions, valid, None)
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
        return replay(self.layers[block], context, block, state)

    def coda(
        self, state: Float[Tensor, "batch seq dim"], context: ReplayContext, cache: Cache | None = None
    ) -> Float[Tensor, "batch seq dim"]:
        return state

    def head(self, hidden: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch vocab"]:
        return self.inner.predictions(hidden).float()


def _spec(adapter: Albert) -> LoopSpec:
    config, inner = adapter.inner.config, adapter.inner
    embeddings, mapping = inner.albert.embeddings, inner.albert.encoder.embedding_hidden_mapping_in
    order = _order(config.num_hidden_layers, len(adapter.layers))
    params = count_parameters(
        [block.parameters() for block in adapter.layers],
        position=embeddings.position_embeddings.parameters(),
        embedding=embeddings.parameters(),
        prelude=mapping.parameters(),
        head=inner.predictions.parameters(),
    )
    inner_layers = config.inner_group_num
    shapes = [AttentionShape(width=config.hidden_size, kv_width=0)] * inner_layers
    first = range(0, inner_layers * len(adapter.layers), inner_layers)
    deepest = order.default_steps if isinstance(order, ModelLoop) else max(order.default_steps)  # type: ignore[arg-type]
    return LoopSpec(
        name="albert",
        version="1",
        blocks=tuple(
            BlockSpec(layers=tuple(range(start, start + inner_layers)), params=count)
            for start, count in zip(first, params.core, strict=True)
        ),
        order=order,
        trained_depth=FixedDepth(num_steps=deepest),
        state={"state": StateField(width=config.hidden_size, init="the mapped embeddings")},
        kv_rule=DepthIndexed(),
        kv_rules=(),
        causal=False,
        max_positions=config.max_position_embeddings,
        vocab=(config.vocab_size, embeddings.word_embeddings.weight.shape[0]),
        readout=("predictions",),
        params=params,
        cost=CostSpec(
            prelude=Group(matmul=matrix_entries([mapping])),
            blocks=tuple(group([block], shapes) for block in adapter.layers),
            coda=Group(),
            head=Group(matmul=matrix_entries([inner.predictions])),
        ),
    )


def _order(layers: int, groups: int) -> PlanOrder:
    """One group: the model-loop of it. Several: each as often as the library's rounding gives it."""
    if groups == 1:
        return ModelLoop(num_steps=layers)
    runs = Counter(int(i / (layers / groups)) for i in range(layers))
    return Blocks(num_steps=tuple(runs[g] for g in range(groups)))
