"""Three arms that differ in the depth law of training alone: does sampling depth keep a cut readout calibrated?

    A  fixed      every step runs all 8 applications
    B  uniform    prefix(k), k ~ U{1..8}, one draw per optimizer step
    C  late       prefix(k), k ~ U{5..8}: sampled, but never shallow

Two one-layer blocks of 4 iterations with learned iteration embeddings after a prelude; full back-propagation. Seed,
data order, initial weights and steps are equal, so C tells sampling as such from sampling the depths that are read.

Reference: the training arms of Dau, Khuat, Dung, "Beyond Depth Truncation", arXiv:2609.19934.
Deviations: one CPU thread instead of 90M parameters; bytes of the built-in corpus; a peak rate for this width, with
    their decay to a tenth.
"""

import dataclasses

from looplab.data.packing import PackedText, Packing
from looplab.models.looped import Envelope, LoopedConfig
from looplab.nn.attention import Attention
from looplab.nn.mlp import SwiGLU
from looplab.nn.rope import Rope
from looplab.objectives.next_token import NextToken
from looplab.recipes.base import RECIPES
from looplab.recurrence.depth import FixedDepth, PrefixDepth, UniformDepth
from looplab.recurrence.depth.base import DepthSampler
from looplab.recurrence.plan import Blocks
from looplab.recurrence.signal import StepEmbedding
from looplab.training.config import Evaluation, RunConfig
from looplab.training.optimizer import AdamW
from looplab.training.schedule import Cosine

BYTES = 259
"""Bytes, bos, eos, pad."""


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
    warmup_steps: int
    save_every: int


CPU = Size(dim=128, heads=4, hidden=344, prelude=2, seq_len=256, rows=8, steps=1300, warmup_steps=50, save_every=100)
SMOKE = Size(dim=16, heads=2, hidden=32, prelude=1, seq_len=64, rows=4, steps=20, warmup_steps=5, save_every=10)


LAWS: dict[str, tuple[str, DepthSampler]] = {
    "A": ("depth-schedule-fixed", FixedDepth(num_steps=8)),
    "B": ("depth-schedule-uniform", UniformDepth(low=1, high=8)),
    "C": ("depth-schedule-late", UniformDepth(low=5, high=8)),
}
"""Arm -> recipe, and the law of k, the applications that a step runs."""


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


def depth_schedule(arm: str, size: Size = CPU, seed: int = 0) -> RunConfig:
    """The run of arm A, B or C."""
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
        schedule=Cosine(warmup_steps=size.warmup_steps, floor=0.1),
        steps=size.steps,
        evaluation=Evaluation(every=size.steps, batches=1),
        save_every=size.save_every,
        seed=seed,
    )
