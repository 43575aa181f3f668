"""Do a task's grader, its reference interpreter and its independent check agree? Counted over many problems.

Every problem is answered by the reference, and by that answer with one cell changed. The grader and the independent
check (`Task.verify`) judge both. And every problem is drawn once more, alone, and must have the same bytes.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from looplab._config import from_dict, to_dict
from looplab.tasks.base import IGNORED, Split, Task


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Of `items` problems: in how many each promise held."""

    difficulty: int
    items: int
    exact: int = 0
    """The grader takes the reference's answer."""
    verified: int | None = 0
    """The independent check takes it; None: the task has no such check."""
    refused: int = 0
    """The grader finds the changed answer not exact."""
    agreed: int | None = 0
    """The independent check takes the changed answer just where the grader finds it valid (mostly: nowhere)."""
    alone: int = 0
    """Drawn alone, by a task built anew, the problem has the same bytes."""

    @property
    def complete(self) -> bool:
        """Whether every promise held every time."""
        return all(n in (None, self.items) for n in (self.exact, self.verified, self.refused, self.agreed, self.alone))


def agreement(task: Task, difficulty: int, *, items: int, seed: int = 0, split: Split | None = None) -> Agreement:
    """Judges the problems 0 .. items - 1 of a seed.

    Args:
        split: Only problems of this split; None: of any.
    """
    exact = refused = verified = agreed = alone = 0
    checked = True
    again = from_dict(Task, to_dict(task))  # type: ignore[type-abstract]
    for index in range(items):
        problem = task.sample(difficulty, seed, index, split)
        example = task.example(problem)
        answer = example.labels[example.answer]
        other = changed(task, answer)
        grade, wrong = task.grade(problem, answer), task.grade(problem, other)
        exact += grade.exact and grade.cells_right == grade.cells_total > 0 and grade.valid is not False
        refused += not wrong.exact and wrong.cells_right == grade.cells_total - 1
        verdicts = task.verify(problem, answer), task.verify(problem, other)
        checked = checked and None not in verdicts
        verified += verdicts[0] is True
        agreed += verdicts[1] == bool(wrong.valid)
        redrawn = again.example(again.sample(difficulty, seed, index, split))
        alone += redrawn.tokens.tobytes() == example.tokens.tobytes() and (
            redrawn.labels.tobytes() == example.labels.tobytes()
        )
    return Agreement(
        difficulty=difficulty,
        items=items,
        exact=exact,
        verified=verified if checked else None,
        refused=refused,
        agreed=agreed if checked else None,
        alone=alone,
    )


def changed(task: Task, answer: NDArray[np.int64]) -> NDArray[np.int64]:
    """The answer with the next symbol in its first scored cell."""
    other = answer.copy()
    cell = tuple(np.argwhere(answer != IGNORED)[0])
    other[cell] = (other[cell] + 1) % len(task.symbols)
    return other
