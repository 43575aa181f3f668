"""A result is data: found by name, printed, and exact through JSON."""

import dataclasses
import json

import pytest

from looplab.audit.config import AuditConfig
from looplab.audit.result import (
    Answers,
    AnswerScore,
    AuditCounts,
    AuditResult,
    Decomposition,
    DocumentCounts,
    DomainResult,
    Estimate,
    ModelCard,
    Part,
    ProbeLoss,
    ScheduleResult,
    TaskFacts,
    Verdict,
    nats,
    percent,
    to_plain,
)
from looplab.records import Finding, Level
from report.depth_sample import valued
from report.sample import dense, two_blocks

COUNTS = dict.fromkeys(
    ("read", "duplicates", "empty", "unscored", "evaluation", "calibration", "evaluation_tokens", "calibration_tokens",
     "evaluation_bytes", "affine_tokens", "longest", "cut"), 3,
)  # fmt: skip


def estimate(value):
    return Estimate(
        value=value, low=value - 0.1, high=value + 0.1, low90=value, high90=value, plain_low=value, plain_high=value
    )


def part(name, **more):
    usual = {
        "nats": estimate(0.5), "share": estimate(0.4), "seed_deviation": None, "equivalent": False,
        "bitwise_equal": False, "word": "substantial", "reason": None,
    }  # fmt: skip
    return Part(name=name, plus="prefix(1)", minus="full", **{**usual, **more})


def result(**more):
    card = ModelCard(
        name="tiny", source="tiny", architecture="tiny", version="1", parameters={"total": 3}, dense=False, blocks=(),
        default_steps="4", trained_depth="fixed", trained_units=(4, 4), applications=4, unit_applications=1, units=4,
        kmid=4, index_parts=(), kv_rule="", noise_width=0, vocabulary=8, max_positions=None, dtype="float32",
        weight_hash="0", tokenizer="letters",
    )  # fmt: skip
    zero = part("distinct", nats=estimate(0.0), bitwise_equal=True)
    hidden = part("composition", nats=None, share=None, word="not identifiable (only one kind of unit)", reason="x")
    decomposition = Decomposition(
        probe="raw", gap=estimate(1.25), gap_measurable=True, margin=0.02, parts=(part("application"), zero, hidden)
    )
    loss = ProbeLoss(probe="raw", loss=estimate(2.0), per_byte=1.0, seeds=(2.0,))
    schedule = ScheduleResult(
        name="full", k=None, diverged_at=None, losses=(loss,), temperature=None, affine=None, metrics=()
    )
    domain = DomainResult(
        name="text",
        documents=DocumentCounts(source="a", data_hash="b", overlap=0.1, padding=1 / 3, **COUNTS),
        schedules=(schedule,),
        contrasts=(),
        decompositions=(decomposition,),
        gains=(),
        gaps_per_byte={"prefix(1)": estimate(0.1)},
        control=None,
        verdict=Verdict(
            sentence="On text, all is well.", words={}, best_probe=None, probe_words={}, recurrence="not measured"
        ),
    )
    counts = AuditCounts(
        minimal_applications=4, naive_applications=4, readouts=1, live_states=1, documents=1, seeds=1, applications=4,
        phases=(),
    )  # fmt: skip
    usual = {
        "model": card, "config": AuditConfig(grid=(1, 2)), "config_hash": "c", "schedule_map": (), "domains": (domain,),
        "agreements": (), "self_tests": (), "counts": counts, "versions": {"torch": "2"}, "command": "x",
        "findings": (Finding(kind="audit.odd", level=Level.WARNING, message="odd.", where={"domain": "text", "n": 3}),),
    }  # fmt: skip
    return AuditResult(**{**usual, **more})


def test_json_is_exact_and_deterministic(tmp_path):
    made = result()
    path = made.save(tmp_path / "new")
    assert AuditResult.load(tmp_path / "new") == made
    assert path.read_text() == made.to_json() == AuditResult.from_json(made.to_json()).to_json()
    assert to_plain(made) == json.loads(made.to_json())


