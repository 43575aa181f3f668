"""Findings are grouped by kind and carry their number, threshold and remedy."""

import dataclasses

from looplab.audit.documents import prepare
from looplab.audit.findings import byte_tokens, domain_findings, grouped, not_identifiable, task_findings
from looplab.audit.problems import Problems, prepare_problems
from looplab.audit.result import Part
from looplab.audit.schedules import default_schedules, full_plan, schedule_map
from looplab.records import Finding, Level
from looplab.tasks.state_tracking import StateTracking
from tiny import LetterTokenizer, Mixing, letters

DOMAIN = prepare("text", letters(70), LetterTokenizer())


def finding(schedule, message="odd"):
    return Finding(
        kind="audit.odd", level=Level.WARNING, message=message, where={"domain": "text", "schedule": schedule}
    )


def test_several_schedules_become_one_finding():
    (one,) = grouped([finding("full"), finding("prefix(1)")])
    assert one.message == "odd Schedules: full, prefix(1)."
    assert one.where == {"domain": "text", "schedules": "full, prefix(1)"}


def test_a_message_that_names_its_schedule_names_the_others_behind():
    (one,) = grouped([finding("full", "full is odd."), finding("prefix(1)", "prefix(1) is odd.")])
    assert one.message == "full is odd. The same for prefix(1)."


def test_a_single_schedule_is_named():
    assert grouped([finding("full")])[0].message == "odd Schedule: full."
    assert grouped([finding("full", "full is odd.")])[0].message == "full is odd."


def test_few_documents_are_a_warning_on_either_side():
    found = domain_findings(DOMAIN, {}, {}, [])
    assert [(f.kind, f.where["split"], f.value) for f in found] == [
        ("audit.few_documents", "evaluation", len(DOMAIN.evaluation.documents)),
        ("audit.few_documents", "calibration", len(DOMAIN.calibration.documents)),
    ]


def test_overlap_above_five_percent_is_a_warning():
    below = domain_findings(dataclasses.replace(DOMAIN, overlap=0.05), {}, {}, [])
    above = domain_findings(dataclasses.replace(DOMAIN, overlap=0.051), {}, {}, [])
    assert "audit.split_overlap" not in [f.kind for f in below]
    assert [f.value for f in above if f.kind == "audit.split_overlap"] == [0.051]


def test_a_diverged_schedule_is_named_with_its_application():
    (one,) = [f for f in domain_findings(DOMAIN, {}, {"repeat(3)": 5}, []) if f.kind == "audit.diverged"]
    assert one.message.startswith("repeat(3) on text diverged at application 5")


def test_a_value_that_is_not_finite_is_left_out():
    odd = dataclasses.replace(finding("full"), value=float("nan"))
    (one,) = [f for f in domain_findings(DOMAIN, {}, {}, [odd]) if f.kind == "audit.odd"]
    assert one.value is None


def test_what_cannot_be_told_apart_is_grouped_by_reason():
    full = full_plan(Mixing(indexed=False).spec)
    rows = schedule_map(full, default_schedules(full))
    part = Part(
        name="distinct", plus="", minus="", nats=None, share=None, seed_deviation=None, equivalent=None,
        bitwise_equal=False, word="", reason="not identifiable: the block has no iteration index",
    )  # fmt: skip
    found = not_identifiable(rows, [part])
    assert [f.level for f in found] == [Level.UNIDENTIFIED] * len(found)
    by_reason = {f.where["reason"]: f.message for f in found}
    assert by_reason["the block has no iteration index"].startswith("distinct, repeat(2), repeat(3)")


def test_reading_bytes_is_a_warning():
    assert byte_tokens().level is Level.WARNING


def problems(difficulty):
    task = StateTracking(group="s3", train_length=3)
    return prepare_problems("d", Problems(task=task, difficulty=difficulty), evaluation=20, calibration=10)


def test_problems_that_are_all_for_training_are_a_warning():
    full = full_plan(Mixing(blocks=1, steps=6).spec)
    (found,) = task_findings(problems(3), full)
    assert (found.kind, found.level) == ("audit.trained_problems", Level.WARNING)
    assert task_findings(problems(6), full) == []
    assert task_findings(DOMAIN, full) == []


def test_problems_that_take_more_iterations_than_full_has_are_named():
    (found,) = task_findings(problems(7), full_plan(Mixing(blocks=1, steps=6).spec))
    assert (found.kind, found.value, found.threshold) == ("audit.few_iterations", 6, 7)
    assert found.remedy.endswith("pass --num-steps 7.")


def test_few_problems_are_told_to_ask_for_more():
    few = domain_findings(problems(6), {}, {}, [])
    assert {f.remedy for f in few} == {"Raise --documents and --calibration-documents."}
