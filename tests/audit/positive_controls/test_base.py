"""Claims become outcomes."""

import dataclasses

import pytest

from looplab.audit.positive_controls.base import Claim, Control


@dataclasses.dataclass(frozen=True)
class Made(Control):
    """A control with claims given by the test."""

    name, title = "P0", "made up"
    made: tuple[Claim, ...] = ()
    error: Exception | None = None

    def claims(self, seed):
        yield from self.made
        if self.error is not None:
            raise self.error


GOOD, BAD = Claim("D = 0", "0.0", True), Claim("C = 100 %", "3 %", False)


@pytest.mark.parametrize(("claims", "passed"), [((GOOD,), True), ((GOOD, BAD), False), ((BAD,), False)])
def test_a_control_passes_if_every_claim_holds(claims, passed):
    assert Made(claims).run(0).passed is passed


def test_expected_and_found_have_one_line_per_claim_and_the_failing_one_says_so():
    outcome = Made((GOOD, BAD)).run(0)
    assert outcome.expected.splitlines() == ["D = 0", "C = 100 %"]
    assert outcome.found.splitlines() == ["0.0", "3 %  <- fails"]


def test_an_audit_that_stops_fails_its_control_and_keeps_what_was_found_before():
    outcome = Made((GOOD,), ValueError("two\nlines")).run(0)
    assert not outcome.passed
    assert outcome.found.splitlines() == ["0.0", "ValueError: two lines  <- fails"]


def test_an_outcome_prints_its_verdict_and_every_claim():
    lines = str(Made((GOOD, BAD)).run(0)).splitlines()
    assert lines[0].startswith("P0  made up") and "FAILED" in lines[0]
    assert [line.split() for line in lines[1:]] == [["D", "=", "0", "0.0"], "C = 100 % 3 % <- fails".split()]
