"""Tiny language models on the built-in corpus, in bytes: the built-in checkpoints.

All four share width, layers, data, order of data and optimizer; they differ in how depth is made. Three arms are those
of Dau, Khuat, Dung, "Beyond Depth Truncation", arXiv:2609.19934, at a size for one CPU thread: fixed depth, sampled
depth, and a dense control with as many executed layers. The fourth repeats one core without any iteration index.
"""

from typing import Any

from looplab.data.packing import PackedText, Packing
from looplab.models.dense import DenseConfig
from looplab.models.looped import Envelope, LoopedConfig
from looplab.nn.attention import Attention
from looplab.nn.mlp import SwiGLU
from looplab.nn.rope import Rope
from looplab.objectives.next_token import NextToken
from looplab.recipes.base import RECIPES
from looplab.recurrence.depth import FixedDepth, PrefixDepth, UniformDepth
from looplab.recurrence.injection import Add
from looplab.recurrence.plan import Blocks, ModelLoop
from looplab.recurrence.signal import StepEmbedding
from looplab.training.config import Evaluation, RunConfig
from looplab.training.optimizer import AdamW
from looplab.training.schedule import Cosine

BYTES = 259
"""Bytes, bos, eos, pad."""
WIDTH = 64
SEQ_LEN = 256


@RECIPES.register("text-2x4-fixed")
def text_2x4_fixed() -> RunConfig:
    """Two blocks of 4 iterations with iteration embeddings, always all 8 applications."""
    return _run("text-2x4-fixed", _two_blocks(PrefixDepth(law=FixedDepth(num_steps=8))))


@RECIPES.register("text-2x4-sampled")
def text_2x4_sampled() -> RunConfig:
    """The same model trained at a depth of U{1..8}: a draw of k runs the first k applications."""
    return _run("text-2x4-sampled", _two_blocks(PrefixDepth(law=UniformDepth(low=1, high=8))))


@RECIPES.register("text-dense")
def text_dense() -> RunConfig:
    """The dense twin: as many executed layers (10), none of them repeated."""
    return _run("text-dense", DenseConfig(layers=10, **_shape()))


@RECIPES.register("text-core")
def text_core() -> RunConfig:
    """One core of one layer, 8 iterations without an index; the prelude's output is added before each."""
    model = LoopedConfig(
        envelope=Envelope(prelude=1, coda=1),
        blocks=(1,),
        order=ModelLoop(num_steps=8),
        injection=Add(),
        trained_depth=FixedDepth(num_steps=8),
        **_shape(),
    )
    return _run("text-core", model)


def _two_blocks(law: PrefixDepth) -> LoopedConfig:
    return LoopedConfig(
        envelope=Envelope(prelude=1, coda=1),
        blocks=(1, 1),
        order=Blocks(num_steps=(4, 4)),
        signal=StepEmbedding(max=4),
        trained_depth=law,
        **_shape(),
    )


def _shape() -> dict[str, Any]:
    return {
        "dim": WIDTH,
        "vocab": BYTES,
        "attention": Attention(heads=4, kv_heads=4, head_dim=16, position=Rope(base=10000.0)),
        "ffn": SwiGLU(hidden=128),
        "max_positions": SEQ_LEN,
    }


def _run(name: str, model: LoopedConfig | DenseConfig) -> RunConfig:
    return RunConfig(
        recipe=name,
        model=model,
        data=PackedText(packing=Packing(seq_len=SEQ_LEN, rows=8)),
        objective=NextToken(),
        optimizer=AdamW(lr=3e-3),
        schedule=Cosine(warmup_steps=50, floor=0.05),
        steps=1500,
        evaluation=Evaluation(every=250, batches=4),
        save_every=250,
    )
