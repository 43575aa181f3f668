import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from looplab.tasks.automaton import Automaton, Run
from looplab.tasks.base import to_torch, window_targets

PROMPT = Automaton(states=3, letters=2, table="prompt", train=(6,))


def walked(table, start, word):
    """By one-hot rows and transition matrices."""
    row = np.eye(len(table), dtype=int)[start]
    for letter in word:
        matrix = np.array([[int(table[i][letter] == j) for j in range(len(table))] for i in range(len(table))])
        row = row @ matrix
    return int(row.argmax())


@pytest.mark.parametrize("task", [Automaton(), Automaton(machine=3, states=4, letters=2), PROMPT])
def test_states_are_those_of_the_transition_matrices(task):
    for index in range(10):
        problem = task.sample(6, 0, index)
        trace, labels = task.reference(problem), task.example(problem).labels
        for place in range(7):
            assert trace.values[place] == walked(problem.table, problem.start, problem.word[:place])
        assert labels[-7:].tolist() == list(trace.values)
        assert set(labels[:-7].tolist()) <= {problem.start}


def test_the_fixed_automaton_is_one_for_all_and_another_for_another_number():
    task = Automaton()
    assert {task.sample(8, key, i).table for key in range(3) for i in range(5)} == {task.fixed}
    assert Automaton(machine=1).fixed != task.fixed
    assert task.sample(8, 0, 0).start == 0


def test_tables_starts_and_letters_are_uniform():
    drawn = [PROMPT.sample(6, 0, index) for index in range(300)]
    for values, size in (
        ([s for run in drawn for row in run.table for s in row], 3),
        ([run.start for run in drawn], 3),
        ([letter for run in drawn for letter in run.word], 2),
        ([PROMPT.reference(run).answer for run in drawn], 3),
    ):
        assert stats.chisquare(np.bincount(values, minlength=size)).pvalue > 1e-4
    assert {len(run.word) for run in drawn} == {6}


@pytest.mark.parametrize("machine", [0, 1, 2])
def test_chance_is_the_share_of_the_most_frequent_state(machine):
    task = Automaton(states=4, letters=2, machine=machine)
    for length in (1, 2, 5):
        ends = [walked(task.fixed, 0, word) for word in itertools.product(range(2), repeat=length)]
        assert task.chance(length) == pytest.approx(max(np.bincount(ends)) / 2**length)
    assert PROMPT.chance(5) == 1 / 3


def test_renaming_states_and_letters_does_not_change_the_canonical_form():
    random, distinct = np.random.default_rng(0), set()
    for index in range(60):
        run = PROMPT.sample(6, 0, index)
        states, letters = random.permutation(3).tolist(), random.permutation(2).tolist()
        table = [[0, 0] for _ in range(3)]
        for state, letter in itertools.product(range(3), range(2)):
            table[states[state]][letters[letter]] = states[run.table[state][letter]]
        renamed = Run(tuple(map(tuple, table)), states[run.start], tuple(letters[letter] for letter in run.word))
        assert PROMPT.canonical(renamed) == PROMPT.canonical(run)
        distinct.add(PROMPT.canonical(run))
    assert len(distinct) > 30


@pytest.mark.parametrize("task", [Automaton(), PROMPT])
def test_iteration_k_knows_the_last_k_letters(task):
    tokens, labels = task.batch(5, 0, range(8))
    head = tokens.shape[1] - 5
    targets = window_targets(task, to_torch(tokens), 7)
    for row, place, k in itertools.product(range(8), range(6), range(8)):
        run = task.decode(tokens[row])
        wanted = walked(run.table, run.start, run.word[max(0, place - k) : place])
        assert targets[k][row, head - 1 + place] == wanted
    assert torch.equal(targets[5], to_torch(labels)) and torch.equal(targets[7], targets[5])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"states": 1}, r"Automaton.states must be at least 2. Got 1"),
        ({"letters": 1}, r"Automaton.letters must be at least 2. Got 1"),
        ({"machine": 1, "table": "prompt"}, r"Automaton.machine must be .* 0 where the table is in the prompt. Got 1"),
        ({"train": ()}, r"Automaton.train must name at least one"),
    ],
)
def test_bad_options_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Automaton(**fields)


@pytest.mark.parametrize("tokens", [[0], [1, 6], [0, 5], [0, 9]])
def test_tokens_that_are_no_word_are_refused(tokens):
    with pytest.raises(ValueError, match=r"automaton: tokens must be <bos> and then letters"):
        Automaton().decode(np.array(tokens))
    with pytest.raises(ValueError, match=r"automaton: tokens must be 7 states and then letters"):
        PROMPT.decode(np.array(tokens))
