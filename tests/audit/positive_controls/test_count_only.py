"""P6: an index without effect, on the real audit and on broken ones."""

import pytest

from looplab.audit import decompose, self_tests
from looplab.audit.positive_controls.count_only import CountOnly


def fails(outcome):
    return [line.endswith("<- fails") for line in outcome.found.splitlines()]


def test_p6_an_index_of_zeros_is_named_and_only_the_count_matters():
    outcome = CountOnly().run(0)
    assert outcome.passed, outcome


@pytest.mark.parametrize(
    ("apart", "expected"), [(1.0, [False, False, True, False]), (0.0, [False, False, False, True])]
)
def test_p6_catches_a_test_of_classes_that_does_not_look(monkeypatch, apart, expected):
    monkeypatch.setattr(self_tests, "_state_difference", lambda a, b: apart)
    assert fails(CountOnly().run(0)) == expected


def test_p6_catches_application_and_distinct_changing_places(monkeypatch):
    split = decompose._decomposition

    def broken(losses, readout, terms, *rest):
        swapped = {**terms, "application": terms["distinct"], "distinct": terms["application"]}
        return split(losses, readout, swapped, *rest)

    monkeypatch.setattr(decompose, "_decomposition", broken)
    assert fails(CountOnly().run(0)) == [True, True, False, False]
