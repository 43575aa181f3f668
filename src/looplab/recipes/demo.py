"""The checkpoint behind `looplab serve demo`: two layers four times, every depth trained, with a gate of its own.

Every iteration predicts, weighted by the law of the gate, whose entropy is rewarded: so tokens that the first steps
settle can stop there. The loss is that of Ouro's first stage (arXiv:2510.25741). Deviations: one CPU thread and
minutes; bytes of the built-in corpus; no norm between iterations, and the embedding is added before each. Its gates
and its verdict are made as docs/howto/early-exit.md says.
"""

from looplab.data.packing import PackedText, Packing
from looplab.models.looped import LoopedConfig, NoEnvelope
from looplab.nn.attention import Attention
from looplab.nn.embedding import Head
from looplab.nn.mlp import SwiGLU
from looplab.nn.rope import Rope
from looplab.objectives.expected_exit import ExpectedExit
from looplab.recipes.base import RECIPES
from looplab.recurrence.depth import FixedDepth
from looplab.recurrence.halting import HazardGate
from looplab.recurrence.injection import Add
from looplab.recurrence.plan import ModelLoop
from looplab.training.config import Evaluation, RunConfig
from looplab.training.optimizer import AdamW
from looplab.training.schedule import Cosine

BYTES = 259
"""Bytes, bos, eos, pad."""
STEPS = 4
SEQ_LEN = 256


@RECIPES.register("demo")
def demo() -> RunConfig:
    """Two layers four times with a trained stopping gate: what `looplab serve demo` answers with."""
    model = LoopedConfig(
        dim=64,
        vocab=BYTES,
        attention=Attention(heads=4, kv_heads=4, head_dim=16, position=Rope(base=10000.0)),
        ffn=SwiGLU(hidden=176),
        envelope=NoEnvelope(),
        blocks=(2,),
        order=ModelLoop(num_steps=STEPS),
        trained_depth=FixedDepth(num_steps=STEPS),
        injection=Add(source="embeds"),
        halt=HazardGate(bias=-1.0),
        head=Head(tied=True),
        max_positions=SEQ_LEN,
    )
    return RunConfig(
        recipe="demo",
        model=model,
        data=PackedText(packing=Packing(seq_len=SEQ_LEN, rows=8)),
        objective=ExpectedExit(beta=0.05),
        optimizer=AdamW(lr=3e-3),
        schedule=Cosine(warmup_steps=40, floor=0.05),
        steps=600,
        evaluation=Evaluation(every=300, batches=4),
        save_every=100,
    )
