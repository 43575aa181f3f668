"""What every registered task promises. A new file in tasks/ is tested here by a line in GOLDEN.

Seen to fail: an item that depends on how many were drawn before it, a grader that ignores a cell, a canonical form that
holds the order of drawing, labels shifted by one place, targets that never reach the answer, a version left at 1 after
the generator changed.
"""

import functools
import hashlib

import numpy as np
import pytest
import torch

from looplab._config import from_dict, to_dict
from looplab.tasks.agreement import Agreement, agreement
from looplab.tasks.base import IGNORED, TASKS, Task, iteration_targets, to_torch

NAMES = [name for name in TASKS if not name.startswith("test_")]

GOLDEN = {
    "addition-1": "654351e8d59e",
    "automaton-1": "fd665d610db8",
    "blocks-1": "b51abbd75955",
    "capo-1": "ba5e29177557",
    "checkers-1": "a3d343e2ae5b",
    "hanoi-1": "37201e2dd4d8",
    "maze-1": "1e04bcc31559",
    "modular-1": "38d0cd7ef23f",
    "multi_hop-1": "a78372d5a32e",
    "p_hop-1": "c18e243a07a8",
    "pointer_chase-1": "bb2d4ea496b4",
    "pointer_stream-1": "76bac12912b9",
    "prefix_sum-1": "f9b8df367502",
    "reachability-1": "cff5faee1010",
    "river-1": "3d04fd07a521",
    "state_tracking-1": "b1f106931dad",
    "state_tracking_shorter-1": "e616f467133d",
    "sudoku-1": "a7d54feb6f5c",
    "written_states-1": "308b9390d7c0",
}
"""Name and version -> digest of tokens and labels of the first items. A change of either needs a new version."""


SMALLER = {"sudoku": {"size": 4}}
"""Options where a task of the usual size takes long."""


@functools.cache
def task_of(name):
    return TASKS[name](**SMALLER.get(name, {}))


@functools.cache
def problems_of(name, count=12):
    """Problems of the least trained difficulty."""
    task = task_of(name)
    return [task.sample(least(task), 3, index) for index in range(count)]


def least(task):
    return min(task.train_difficulties)


def difficulties(task):
    return sorted({*task.train_difficulties, *task.test_difficulties})


@pytest.mark.parametrize("name", NAMES)
def test_an_item_alone_has_the_bytes_it_has_in_a_batch(name):
    task = task_of(name)
    indices = [4, 0, 2**33, 7]
    tokens, labels = task.batch(least(task), 1, indices, "train")
    fresh = from_dict(Task, to_dict(task))
    for row in (3, 2, 0):
        example = fresh.example(fresh.sample(least(task), 1, indices[row], "train"))
        assert example.tokens.tobytes() == tokens[row].tobytes()
        assert example.labels.tobytes() == labels[row].tobytes()
    assert len({row.tobytes() for row in tokens}) > 1, "all items are the same"


@pytest.mark.parametrize("name", NAMES)
def test_tokens_state_the_problem_and_labels_are_symbols(name):
    task = task_of(name)
    for problem in problems_of(name):
        example = task.example(problem)
        assert example.tokens.shape == (task.length(least(task)),)
        assert example.labels.shape == (len(example.tokens), task.cells)[: example.labels.ndim]
        assert task.cells == 1 or example.labels.ndim == 2
        assert example.tokens.min() >= 0 and example.tokens.max() < len(task.tokens)
        scored = example.labels[example.labels != IGNORED]
        assert scored.min() >= 0 and scored.max() < len(task.symbols)
        assert (example.labels[example.answer] != IGNORED).any(), "the answer has no label"
        assert example.answer == task.example(problems_of(name)[0]).answer, "answers of one difficulty stand elsewhere"
        again = task.decode(example.tokens)
        assert (task.example(again).tokens == example.tokens).all()
        assert task.canonical(again) == task.canonical(problem)
        assert len(task.show(problem).splitlines()) > 1
    assert len(set(task.tokens)) == len(task.tokens)
    assert len(set(task.symbols)) == len(task.symbols)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_that_state_no_problem_are_refused(name):
    task = task_of(name)
    tokens = task.example(problems_of(name)[0]).tokens
    for broken in (tokens[:0], np.full_like(tokens, len(task.tokens))):
        with pytest.raises(ValueError, match="tokens must"):
            task.decode(broken)


@pytest.mark.parametrize("name", NAMES)
def test_no_canonical_problem_is_in_two_splits(name):
    task, seen = task_of(name), {}
    difficulty = max(task.train_difficulties)
    if not task.held_out(difficulty):
        assert {task.split(difficulty, task.sample(difficulty, 0, i)) for i in range(20)} == {"train"}
        return
    for key in range(2):
        for split in ("train", "validation", "test"):
            for index in range(6):
                problem = task.sample(difficulty, key, index, split)
                assert task.split(difficulty, problem) == split
                assert seen.setdefault(task.canonical(problem), split) == split
    assert set(seen.values()) == {"train", "validation", "test"}