def test_another_schema_is_refused():
    data = json.loads(result().to_json())
    with pytest.raises(ValueError, match=r"results.json must have schema 2. Got 3. Audit again"):
        AuditResult.from_json(json.dumps({**data, "schema": 3}))


def test_parts_are_found_by_name():
    made = result()
    assert made.domain("text").decomposition("raw").part("application").share.value == 0.4
    assert made.decomposition is made.domains[0].decompositions[0]
    assert made.domains[0].schedule("full").loss().loss.value == 2.0
    with pytest.raises(KeyError, match="no name 'suffix"):
        made.domains[0].schedule("suffix(1)")
    assert made.probes == ("raw", "temperature", "affine")


def test_it_prints_the_sentence_the_table_and_what_warns():
    text = str(result())
    assert "On text, all is well." in text
    assert "[warning] audit.odd: odd." in text
    assert text.endswith("Intervals cover documents, not training runs.")
    rows = {line.split()[0]: line for line in result().table().splitlines() if line.startswith("  ")}
    assert "0.500 [0.400, 0.600]" in rows["application"]
    assert "40.0 % [30.0, 50.0]" in rows["application"]
    assert "0 (bitwise equal)" in rows["distinct"]
    assert "not identifiable (only one kind of unit)" in rows["composition"]
    assert "0.0" not in rows["composition"]


def test_the_worst_level_is_a_warning_or_a_failure():
    made = result()
    assert made.worst() is Level.WARNING
    failure = dataclasses.replace(made.findings[0], level=Level.FAILURE)
    assert result(findings=(made.findings[0], failure)).worst() is Level.FAILURE
    assert result(findings=(dataclasses.replace(failure, level=Level.UNIDENTIFIED),)).worst() is None


def test_numbers_that_are_not_there_are_dashes():
    assert nats(None) == percent(None) == "-"


def test_a_dense_result_prints_what_every_refit_gains_at_every_depth():
    lines = [" ".join(line.split()) for line in dense().table().splitlines()]
    gains = [line for line in lines if line.startswith("net gain at prefix(")]
    assert len(gains) == 10
    assert gains[0] == "net gain at prefix(1) temperature 0.173 [0.158, 0.188] 16.5 % [15.1, 17.9] present"


def test_the_value_of_depth_is_printed_below_the_verdict():
    result = valued(two_blocks())
    lines = str(result).splitlines()
    assert lines[1:3] == [result.domains[0].verdict.sentence, result.domains[0].depth_value.sentence]


def test_an_audit_of_texts_says_nothing_of_answers():
    plain = result()
    assert plain.domains[0].answers is None
    assert "answers" not in json.loads(plain.to_json())["domains"][0]
    assert AuditResult.from_json(plain.to_json()) == plain


def test_answers_come_back_from_json_and_are_printed_beside_chance():
    task = TaskFacts(
        name="sums", version=2, options={"kind": "Sums", "size": 3}, difficulty=4, chance=0.25, cells=1, num_steps=4,
        sides="halves", trained=False,
    )  # fmt: skip
    scores = tuple(
        AnswerScore(schedule=name, probe="raw", exact=estimate(0.5), wilson=wilson, cells=0.75)
        for name, wilson in (("full", (0.41, 0.59)), ("prefix(1)", None), ("suffix(1)", None))
    )
    made = result()
    made = dataclasses.replace(
        made, domains=(dataclasses.replace(made.domains[0], answers=Answers(task=task, scores=scores)),)
    )
    assert AuditResult.from_json(made.to_json()) == made
    assert made.domains[0].answers.score("prefix(1)") == scores[1]
    with pytest.raises(KeyError):
        made.domains[0].answers.score("full", "affine")
    lines = [line.split() for line in made.table().splitlines()]
    assert ["full", "raw", "50.0", "%", "[40.0,", "60.0]", "[41.0,", "59.0]"] in lines
    assert ["prefix(1)", "raw", "50.0", "%", "[40.0,", "60.0]", "-"] in lines
    assert next(line for line in lines if line[:2] == ["exact", "match"])[-2:] == ["25", "%"]
    assert not [line for line in lines if line[:1] == ["suffix(1)"]]
