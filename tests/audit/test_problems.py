"""Problems as documents: sides without a common problem, the same ones in every audit, cells side by side."""

import hashlib

import numpy as np
import pytest

from looplab.audit.documents import unit
from looplab.audit.problems import Problems, prepare_problems
from looplab.data.documents import DataError
from looplab.tasks.base import IGNORED
from looplab.tasks.prefix_sum import PrefixSum
from looplab.tasks.state_tracking import StateTracking

SWAPS = StateTracking(group="swap_s5", train_length=6)
SMALL = StateTracking(group="s3", train_length=3)
SIDES = ("evaluation", "calibration", "training")


def prepared(task, difficulty, **more):
    sizes = {"evaluation": 24, "calibration": 20} | more
    return prepare_problems("d", Problems(task=task, difficulty=difficulty), **sizes)


def words(task, split):
    return [task.decode(row.tokens.astype(np.int64)) for row in split.rows]


def test_where_the_task_has_splits_they_are_the_sides():
    domain = prepared(SWAPS, 6, training=20)
    splits = {side: {SWAPS.split(6, w) for w in words(SWAPS, getattr(domain, side))} for side in SIDES}
    assert splits == {"evaluation": {"test"}, "calibration": {"validation"}, "training": {"validation"}}
    assert (domain.task.sides, domain.task.trained) == ("splits", False)


@pytest.mark.parametrize(
    ("task", "difficulty", "trained"), [(SWAPS, 12, False), (SMALL, 3, True)], ids=["only tested", "few problems"]
)
def test_where_it_has_none_a_hash_of_the_canonical_form_decides(task, difficulty, trained):
    domain = prepared(task, difficulty, evaluation=60, calibration=60, training=60)
    assert (domain.task.sides, domain.task.trained) == ("halves", trained)
    limits = {"evaluation": (0.5, 1.0), "calibration": (0.25, 0.5), "training": (0.0, 0.25)}
    for side, (low, high) in limits.items():
        places = [unit(0, task.canonical(w).hex()) for w in words(task, getattr(domain, side))]
        assert len(places) > 10
        assert all(low <= place < high for place in places)


@pytest.mark.parametrize("difficulty", [6, 12])
def test_no_problem_nor_its_image_is_on_two_sides(difficulty):
    domain = prepared(SWAPS, difficulty, training=20)
    forms = [{SWAPS.canonical(w) for w in words(SWAPS, getattr(domain, side))} for side in SIDES]
    assert all(len(form) > 15 for form in forms)
    assert len(set().union(*forms)) == sum(map(len, forms))


def test_a_problem_occurs_once_and_repeats_are_counted():
    domain = prepared(SMALL, 3, evaluation=200, calibration=200)
    keys = [row.content_key for side in SIDES for row in getattr(domain, side).rows]
    assert len(keys) == len(set(keys)) == 216
    assert domain.read - domain.duplicates == 216
    assert domain.duplicates > 100


@pytest.mark.parametrize("difficulty", [6, 12])
def test_smaller_runs_are_subsets_and_another_seed_is_another_run(difficulty):
    large, few = prepared(SWAPS, difficulty), prepared(SWAPS, difficulty, evaluation=21, calibration=11)
    for side, number in (("evaluation", 21), ("calibration", 11)):
        rows, less = ([r.key for r in getattr(d, side).rows] for d in (large, few))
        assert less == rows[:number]
    other = prepared(SWAPS, difficulty, seed=1)
    assert [r.key for r in other.evaluation.rows] != [r.key for r in large.evaluation.rows]


def test_only_the_answer_is_scored_with_its_cells_side_by_side():
    domain = prepared(SWAPS, 6)
    assert domain.evaluation.targets.shape == (24, 5)
    for row, word, targets in zip(
        domain.evaluation.rows, words(SWAPS, domain.evaluation), domain.evaluation.targets, strict=True
    ):
        assert row.positions.tolist() == row.read.tolist() == [6]
        assert targets.tolist() == list(SWAPS.reference(word).answer)
        assert (row.labels[:6] == IGNORED).all()
        assert row.key == hashlib.sha256(row.tokens.astype("<i8").tobytes()).hexdigest()
    assert (domain.evaluation.counts == 1).all()
    assert domain.evaluation.tokens == 24


def test_an_answer_of_one_cell_at_several_positions_is_several_tokens():
    task = PrefixSum()
    difficulty = max(task.train_difficulties)
    domain = prepared(task, difficulty)
    assert domain.evaluation.targets.shape == (24 * int(domain.evaluation.counts[0]),)
    assert domain.evaluation.counts[0] > 1


def test_calibration_ends_with_a_whole_problem():
    domain = prepared(SWAPS, 6, calibration_tokens=12)
    assert len(domain.calibration.documents) == domain.calibration.tokens == 12


def test_a_model_of_puzzles_gets_an_id():
    assert prepared(SWAPS, 6).evaluation.rows[0].puzzle_id is None
    problems = Problems(task=SWAPS, difficulty=6)
    with_id = prepare_problems("d", problems, evaluation=20, calibration=10, puzzle_ids=False)
    assert {row.puzzle_id for row in with_id.evaluation.rows} == {0}


def test_a_difficulty_with_few_problems_is_refused():
    with pytest.raises(DataError) as error:
        prepared(SMALL, 1)
    assert str(error.value).startswith("domain d needs different problems: 20 evaluation, 10 calibration. Got ")
    assert str(error.value).endswith("state_tracking has few of difficulty 1. Give a larger --difficulty.")


def test_a_difficulty_that_the_task_does_not_have_is_refused():
    with pytest.raises(ValueError, match="difficulty must be at least 1 for state_tracking. Got 0."):
        Problems(task=SWAPS, difficulty=0)


def test_a_position_with_a_cell_that_is_not_scored_is_refused(monkeypatch):
    example = StateTracking.example

    def holed(self, problem):
        found = example(self, problem)
        found.labels[-1, 0] = IGNORED
        return found

    monkeypatch.setattr(StateTracking, "example", holed)
    with pytest.raises(ValueError, match="a position of state_tracking must answer with all of its cells"):
        prepared(SWAPS, 6)
