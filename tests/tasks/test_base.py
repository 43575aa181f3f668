import hashlib
from dataclasses import dataclass

import numpy as np
import pytest
from scipy import stats

from looplab.tasks.base import IGNORED, SMALL_SPACE, TASKS, Draws, Example, Task, Trace


@dataclass(frozen=True, kw_only=True)
class Digits(Task):
    """Is the sum of some digits even? For tests of what all tasks share."""

    base: int = 10

    tokens = tuple("0123456789=")
    symbols = ("odd", "even")
    train_difficulties = (2, 4)
    test_difficulties = (2, 4, 8)

    def draw(self, difficulty, draws):
        return tuple(int(d) for d in draws.integers(self.base, difficulty))

    def canonical(self, problem):
        return bytes(sorted(problem))

    def example(self, problem):
        tokens = np.array([*problem, 10])
        labels = np.full(len(tokens), IGNORED)
        labels[-1] = self.reference(problem).answer
        return Example(tokens=tokens, labels=labels, answer=slice(len(tokens) - 1, len(tokens)))

    def decode(self, tokens):
        return tuple(int(t) for t in tokens[:-1])

    def reference(self, problem):
        values = tuple(sum(problem[:k]) % 2 for k in range(len(problem) + 1))
        return Trace(values, 1 - values[-1])

    def chance(self, difficulty):
        return 0.5

    def space(self, difficulty):
        return float(self.base**difficulty)


TASKS.register("test_digits")(Digits)


def test_an_item_is_the_same_alone_and_in_a_batch():
    task = Digits()
    tokens, labels = task.batch(4, 7, range(20), "train")
    for index in (19, 3, 17):
        example = task.example(task.sample(4, 7, index, "train"))
        assert (tokens[index] == example.tokens).all()
        assert (labels[index] == example.labels).all()


def test_key_difficulty_and_options_change_the_problems():
    def first(task, difficulty, key):
        return [task.sample(difficulty, key, i)[:4] for i in range(30)]

    same = first(Digits(), 4, 0)
    assert same == first(Digits(), 4, 0)
    assert same != first(Digits(), 4, 1)
    assert same != first(Digits(), 8, 0)
    assert same != first(Digits(base=9), 4, 0)


def test_no_canonical_problem_is_in_two_splits():
    task = Digits()
    seen = {}
    for split in ("train", "validation", "test"):
        for index in range(400):
            problem = task.sample(4, index, 0, split)
            assert seen.setdefault(task.canonical(problem), split) == split


def test_of_problems_drawn_at_random_four_fifths_are_for_training():
    task = Digits()
    drawn = [task.split(4, task.sample(4, 5, index)) for index in range(500)]
    shares = [drawn.count(split) / 500 for split in ("train", "validation", "test")]
    assert shares == pytest.approx([0.8, 0.1, 0.1], abs=0.06)


def test_the_split_is_the_hash_of_version_and_canonical_form():
    task, problem = Digits(), (3, 1, 4, 1)
    digest = hashlib.blake2b(b"1|" + bytes([1, 1, 3, 4]), digest_size=8).digest()
    part = int.from_bytes(digest, "little") % 100
    assert task.split(4, problem) == ("train" if part < 80 else "validation" if part < 90 else "test")


def test_a_small_space_is_all_for_training_and_an_untrained_difficulty_all_for_testing():
    task = Digits()
    assert task.space(2) < SMALL_SPACE
    assert {task.split(2, task.sample(2, 0, i)) for i in range(100)} == {"train"}
    assert {task.split(8, task.sample(8, 0, i)) for i in range(100)} == {"test"}


def test_asking_for_a_split_that_has_no_problem_is_an_error(monkeypatch):
    monkeypatch.setattr("looplab.tasks.base.ATTEMPTS", 50)
    with pytest.raises(ValueError, match="test_digits has no test problem of difficulty 2 in 50 draws. Take another"):
        Digits().sample(2, 0, 0, "test")


def test_a_difficulty_below_one_is_refused():
    with pytest.raises(ValueError, match="difficulty must be at least 1 for test_digits. Got 0."):
        Digits().sample(0, 0, 0)


def test_a_right_answer_is_exact_and_a_changed_cell_is_not():
    task, problem = Digits(), (3, 1, 4, 1)
    right = task.example(problem).labels[-1:]
    assert task.grade(problem, right).exact
    wrong = task.grade(problem, 1 - right)
    assert (wrong.exact, wrong.cells_right, wrong.cells_total) == (False, 0, 1)
    with pytest.raises(ValueError, match=r"predicted must have the answer's shape \(1,\). Got \(2,\)."):
        task.grade(problem, np.zeros(2, np.int64))


def test_draws_are_uniform_and_a_function_of_key_item_and_attempt():
    counts = np.bincount(np.concatenate([Draws(5, item).integers(7, 70) for item in range(200)]), minlength=7)
    assert stats.chisquare(counts).pvalue > 1e-4
    first = Draws(5, 3).integers(1000, 20)
    assert (Draws(5, 3).integers(1000, 20) == first).all()
    assert (Draws(6, 3).integers(1000, 20) != first).any()
    assert (Draws(5, 3 + 2**40).integers(1000, 20) != first).any()
    assert (Draws(5, 3, 1).integers(1000, 20) != first).any()
    one = Draws(5, 3)
    assert [one.integer(1000) for _ in range(20)] == first.tolist()  # a draw does not depend on how many are asked for


def test_permutations_are_uniform_and_samples_differ():
    orders = [tuple(Draws(1, item).permutation(4)) for item in range(1200)]
    counts = [orders.count(order) for order in sorted(set(orders))]
    assert len(counts) == 24 and stats.chisquare(counts).pvalue > 1e-4
    drawn = Draws(1, 0).sample("abcdef", 4)
    assert len(set(drawn)) == 4
    assert {Draws(1, i).between(3, 5) for i in range(60)} == {3, 4, 5}
    assert sum(Draws(1, i).chance(0.25) for i in range(800)) / 800 == pytest.approx(0.25, abs=0.05)
    with pytest.raises(ValueError, match="high must be from 1"):
        Draws(1, 0).integers(0, 3)
