"""Arms that differ in the depth law alone: does sampling depth keep a cut readout calibrated, and at what price?

    A       fixed      every step runs all 8 applications
    B       uniform    prefix(k), k ~ U{1..8}, one draw per optimizer step
    C       late       prefix(k), k ~ U{5..8}: sampled, but never shallow
    A4      half       every step runs the first 4 applications, so the second block is never trained
    B_app   B until its applications are those of A's run, about 16/9 of the steps
    B_flop  B until its training FLOPs are those of A's run, about 1.5 times the steps

Two one-layer blocks of 4 iterations with learned iteration embeddings after a prelude; full back-propagation. Seed,
data order and initial weights are equal, so C tells sampling as such from sampling the depths that are read. The rate
is constant until the last fifth of a run: before that, losses of runs of different length compare at any step.

Reference: the training arms of Dau, Khuat, Dung, "Beyond Depth Truncation", arXiv:2609.19934.
Deviations: one CPU thread instead of 90M parameters; bytes of the built-in corpus; a peak rate for this width; A4,
    B_app, B_flop and the schedule are ours.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import numpy as np

from looplab.data.packing import PackedText, Packing
from looplab.models.base import build
from looplab.models.looped import Envelope, LoopedConfig
from looplab.nn.attention import Attention
from looplab.nn.mlp import SwiGLU
from looplab.nn.rope import Rope
from looplab.objectives.next_token import NextToken
from looplab.recipes.base import RECIPES
from looplab.recurrence.depth import FixedDepth, PrefixDepth, UniformDepth
from looplab.recurrence.depth.base import DepthSampler
from looplab.recurrence.expected_cost import step_flops
from looplab.recurrence.philox import stream_key
from looplab.recurrence.plan import Blocks
from looplab.recurrence.signal import StepEmbedding
from looplab.training.config import Evaluation, RunConfig
from looplab.training.optimizer import AdamW
from looplab.training.schedule import WSD

BYTES = 259
"""Bytes, bos, eos, pad."""
DEPTH = 8
"""Applications of the full plan."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """What is equal in all arms."""

    dim: int
    heads: int
    hidden: int
    prelude: int
    seq_len: int
    rows: int
    steps: int
    """Of arm A; a multiple of 20."""
    warmup_steps: int

    @property
    def every(self) -> int:
        """Steps between evaluations, a twentieth of A's run; checkpoints are kept at every quarter."""
        return self.steps // 20


CPU = Size(dim=128, heads=4, hidden=344, prelude=2, seq_len=256, rows=8, steps=600, warmup_steps=30)
SMOKE = Size(dim=16, heads=2, hidden=32, prelude=1, seq_len=64, rows=4, steps=20, warmup_steps=5)


LAWS: dict[str, tuple[str, DepthSampler]] = {
    "A": ("depth-schedule-fixed", FixedDepth(num_steps=DEPTH)),
    "B": ("depth-schedule-uniform", UniformDepth(low=1, high=DEPTH)),
    "C": ("depth-schedule-late", UniformDepth(low=5, high=DEPTH)),
    "A4": ("depth-schedule-half", FixedDepth(num_steps=DEPTH // 2)),
}
"""Arm -> recipe, and the law of k, the applications that a step runs."""
APPLICATIONS, FLOPS = "applications", "flops"
MATCHED = {"B_app": APPLICATIONS, "B_flop": FLOPS}
"""Longer runs of B -> what they share with A."""


@RECIPES.register("depth-schedule-fixed")
def depth_schedule_fixed() -> RunConfig:
    """Arm A of the study depth_schedule: always all 8 applications."""
    return depth_schedule("A")


@RECIPES.register("depth-schedule-uniform")
def depth_schedule_uniform() -> RunConfig:
    """Arm B of the study depth_schedule: the first k applications, k of U{1..8}."""
    return depth_schedule("B")


@RECIPES.register("depth-schedule-late")
def depth_schedule_late() -> RunConfig:
    """Arm C of the study depth_schedule: the first k applications, k of U{5..8}."""
    return depth_schedule("C")


@RECIPES.register("depth-schedule-half")
def depth_schedule_half() -> RunConfig:
    """Arm A4 of the study depth_schedule: always the first 4 applications."""
    return depth_schedule("A4")


def depth_schedule(arm: str, size: Size = CPU, seed: int = 0) -> RunConfig:
    """The run of an arm."""
    if arm in MATCHED:
        run = depth_schedule("B", size, seed)
        steps = matched_steps(run, depth_schedule("A", size, seed), MATCHED[arm])
        return dataclasses.replace(run, recipe=f"depth-schedule-uniform-{MATCHED[arm]}", steps=steps)
    name, law = LAWS[arm]
    heads = size.heads
    model = LoopedConfig(
        dim=size.dim,
        vocab=BYTES,
        attention=Attention(heads=heads, kv_heads=heads, head_dim=size.dim // heads, position=Rope(base=10000.0)),
        ffn=SwiGLU(hidden=size.hidden),
        envelope=Envelope(prelude=size.prelude, coda=0),
        blocks=(1, 1),
        order=Blocks(num_steps=(4, 4)),
        signal=StepEmbedding(max=4),
        trained_depth=PrefixDepth(law=law),
        max_positions=size.seq_len,
    )
    return RunConfig(
        recipe=name,
        model=model,
        data=PackedText(packing=Packing(seq_len=size.seq_len, rows=size.rows)),
        objective=NextToken(),
        optimizer=AdamW(lr=3e-3),
        schedule=WSD(warmup_steps=size.warmup_steps, decay_fraction=0.2, floor=0.1),
        steps=size.steps,
        evaluation=Evaluation(every=size.every, batches=4),
        save_every=5 * size.every,
        keep_every=5 * size.every,
        seed=seed,
    )


def matched_steps(run: RunConfig, reference: RunConfig, what: str) -> int:
    """Steps after which `run` has spent as much as `reference` does in its own, from the depths that will be drawn.

    Args:
        what: `APPLICATIONS` or `FLOPS`.
    """
    budget = sum(itertools.islice(_costs(reference, what), reference.steps))
    spent = steps = 0
    for cost in _costs(run, what):
        if 2 * spent + cost > 2 * budget:  # the nearer of two ends
            return steps
        spent, steps = spent + cost, steps + 1
    raise AssertionError("costs never end")


def _costs(run: RunConfig, what: str) -> Iterator[int]:
    """What one step after another costs."""
    spec, data = build(run.model, device="meta").spec, run.data
    costs = {
        depth: depth
        if what == APPLICATIONS
        else step_flops(spec, spec.plan()[:depth], run.gradient, rows=data.rows, tokens=data.seq_len)
        for depth in run.model.trained_depth.support()
    }
    for step in itertools.count():
        yield costs[_depth(run.model.trained_depth, run.seed, step)]


@functools.cache
def _depth(law: DepthSampler, seed: int, step: int) -> int:
    """As `training.step.draw_depth`; a fixed depth needs no draw."""
    support = law.support()
    return support[0] if len(support) == 1 else int(law.draw(stream_key(seed, "depth"), step, np.zeros(1, np.int64))[0])
