"""A model that is known from the outside: one rule moves its state, and the truth it should reach is in its context.

    truth(x)  = (log P(. | x) - mean) W^T        W orthogonal, so that head(truth) is the law of the next letter
    state_0   = 0
    state_j+1 = rule(state_j, truth, block, iteration)
    hidden    = state,   logits = hidden W

The rule is a small module of its own; what depends on the iteration in it is real weights, one row per iteration.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from looplab._types import Bool, Float, Int
from looplab.audit.config import AuditConfig
from looplab.audit.positive_controls.letters import Chain, Letters
from looplab.audit.protocol import audit_model
from looplab.audit.result import AuditResult
from looplab.data.documents import DocumentSet
from looplab.models.base import Context, LoopedLM, count_parameters, prepare
from looplab.nn.cost import CostSpec, Group
from looplab.recurrence.depth import FixedDepth
from looplab.recurrence.kv.base import Cache
from looplab.recurrence.kv.depth_indexed import DepthIndexed
from looplab.recurrence.plan import Blocks, ModelLoop, PlanOrder
from looplab.recurrence.spec import BlockSpec, LoopSpec, ParamCount, StateField, own_function, same_function


class Known(LoopedLM):
    """The model of one rule: `rule(state, truth, block, iteration)`, where `iteration` has one entry per row."""

    def __init__(self, chain: Chain, rule: nn.Module, *, steps: int | tuple[int, ...], indexed: bool = True):
        super().__init__()
        logits = np.log(chain.moves)
        size = len(logits)
        centred = torch.from_numpy(logits - logits.mean(axis=1, keepdims=True))
        self.truth = nn.Parameter(as_hidden(centred))
        self.unembedding = nn.Parameter(torch.from_numpy(rotation(size)).float())
        self.rule = rule
        cores = [rule.parameters(), *([] for _ in range(_blocks(steps) - 1))]
        self.spec = known_spec(
            "known",
            steps,
            width=size,
            vocabulary=size,
            indexed=indexed,
            params=count_parameters(cores, embedding=[self.truth], head=[self.unembedding]),
        )

    def encode(
        self,
        tokens: Int[Tensor, "batch seq"],
        cache: Cache | None = None,
        *,
        positions: Int[Tensor, "batch seq"] | None = None,
        valid: Bool[Tensor, "batch seq"] | None = None,
        extras: Mapping[str, Tensor] | None = None,
    ) -> Context:
        positions, valid = prepare(self.spec, tokens, cache, positions, valid, extras)
        return Context(self.truth[tokens], positions, valid)

    def init_state(self, context: Context, noise: Float[Tensor, "batch seq noise"] | None) -> Tensor:
        return torch.zeros_like(context.embeds)

    def step(
        self,
        state: Tensor,
        context: Context,
        block: int,
        iteration: Int[Tensor, " batch"],
        cache: Cache | None = None,
        *,
        record: dict[str, Tensor] | None = None,
    ) -> Tensor:
        moved: Tensor = self.rule(state, context.embeds, block, iteration)
        return moved

    def coda(self, state: Tensor, context: Context, cache: Cache | None = None) -> Float[Tensor, "batch seq dim"]:
        return state

    def head(self, hidden: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch vocab"]:
        return hidden @ self.unembedding


def as_hidden(logits: Float[Tensor, "*rows vocab"]) -> Float[Tensor, "*rows vocab"]:
    """The hidden states that the head of a `Known` model turns into `logits`, float32."""
    return (logits @ torch.from_numpy(rotation(logits.shape[-1])).mT).float()


def rotation(size: int) -> Float[np.ndarray, "size size"]:
    """A fixed orthogonal matrix."""
    return np.linalg.qr(np.random.default_rng(size).normal(size=(size, size)))[0]


def known_spec(
    name: str, steps: int | tuple[int, ...], *, width: int, vocabulary: int, indexed: bool, params: ParamCount
) -> LoopSpec:
    """One block, or as many as `steps` has entries; every iteration is a function of its own if `indexed`."""
    order: PlanOrder = Blocks(num_steps=steps) if isinstance(steps, tuple) else ModelLoop(num_steps=steps)
    blocks = _blocks(steps)
    rule = DepthIndexed()
    return LoopSpec(
        name=name,
        version="1",
        blocks=tuple(BlockSpec(layers=(i,), params=params.core[i]) for i in range(blocks)),
        order=order,
        trained_depth=FixedDepth(num_steps=max(steps) if isinstance(steps, tuple) else steps),
        operator_class=own_function if indexed else same_function,
        index_parts=frozenset({"embedding"}) if indexed else frozenset(),
        max_iteration=(max(steps) if isinstance(steps, tuple) else steps) if indexed else None,
        state={"state": StateField(width=width, init="fixed")},
        kv_rule=rule,
        kv_rules=(rule,),
        vocab=(vocabulary, vocabulary),
        readout=("head",),
        params=params,
        cost=CostSpec(
            prelude=Group(), blocks=(Group(layers=1),) * blocks, coda=Group(), head=Group(matmul=width * vocabulary)
        ),
    )


def _blocks(steps: int | tuple[int, ...]) -> int:
    return len(steps) if isinstance(steps, tuple) else 1


def audit_known(
    model: LoopedLM,
    documents: DocumentSet,
    *,
    seed: int,
    grid: tuple[int, ...] | None = (1,),
    controls: tuple[str, ...] | None = (),
    probes: tuple[str, ...] = (),
    size: int = 200,
) -> AuditResult:
    """The audit of a hand-made model, with no more schedules than its answer needs.

    Args:
        grid: Values of k besides 1 and kmid; None is every k.
        controls: Families besides full, prefix and repeat; None is all.
        size: Documents of each split, at most.
    """
    config = AuditConfig(
        grid=grid,
        controls=controls,
        probes=probes,
        documents=size,
        calibration_documents=size,
        replicates=1000,
        seed=seed,
    )
    return audit_model(model.eval(), documents, config, tokenizer=Letters(model.spec.vocab[0]))