@pytest.mark.parametrize("name", NAMES)
def test_reference_and_independent_check_agree(name):
    task = task_of(name)
    for difficulty in difficulties(task):
        judged(task, difficulty, 50 // len(difficulties(task)) + 1)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NAMES)
def test_reference_and_independent_check_agree_on_a_thousand_items_per_difficulty(name):
    for difficulty in difficulties(task_of(name)):
        judged(task_of(name), difficulty, 1000)


def judged(task, difficulty, n):
    found = agreement(task, difficulty, items=n, seed=5)
    wanted = Agreement(difficulty=difficulty, items=n, exact=n, verified=n, refused=n, agreed=n, alone=n)
    assert found == wanted


@pytest.mark.parametrize("name", NAMES)
def test_a_prediction_of_another_shape_is_refused(name):
    task, problem = task_of(name), problems_of(name)[0]
    with pytest.raises(ValueError, match=r"predicted must have the answer's shape"):
        task.grade(problem, np.zeros(10_007, np.int64))


@pytest.mark.parametrize("name", [name for name in NAMES if task_of(name).has_targets])
def test_targets_go_from_the_problem_to_the_answer(name):
    task, moved = task_of(name), False
    steps = task.num_steps(least(task))
    for problem in problems_of(name):
        example = task.example(problem)
        answer = example.labels[example.answer]
        for k in (0, 1, steps // 2, steps, steps + 1, 2 * steps):
            labels = task.trace_labels(problem, k)
            assert labels.shape == example.labels.shape and labels.dtype == np.int64
            scored = labels[labels != IGNORED]
            assert not scored.size or (scored.min() >= 0 and scored.max() < len(task.symbols))
            assert k < steps or (labels[example.answer] == answer).all(), f"no answer after {k} iterations"
            moved |= bool((labels[example.answer] != answer).any())
    assert moved, "every iteration has the same target"


@pytest.mark.parametrize("name", [name for name in NAMES if task_of(name).has_targets])
def test_targets_of_a_batch_are_those_of_its_problems(name):
    task = task_of(name)
    tokens = to_torch(np.stack([task.example(problem).tokens for problem in problems_of(name)[:3]]))
    for k, values in enumerate(iteration_targets(task, tokens, 3)):
        for row, problem in enumerate(problems_of(name)[:3]):
            assert torch.equal(values[row], to_torch(task.trace_labels(problem, k)))


@pytest.mark.parametrize("name", [name for name in NAMES if not task_of(name).has_targets])
def test_a_task_without_targets_says_so(name):
    task = task_of(name)
    assert task.trace_labels(problems_of(name)[0], 1) is None
    with pytest.raises(ValueError, match=f"iteration_targets: task '{name}' has none"):
        iteration_targets(task, to_torch(task.example(problems_of(name)[0]).tokens)[None], 1)


@pytest.mark.parametrize("name", NAMES)
def test_no_answer_comes_much_more_often_than_chance(name):
    task, count = task_of(name), 150
    difficulty = max(task.train_difficulties)
    answers = []
    for index in range(count):
        example = task.example(task.sample(difficulty, 9, index))
        answers.append(example.labels[example.answer].tobytes())
    chance = task.chance(difficulty)
    assert 0 < chance < 1
    often = max(answers.count(answer) for answer in set(answers)) / count
    assert often <= chance + 5 * (chance * (1 - chance) / count) ** 0.5 + 2 / count


@pytest.mark.parametrize("name", NAMES)
def test_a_task_survives_json(name):
    task = task_of(name)
    assert from_dict(Task, to_dict(task)) == task
    assert task.name == name
    assert set(task.train_difficulties) and set(task.test_difficulties)


@pytest.mark.parametrize("name", NAMES)
def test_a_difficulty_below_one_is_refused(name):
    with pytest.raises(ValueError, match="difficulty must be .* Got 0."):
        task_of(name).sample(0, 0, 0)


@pytest.mark.parametrize("name", NAMES)
def test_the_first_items_of_a_version_never_change(name):
    task, digest = task_of(name), hashlib.blake2b(digest_size=6)
    for difficulty in (least(task), max(task.test_difficulties)):
        for index in range(3):
            example = task.example(task.sample(difficulty, 0, index))
            digest.update(example.tokens.tobytes() + example.labels.tobytes())
    assert GOLDEN.get(f"{name}-{task.version}") == digest.hexdigest(), "raise the version, and add its line to GOLDEN"
