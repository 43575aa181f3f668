"""Products of swaps, against counting them."""

import math
from itertools import combinations

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from looplab.audit.positive_controls.letters import Letters
from looplab.audit.positive_controls.swaps import (
    ELEMENTS,
    SIZE,
    calibrated_loss,
    products,
    return_probability,
    swap_documents,
)


def compose(after, first):
    return tuple(after[first[x]] for x in range(5))


def swapped(a, b):
    things = list(range(5))
    things[a], things[b] = things[b], things[a]
    return tuple(things)


def counted(swaps):
    """Share of all 10^n products that are the identity, by carrying the count of every element along."""
    ways = {tuple(range(5)): 1}
    for _ in range(swaps):
        longer = {}
        for element, count in ways.items():
            for a, b in combinations(range(5), 2):
                product = compose(element, swapped(a, b))
                longer[product] = longer.get(product, 0) + count
        ways = longer
    return ways.get(tuple(range(5)), 0) / 10**swaps


@pytest.mark.parametrize("swaps", range(9))
def test_the_character_sum_is_the_count_of_products_that_return(swaps):
    assert return_probability(swaps) == pytest.approx(counted(swaps), abs=1e-15)


def test_eight_swaps_return_as_the_literature_of_this_audit_says():
    assert 120 * return_probability(8) == pytest.approx(2.125128, abs=1e-12)
    assert return_probability(7) == 0


def test_the_table_holds_products_and_its_first_element_does_nothing():
    table = products()
    assert (table[0] == np.arange(SIZE)).all() and (table[:, 0] == np.arange(SIZE)).all()
    for g, h in [(3, 50), (119, 7), (64, 64)]:
        assert ELEMENTS[table[g, h]] == compose(ELEMENTS[g], ELEMENTS[h])


@pytest.mark.parametrize("right", [0.0, 1 / 240, 2.125128 / 120, 0.3, 0.99])
def test_the_calibrated_loss_is_the_least_over_temperatures(right):
    def loss(beta):
        return math.log(math.exp(8 * beta) + 119) - 8 * beta * right

    least = minimize_scalar(loss, bounds=(0, 20), method="bounded", options={"xatol": 1e-10}).fun
    assert calibrated_loss(right) == pytest.approx(least, abs=1e-8)
    assert calibrated_loss(1.0) == 0


def test_a_document_is_eight_swaps_a_blank_and_their_product():
    for document in swap_documents(0, count=50, swaps=8).documents:
        *swaps, _ = Letters(SIZE).encode(document.prompt)
        (answer,) = Letters(SIZE).encode(document.text)
        state = tuple(range(5))
        for swap in swaps:
            assert sum(ELEMENTS[swap][x] != x for x in range(5)) == 2
            state = compose(state, ELEMENTS[swap])
        assert ELEMENTS[answer] == state
        assert len(swaps) == 8


def test_equal_swaps_are_equal_and_their_documents_differ():
    documents = swap_documents(0, count=100, swaps=8, same=True).documents
    for document in documents:
        assert len(set(document.prompt[:8])) == 1
        assert Letters(SIZE).encode(document.text) == [0]
    assert len({document.content_key for document in documents}) > 90
