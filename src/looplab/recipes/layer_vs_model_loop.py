"""Three stored layers, four times each: one layer after the other, or the whole stack again and again.

    layer   1 1 1 1  2 2 2 2  3 3 3 3          model   1 2 3  1 2 3  1 2 3  1 2 3

Both orders with and without re-injection of the embeddings and a pinned state at the end of every application, and with
R = 4 iterations always or R ~ U{1..8}, one draw per step. Weights at the start, parameters, data and steps are equal.

An application of the layer-loop is one layer, one of the model-loop all three: what happens at the end of every
application happens three times as often in the first.

Reference: layer-loop against model-loop: Loopie, arXiv:2607.16051. Deviations: everything but the two orders is ours.
"""

import dataclasses
from typing import Any, NamedTuple

from looplab.data.packing import PackedText, Packing
from looplab.models.looped import LoopedConfig, NoEnvelope
from looplab.nn.attention import Attention
from looplab.nn.embedding import Head
from looplab.nn.mlp import SwiGLU
from looplab.nn.rope import Learned, Position, Rope
from looplab.objectives.next_token import NextToken
from looplab.recurrence.boundary import EndNorm
from looplab.recurrence.depth import FixedDepth, UniformDepth
from looplab.recurrence.depth.base import DepthSampler
from looplab.recurrence.injection import Add
from looplab.recurrence.plan import LayerLoop, ModelLoop, PlanOrder
from looplab.tasks.base import Task
from looplab.tasks.pointer_stream import PointerStream
from looplab.tasks.prefix_sum import PrefixSum
from looplab.tasks.rows import TaskRows
from looplab.training.config import Evaluation, RunConfig, TaskEvaluation
from looplab.training.optimizer import AdamW
from looplab.training.schedule import Cosine

BYTES = 259
"""Bytes, bos, eos, pad."""
NUM_STEPS, LAYERS = 4, 3
ORDERS: dict[str, tuple[str, PlanOrder]] = {
    "layer": ("one layer four times, then the next", LayerLoop(num_steps=NUM_STEPS)),
    "model": ("all three layers, four times", ModelLoop(num_steps=NUM_STEPS)),
}
"""Order -> what it is."""
STATES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("no re-injection", {}),
    "inject": ("embeddings added before, state pinned after every application",
               {"injection": Add(source="embeds"), "boundary": EndNorm()}),
}  # fmt: skip
"""State -> fields of the model."""
LAWS: dict[str, tuple[str, DepthSampler]] = {
    "fixed": ("always R = 4", FixedDepth(num_steps=NUM_STEPS)),
    "sampled": ("R of U{1..8}", UniformDepth(low=1, high=2 * NUM_STEPS)),
}
"""Law -> depth in training."""
NODES = 8
"""Of the pointer chase: as many starts with a label in every row."""
TASKS: dict[str, Task] = {"chase": PointerStream(nodes=NODES), "sums": PrefixSum()}
"""What is trained on besides text."""
DIFFICULTY = {"chase": 4, "sums": 32}
"""At which answers are graded."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """What is equal in all arms."""

    dim: int
    heads: int
    hidden: int
    seq_len: int
    text_rows: int
    task_rows: int
    text_steps: int
    task_steps: int
    warmup_steps: int


CPU = Size(
    dim=96, heads=4, hidden=192, seq_len=128, text_rows=8, task_rows=24, text_steps=400, task_steps=1000,
    warmup_steps=50,
)  # fmt: skip
SMOKE = Size(
    dim=16, heads=2, hidden=32, seq_len=32, text_rows=4, task_rows=8, text_steps=10, task_steps=10, warmup_steps=5
)


class Cell(NamedTuple):
    """One entry of the grid."""

    task: str
    """text, or a key of TASKS."""
    order: str
    state: str
    law: str

    @property
    def name(self) -> str:
        """Of the arm."""
        return "-".join(self)

    @property
    def title(self) -> str:
        """The three choices."""
        return f"{ORDERS[self.order][0]}; {STATES[self.state][0]}; {LAWS[self.law][0]}"


def layer_vs_model_loop(cell: Cell, size: Size = CPU, seed: int = 0) -> RunConfig:
    """The run of a cell."""
    task = TASKS.get(cell.task)
    steps = size.text_steps if task is None else size.task_steps
    return RunConfig(
        recipe=f"layer-vs-model-loop-{cell.name}",
        model=_model(cell, size, task),
        data=_rows(size, task),
        objective=NextToken(),
        optimizer=AdamW(lr=3e-3),
        schedule=Cosine(warmup_steps=size.warmup_steps, floor=0.05),
        steps=steps,
        evaluation=Evaluation(every=steps, batches=1)
        if task is None
        else TaskEvaluation(every=steps, items=32, difficulties=(DIFFICULTY[cell.task],), depths=(1.0,)),
        save_every=steps,
        log_every=200,
        seed=seed,
    )


def _model(cell: Cell, size: Size, task: Task | None) -> LoopedConfig:
    longest = size.seq_len if task is None else task.length(DIFFICULTY[cell.task])
    position: Position = Rope(base=10000.0) if task is None else Learned(max=longest)
    heads = size.heads
    return LoopedConfig(
        dim=size.dim,
        vocab=BYTES if task is None else len(task.tokens),
        attention=Attention(heads=heads, kv_heads=heads, head_dim=size.dim // heads, position=position),
        ffn=SwiGLU(hidden=size.hidden),
        blocks=(LAYERS,),
        envelope=NoEnvelope(),
        order=ORDERS[cell.order][1],
        trained_depth=LAWS[cell.law][1],
        head=Head(tied=True) if task is None else Head(tied=False, outputs=len(task.symbols), bias=True),
        max_positions=longest,
        **STATES[cell.state][1],
    )


def _rows(size: Size, task: Task | None) -> PackedText | TaskRows:
    if task is None:
        return PackedText(packing=Packing(seq_len=size.seq_len, rows=size.text_rows))
    return TaskRows(task=task, rows=size.task_rows)
