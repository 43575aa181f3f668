import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from looplab.tasks.base import to_torch, window_targets
from looplab.tasks.prefix_sum import Bits, PrefixSum


def test_parities_of_all_short_strings():
    task = PrefixSum(train=(6,))
    for bits in itertools.product((0, 1), repeat=6):
        trace = task.reference(Bits(bits))
        assert trace.values == tuple(sum(bits[:k]) % 2 for k in range(7))
        assert trace.answer == trace.values[1:]
        assert task.example(Bits(bits)).labels.tolist() == list(trace.values)


def test_strings_are_uniform_and_as_long_as_the_difficulty():
    task = PrefixSum()
    drawn = [task.sample(5, 0, index).bits for index in range(960)]
    counts = [drawn.count(bits) for bits in itertools.product((0, 1), repeat=5)]
    assert sum(counts) == 960
    assert stats.chisquare(counts).pvalue > 1e-4


def test_iteration_k_knows_the_last_k_bits():
    task = PrefixSum()
    tokens, labels = task.batch(7, 0, range(10))
    targets = window_targets(task, to_torch(tokens), 9)
    for row, place, k in itertools.product(range(10), range(8), range(10)):
        bits = tokens[row, 1 : place + 1] - 1
        assert targets[k][row, place] == bits[max(0, place - k) :].sum() % 2
    assert torch.equal(targets[7], to_torch(labels)) and torch.equal(targets[9], targets[7])


def test_the_check_needs_every_cell():
    task, problem = PrefixSum(), Bits((1, 0, 1))
    assert task.verify(problem, np.array([1, 1, 0]))
    assert not task.verify(problem, np.array([0, 0, 1]))  # all steps right but the first
    assert not task.verify(problem, np.array([1, 1, 2]))
    assert task.chance(3) == 1 / 8 and task.space(3) == 8


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match=r"PrefixSum.train must name at least one difficulty"):
        PrefixSum(train=())
    for tokens in ([0], [1, 1], [0, 3]):
        with pytest.raises(ValueError, match=r"prefix_sum: tokens must be <bos> and then bits"):
            PrefixSum().decode(np.array(tokens))
