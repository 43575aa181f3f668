"""Seen to fail: an inverse that is the element itself, moves that keep their old names, a problem of several pairs that
its own decoder refused."""

import numpy as np
import pytest

from looplab.tasks.base import IGNORED
from looplab.tasks.blocks import Blocks
from looplab.tasks.checkers import Checkers
from looplab.tasks.hanoi import Hanoi
from looplab.tasks.maze import Mazes
from looplab.tasks.river import River
from looplab.tasks.sudoku import Sudoku
from looplab.tasks.symmetry import Symmetry

TASKS = [
    (Sudoku(size=4), 8),
    (Sudoku(size=6), 20),
    (Sudoku(), 45),
    (Mazes(), 4),
    (Mazes(braid=0.3), 4),
    (Hanoi(), 3),
    (Checkers(), 2),
    (River(), 3),
    (River(boat=2, pairs=4), 4),
    (Blocks(), 4),
    (Blocks(), 7),
]


def test_places_move_and_names_change():
    symmetry = Symmetry((2, 0, 1), (0, 2, 3, 1))
    assert symmetry.apply(np.array([1, 2, IGNORED])).tolist() == [IGNORED, 2, 3]
    assert symmetry.inverse.apply(symmetry.apply(np.array([1, 2, 3]))).tolist() == [1, 2, 3]
    assert symmetry.apply(np.array([[1, 2, 3], [0, 0, 1]])).tolist() == [[1, 2, 3], [2, 0, 0]]


@pytest.mark.parametrize(("task", "difficulty"), TASKS, ids=lambda value: str(value)[:24])
def test_the_image_of_a_problem_is_answered_by_the_image_of_its_answer(task, difficulty):
    changed = 0
    for index in range(3):
        problem = task.sample(difficulty, 0, index)
        example = task.example(problem)
        for symmetry in task.symmetries(difficulty):
            image = task.decode(symmetry.apply(example.tokens))
            labels = symmetry.apply(example.labels)
            assert task.verify(image, labels[example.answer])
            assert task.canonical(image) == task.canonical(problem)
            changed += image != problem
            for tokens in (example.tokens, example.labels):
                assert (symmetry.inverse.apply(symmetry.apply(tokens)) == tokens).all()
    assert changed
