"""Seen to fail: labels one place late, a simulator that plays on after an illegal move, a truncated reply counted as
right, an end that is not asked for."""

import numpy as np
import pytest

from looplab.tasks.base import IGNORED
from looplab.tasks.blocks import Blocks
from looplab.tasks.checkers import Checkers
from looplab.tasks.hanoi import Hanoi, Tower
from looplab.tasks.moves import ASK, END, PAD, UNSOLVABLE
from looplab.tasks.river import River

TASKS = [(Hanoi(), 3), (Checkers(), 2), (River(), 3), (River(), 6), (Blocks(), 4), (Blocks(), 7)]
TOWER = Tower(2, 0, 2)


def moves(*names):
    return [Hanoi().tokens.index(name) for name in names]


def test_labels_stand_where_the_move_is_asked():
    task = Hanoi()
    example = task.example(TOWER)
    assert [task.tokens[t] for t in example.tokens] == ["C", "A", "A", "<moves>", "A>B", "A>C", "B>C"]
    assert example.labels[:3].tolist() == [IGNORED] * 3
    assert [task.symbols[t] for t in example.labels[3:]] == ["A>B", "A>C", "B>C", "<end>"]
    assert example.answer == slice(3, 7)


@pytest.mark.parametrize(("task", "difficulty"), TASKS, ids=lambda value: str(value)[:16])
def test_every_label_is_the_next_token_then_the_end(task, difficulty):
    for index in range(5):
        problem = task.sample(difficulty, 0, index)
        example = task.example(problem)
        answer = task.reference(problem).answer
        first = example.answer.start
        assert example.tokens[first] == ASK and first + len(answer) + 1 <= example.answer.stop == len(example.tokens)
        assert example.labels[first:].tolist()[: len(answer) + 1] == [*answer, END]
        assert (example.labels[first + len(answer) + 1 :] == IGNORED).all()
        assert example.tokens[first + 1 : first + 1 + len(answer)].tolist() == [*answer]
        assert (example.tokens[first + 1 + len(answer) :] == PAD).all()
        assert (example.labels[:first] == IGNORED).all()


def test_the_simulator_stops_at_the_first_illegal_move():
    task = Hanoi()
    played = task.simulate(TOWER, moves("A>B", "A>B", "A>C", "B>C"))
    assert (played.solved, played.first_illegal, played.legal_moves) == (False, 1, 1)
    assert played.positions == ((0, 0), (0, 1))
    played = task.simulate(TOWER, moves("A>C", "C>B", "A>C", "B>C"))
    assert (played.solved, played.first_illegal, played.legal_moves) == (True, None, 4)


@pytest.mark.parametrize(
    ("reply", "exact", "valid", "first_illegal", "right"),
    [
        (["A>B", "A>C", "B>C", "<end>"], True, True, None, 3),
        (["A>B", "A>C", "B>C"], True, True, None, 3),
        (["A>C", "C>B", "A>C", "B>C", "<end>", "A>B"], False, True, None, 0),
        (["A>B", "A>C", "<end>", "B>C"], False, False, None, 2),
        (["A>B", "A>C", "A>C", "<end>"], False, False, 2, 2),
        (["B>C"], False, False, 0, 0),
        (["A>B", "<pad>", "A>C"], False, False, 1, 1),
        (["unsolvable", "<end>"], False, False, None, 0),
        ([], False, False, None, 0),
    ],
)
def test_a_reply_is_graded_by_playing_it(reply, exact, valid, first_illegal, right):
    grade = Hanoi().grade_reply(TOWER, moves(*reply))
    assert (grade.exact, grade.valid, grade.first_illegal, grade.truncated) == (exact, valid, first_illegal, False)
    assert (grade.cells_right, grade.cells_total) == (right, 3)


def test_a_truncated_reply_is_neither_right_nor_wrong():
    for reply in (["A>B", "A>C"], ["A>B", "A>C", "B>C"]):
        grade = Hanoi().grade_reply(TOWER, moves(*reply), truncated=True)
        assert grade.truncated and not grade.exact and not grade.valid and grade.first_illegal is None


def test_cells_at_the_answer_are_compared_and_played():
    task, answer = Hanoi(), np.array(moves("A>B", "A>C", "B>C", "<end>"))
    grade = task.grade(TOWER, answer)
    assert (grade.exact, grade.valid, grade.cells_right, grade.cells_total) == (True, True, 4, 4)
    answer[1] = answer[2]
    grade = task.grade(TOWER, answer)
    assert (grade.exact, grade.valid, grade.first_illegal, grade.cells_right) == (False, False, 2, 3)
    assert task.verify(TOWER, answer) is False


def test_a_model_may_say_unsolvable():
    river, lost = River(boat=2, pairs=4), River(boat=2, pairs=4).sample(4, 0, 0)
    assert river.grade_reply(lost, [UNSOLVABLE, END]).valid
    assert river.reference(lost).answer == (UNSOLVABLE,)
    assert not river.grade_reply(lost, [river.tokens.index("(A1)"), END]).valid
    assert not river.grade_reply(river.sample(3, 0, 0), [UNSOLVABLE, END]).valid


@pytest.mark.parametrize(("task", "difficulty"), TASKS, ids=lambda value: str(value)[:16])
def test_targets_are_the_position_and_the_moves_so_far(task, difficulty):
    problem = task.sample(difficulty, 1, 0)
    example, trace = task.example(problem), task.reference(problem)
    first = example.answer.start
    for k in range(task.num_steps(difficulty) + 2):
        labels = task.trace_labels(problem, k)
        position = trace.values[min(k, len(trace.values) - 1)]
        placed = task.placed(problem, position)
        assert labels[first - len(placed) : first].tolist() == placed
        known = example.labels[first : first + k] if k < task.num_steps(difficulty) else example.labels[first:]
        assert labels[first : first + len(known)].tolist() == known.tolist()
        assert (labels[first + len(known) :] == IGNORED).all()
    assert len(trace.values) == 1 or task.solved(problem, trace.values[-1])


def test_a_limit_below_the_length_of_the_answer_is_refused():
    message = (
        r"hanoi n=12 needs 4,095 moves \(about 12,285 tokens\); max_new_tokens is 4,096. "
        "Items would be counted as truncated."
    )
    with pytest.raises(ValueError, match=message):
        Hanoi().check_limit(12, 4096, tokens_per_move=3)
    Hanoi().check_limit(12, 4096)
    with pytest.raises(ValueError, match="checkers n=5 needs 35 moves"):
        Checkers().check_limit(5, 34)


def test_moves_are_shown_with_the_positions_they_lead_to():
    assert Hanoi().show(TOWER).splitlines()[:2] == ["C A A", "         A>B   A B"]
    assert River(boat=2, pairs=4).show(River(boat=2, pairs=4).sample(4, 0, 0)).splitlines()[1] == "unsolvable"
