"""A run's evaluation on its task: the grid difficulty x num_steps, as far as the model has the iterations."""

from dataclasses import asdict, dataclass

from looplab.models.base import LoopedLM
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.spec import LoopSpec
from looplab.tasks.base import Task
from looplab.tasks.evaluation import Cell, evaluate
from looplab.training.config import TaskEvaluation
from looplab.training.evaluation import Scores


@dataclass(frozen=True, kw_only=True)
class Graded:
    """The problems of an evaluation."""

    task: Task
    difficulties: tuple[int, ...]
    config: TaskEvaluation

    @property
    def hash(self) -> str:
        """What was graded: the same problems in every run."""
        return f"{self.task.name}-{self.task.version}"

    def cells(self, model: LoopedLM, *, ledger: Ledger | None = None) -> list[Cell]:
        """The grid."""
        found = []
        for difficulty in self.difficulties:
            depths = depths_of(model.spec, self.task.num_steps(difficulty), self.config.depths)
            found += evaluate(model, self.task, difficulty, depths, items=self.config.items, ledger=ledger)
        return found

    def evaluate(self, model: LoopedLM, *, ledger: Ledger | None = None) -> Scores:
        """The grid; its first cell's loss (least difficulty, num_steps as the problem takes) stands for the run."""
        cells = self.cells(model, ledger=ledger)
        row = "  ".join(f"{c.difficulty}@{c.num_steps}: {c.exact_match:.3f}" for c in cells)
        return Scores(
            cells[0].loss, {"cells": [asdict(cell) for cell in cells]}, f"exact match by difficulty@num_steps  {row}"
        )


def graded(task: Task, trained: tuple[int, ...], config: TaskEvaluation) -> Graded:
    """The evaluation of a run that trains at these difficulties."""
    difficulties = config.difficulties
    if difficulties is None:
        further = {factor * max(trained) for factor in (2, 4)} & set(task.test_difficulties)
        difficulties = tuple(sorted({*trained, *further}))
    return Graded(task=task, difficulties=difficulties, config=config)


def depths_of(spec: LoopSpec, needed: int, multiples: tuple[float, ...]) -> tuple[int, ...]:
    """num_steps of the multiples of `needed` that a model can run; its own depth where it can run none of them."""
    depths = []
    for multiple in multiples:
        try:
            spec.plan(max(1, round(multiple * needed)))
        except ValueError:
            continue
        depths.append(max(1, round(multiple * needed)))
    own = spec.default_steps
    return tuple(dict.fromkeys(depths)) or (own if isinstance(own, int) else max(own),)
