import itertools

import numpy as np
import pytest
from scipy.stats import chisquare

from looplab.data.order import permuted

GOLDEN = [7, 8, 1, 5, 2, 4, 9, 6, 3, 0]
"""Recorded from this implementation (NumPy 2.4.6); resuming an old checkpoint depends on it."""


@pytest.mark.parametrize("size", [*range(1, 40), 63, 64, 65, 1000, 4097])
def test_every_epoch_visits_every_document_once(size):
    for epoch in range(3):
        assert sorted(permuted(np.arange(size), size, seed=5, epoch=epoch)) == list(range(size))


def test_any_single_place_can_be_asked_for():
    whole = permuted(np.arange(1000), 1000, seed=1, epoch=2)
    for place in (0, 17, 999):
        assert permuted(np.array([place]), 1000, seed=1, epoch=2) == [whole[place]]


def test_seeds_and_epochs_have_orders_of_their_own():
    orders = [permuted(np.arange(50), 50, seed=s, epoch=e).tolist() for s in (0, 1, 2**64 - 1) for e in (0, 1)]
    assert all(a != b for a, b in itertools.combinations(orders, 2))


@pytest.mark.parametrize("size", [3, 7, 16, 33])
def test_places_and_neighbours_are_uniform_over_epochs(size):
    orders = np.stack([permuted(np.arange(size), size, seed=3, epoch=e) for e in range(1500)])
    for place in (0, size // 2, size - 1):
        assert chisquare(np.bincount(orders[:, place], minlength=size)).pvalue > 1e-4
    steps = (orders[:, 1] - orders[:, 0]) % size
    assert chisquare(np.bincount(steps, minlength=size)[1:]).pvalue > 1e-4


def test_the_order_is_the_same_on_every_machine():
    assert permuted(np.arange(10), 10, seed=0, epoch=0).tolist() == GOLDEN
