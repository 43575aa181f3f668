"""P4: iterations that do nothing, on the real audit and on broken ones."""

import pytest

from looplab.audit.bootstrap import Losses
from looplab.audit.positive_controls.identity import Identity
from looplab.audit.schedules import FullPlan


def fails(outcome):
    return [line.endswith("<- fails") for line in outcome.found.splitlines()]


def test_p4_iterations_that_do_nothing_add_exactly_nothing():
    outcome = Identity().run(0)
    assert outcome.passed, outcome


@pytest.mark.parametrize(
    ("answer", "expected"), [(False, [True, False, True, False, False]), (True, [False, False, False, False, True])]
)
def test_p4_catches_bits_that_are_not_compared(monkeypatch, answer, expected):
    monkeypatch.setattr(Losses, "bitwise_equal", lambda *_: answer)
    assert fails(Identity().run(0)) == expected


def test_p4_catches_a_first_run_that_is_cut_too_long(monkeypatch):
    monkeypatch.setattr(FullPlan, "kmid", property(lambda self: 5))
    assert not Identity().run(0).passed
