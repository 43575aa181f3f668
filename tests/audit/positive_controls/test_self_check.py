"""The self-check as a whole."""

from looplab.audit.positive_controls import ControlOutcome, SelfCheck, run_self_check, self_check
from looplab.audit.positive_controls.count_only import CountOnly
from looplab.audit.positive_controls.identity import Identity

GOOD = ControlOutcome("P1", "one", True, "D = 0", "0", 0.1)
BAD = ControlOutcome("P2", "two", False, "D = 0", "1  <- fails", 0.1)


def test_it_passes_if_every_control_does_and_prints_who_failed():
    assert SelfCheck((GOOD,)).passed
    assert str(SelfCheck((GOOD,))).endswith("All controls passed.")
    broken = SelfCheck((GOOD, BAD))
    assert not broken.passed
    assert str(broken).endswith("Failed: P2. Trust no audit made here.")


def test_the_controls_are_p1_to_p7_with_p3b():
    assert [control.name for control in self_check.controls()] == ["P1", "P2", "P3", "P3b", "P4", "P5", "P6", "P7"]


def test_the_watcher_hears_of_every_control_as_it_ends(monkeypatch):
    monkeypatch.setattr(self_check, "controls", lambda write_report: (Identity(), CountOnly()))
    heard = []
    check = run_self_check(watcher=heard.append)
    assert tuple(heard) == check.outcomes
    assert [outcome.name for outcome in heard] == ["P4", "P6"]
    assert check.passed


def test_the_writer_reaches_the_control_that_searches_its_files(monkeypatch):
    written = []
    (control,) = [c for c in self_check.controls(lambda result, folder: written.append(folder)) if c.name == "P5"]
    assert control.run(0).passed
    assert len(written) == 2
