import json
import time

from looplab.studies.base import STUDIES
from looplab.studies.choice import ALL, Choice, Tasks, predicted_seconds


def arms(number=1):
    return STUDIES["par"]().arms("cpu", number)


def test_named_arms_and_arms_of_named_claims_are_chosen():
    study, all_arms = STUDIES["par"](), arms()
    assert {ALL.reason(study, arm) for arm in all_arms} == {""}
    two = Choice(arms=("main", "add"))
    assert [arm.name for arm in all_arms if not two.reason(study, arm)] == ["main", "add"]
    third = Choice(claims=("par.3",))
    assert {arm.name for arm in all_arms if not third.reason(study, arm)} == {"add", "add_no_anchor", "no_anchor"}
    assert third.reason(study, all_arms[0]) == "not measured (--claims)"
    both = Choice(arms=("main", "add"), claims=("par.3",))
    assert [arm.name for arm in all_arms if not both.reason(study, arm)] == ["add"]


def tasks(tmp_path, choice, seconds):
    return Tasks(arms(), [0, 1, 2], choice, tmp_path / "ledger.json", seconds)


def test_without_a_limit_every_arm_is_handed_out(tmp_path):
    found = tasks(tmp_path, ALL, None)
    assert [index for index, _ in found] == [0, 1, 2]
    assert (found.order, found.postponed) == ([0, 1, 2], [])


def test_no_arm_is_begun_that_would_end_too_late(tmp_path):
    """The first is short, the second too long, the third short again."""
    known = dict(zip(["main", "final_only", "no_anchor"], (10.0, 100.0, 10.0), strict=True))
    found = tasks(tmp_path, Choice(minutes=1.0), lambda arm: known[arm.name])
    assert [index for index, _ in found] == [0, 2]
    assert found.postponed == [1]


def test_time_that_is_spent_counts(tmp_path, monkeypatch):
    clock = iter([0.0, 0.0, 55.0, 55.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    found = tasks(tmp_path, Choice(minutes=1.0), lambda arm: 10.0)
    assert [index for index, _ in found] == [0]
    assert found.postponed == [1, 2]


def test_an_arm_takes_as_long_as_its_other_seeds(tmp_path):
    ledger = tmp_path / "ledger.json"
    facts = {"main-0": {"train_seconds": 8.0, "measure_seconds": 2.0}, "main-1": {"train_seconds": 12.0}, "x-0": {}}
    ledger.write_text(json.dumps({"arms": facts}))
    main, other = arms()[:2]
    assert predicted_seconds(ledger, main, None) == 11.0
    assert predicted_seconds(ledger, other, lambda arm: 5.0) == 5.0
    assert predicted_seconds(ledger, other, None) == 0.0
