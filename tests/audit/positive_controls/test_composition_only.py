"""P7: everything in the second block, on the real audit and on broken ones."""

import pytest

from looplab.audit import decompose
from looplab.audit.positive_controls.composition_only import CompositionOnly


def fails(outcome):
    return [line.endswith("<- fails") for line in outcome.found.splitlines()]


def test_p7_later_blocks_carry_everything_and_distinct_is_equivalent_to_zero():
    outcome = CompositionOnly().run(0)
    assert outcome.passed, outcome


@pytest.mark.parametrize(("answer", "expected"), [(False, [False, True, True]), (True, [False, False, True])])
def test_p7_catches_an_equivalence_test_that_does_not_look(monkeypatch, answer, expected):
    monkeypatch.setattr(decompose, "equivalent", lambda effect, margin: answer)
    assert fails(CompositionOnly().run(0)) == expected


def test_p7_catches_composition_and_distinct_changing_places(monkeypatch):
    split = decompose._decomposition

    def broken(losses, readout, terms, *rest):
        swapped = {**terms, "composition": terms["distinct"], "distinct": terms["composition"]}
        return split(losses, readout, swapped, *rest)

    monkeypatch.setattr(decompose, "_decomposition", broken)
    assert fails(CompositionOnly().run(0)) == [True, True, True]
