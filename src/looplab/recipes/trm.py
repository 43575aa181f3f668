"""TRM on small Sudoku: a tiny network refines its answer, with one update after every supervision step.

Settings of the paper (arXiv:2510.04871) at a size for a laptop: fewer cycles and supervision steps, a narrower stream
and a shorter warm-up. Weights are averaged, and the averages are what is evaluated.
"""

from looplab.models.trm import SelfAttention, TRMConfig
from looplab.nn.rope import Rope
from looplab.objectives.deep_supervision import DeepSupervision
from looplab.recipes.base import RECIPES
from looplab.recurrence.gradient import TruncatedBPTT
from looplab.tasks.rows import TaskRows
from looplab.tasks.sudoku import Sudoku
from looplab.training.config import RunConfig, TaskEvaluation
from looplab.training.optimizer import AdamW
from looplab.training.schedule import Constant

LOW_CYCLES = 3


@RECIPES.register("trm-sudoku-4x4")
def trm_sudoku_4x4() -> RunConfig:
    """Tiny recursive model on Sudoku of 4 x 4."""
    task = Sudoku(size=4)
    return RunConfig(
        recipe="trm-sudoku-4x4",
        model=TRMConfig(
            dim=64,
            vocab=len(task.tokens),
            layers=2,
            mixing=SelfAttention(heads=4),
            position=Rope(base=10000.0),
            prefix=None,
            cells=16,
            h_cycles=2,
            l_cycles=LOW_CYCLES,
            steps=8,
        ),
        data=TaskRows(task=task, rows=64),
        objective=DeepSupervision(),
        # All of the last high cycle.
        gradient=TruncatedBPTT(window=LOW_CYCLES + 1),
        optimizer=AdamW(lr=1e-3, weight_decay=0.1),
        schedule=Constant(warmup_steps=100),
        ema=0.999,
        steps=2000,
        evaluation=TaskEvaluation(every=500, items=128),
        save_every=500,
    )
