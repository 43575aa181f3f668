import dataclasses

import pytest

from looplab.records import StudyArm
from looplab.studies.base import EQUAL, FACTS, STUDIES
from looplab.studies.matching import StudyError, check_declared, matches


def arm(name, seed, **facts):
    known = {FACTS[key]: "1" for key in EQUAL} | facts
    return StudyArm(name=name, title="", seed=seed, audit="", sentence="", facts=known)


def test_arms_share_what_is_equal_within_each_seed():
    same = matches([arm("A", 0, init="1"), arm("B", 0, init="1"), arm("A", 1, init="2"), arm("B", 1, init="2")])
    assert [(match.name, match.equal) for match in same] == [(name, True) for name in EQUAL]
    other = {match.name: match.equal for match in matches([arm("A", 0, init="1"), arm("B", 0, init="2")])}
    assert other == {"init": False, "data_order": True, "steps": True, "tokens": True, "parameters": True}
    assert matches([arm("text-core", None)]) == ()


@pytest.mark.parametrize(
    ("name", "fact", "near", "far"),
    [
        ("train_flops", "training FLOPs", ("1.000e+12", "1.019e+12"), ("1.000e+12", "1.03e+12")),
        ("parameters", "parameters", ("100,000", "100,900"), ("100,000", "101,100")),
        ("steps", "steps", ("100", "100"), ("100", "101")),
    ],
)
def test_flops_and_parameters_have_a_tolerance_and_counts_have_none(name, fact, near, far):
    for values, equal in ((near, True), (far, False)):
        arms = [arm(label, 0, **{fact: value}) for label, value in zip("AB", values, strict=True)]
        (found,) = matches(arms, (name,))
        assert found.equal is equal


def test_a_run_that_diverged_need_not_match():
    assert all(match.equal for match in matches([arm("A", 0), arm("B", 0, init="2", diverged="step 3")]))


def test_arms_that_differ_in_more_than_is_declared_are_refused(monkeypatch):
    study = STUDIES["par"]()
    one, two = study.arms("smoke", 1)[:2]
    check_declared(study, (one, two))
    monkeypatch.setattr(type(study), "varies", ("objective", "gradient", "data", "model", "evaluation"))
    check_declared(study, (one, two))
    rate = dataclasses.replace(two.source.optimizer, lr=0.5)
    other = dataclasses.replace(two, source=dataclasses.replace(two.source, optimizer=rate))
    with pytest.raises(StudyError, match=r"par: arms main and final_only differ in optimizer \(.*, not declared"):
        check_declared(study, (one, other))
    later = dataclasses.replace(other, source=dataclasses.replace(other.source, seed=1))
    check_declared(study, (one, later))
