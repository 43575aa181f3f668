"""Beyond what tests/contract/test_tasks.py asks of every task."""

import numpy as np
import pytest
import torch

from looplab.tasks.base import IGNORED
from looplab.tasks.state_tracking import StateTracking, Word
from looplab.tasks.written_states import WrittenStates

TASK = WrittenStates(group="swap_s5", train_length=4)


def test_operations_come_first_and_then_every_state_but_the_last():
    word = Word((0, 4, 0))
    example = TASK.example(word)
    shown = [TASK.tokens[token] for token in example.tokens]
    assert shown == ["<bos>", "(01)", "(12)", "(01)", "=10234", "=12034"]
    answers = [None if label == IGNORED else TASK.symbols[label] for label in example.labels]
    assert answers == [None, None, None, "10234", "12034", "21034"]
    assert example.answer == slice(5, 6)


def test_every_position_that_answers_says_what_the_next_one_holds():
    tokens, labels = map(torch.from_numpy, TASK.batch(4, 0, range(6)))
    assert torch.equal(TASK.written(labels[:, 4:-1]), tokens[:, 5:])
    assert torch.equal(TASK.prompt(tokens), tokens[:, :5])


def test_problems_are_those_of_the_same_words_answered_by_number():
    words = StateTracking(group="swap_s5", classes=True, train_length=4)
    assert TASK.sample(4, 1, 2, "test") == words.sample(4, 1, 2, "test")
    assert TASK.chance(4) == words.chance(4)


def test_states_that_do_not_follow_are_refused():
    tokens = TASK.example(Word((0, 4, 0))).tokens.copy()
    tokens[-1] = tokens[-2]
    with pytest.raises(ValueError, match="tokens must be <bos>, operations, and all states but the last"):
        TASK.decode(tokens)


def test_an_unknown_group_is_refused():
    with pytest.raises(ValueError, match=r"StateTracking.group must be"):
        WrittenStates(group="q8")


def test_one_operation_needs_nothing_written():
    example = TASK.example(Word((3,)))
    assert len(example.tokens) == 2
    assert (example.labels != IGNORED).tolist() == [False, True]
    assert np.array_equal(example.tokens, [0, 4])
