"""The study from planted rows, and one small run of it."""

import json

import pytest

from looplab.records import StudyResult, StudyRow
from looplab.studies.base import STUDIES
from looplab.studies.claims import decide_claims
from looplab.studies.par import DECIDING, DISTINCT, FACTORS, change, em
from looplab.studies.run import run_study
from looplab.tasks.state_tracking import StateTracking

STUDY = STUDIES["par"]()
EXPECTED = {
    "main": 1.0, "no_anchor": 1.0, "add": 1.0, "add_no_anchor": 0.0, "final_only": 0.02, "add_final_only": 0.01,
    "every_iteration": 0.1, "halting": 1.0, "final_lengths": 0.02, "distillation": 0.99, "written": 0.02,
    "indexed": 1.0, "no_replay": 0.9, "no_noise": 0.9,
}  # fmt: skip


def rows(**changed):
    """Three seeds: every exact match of an arm is its number, +-0.005; no change with more iterations."""
    made = []
    for seed in range(3):
        for arm, value in {**EXPECTED, **changed}.items():
            found = {em(f, d): value for f in (*FACTORS, 32, 64) for d in (1.0, 1.25)}
            found |= {change(f, 2.0): 0.0 for f in FACTORS} | {"on time at 4x": value, DISTINCT: value}
            if arm == "written":
                found[em(1)] = 1.0
            for quantity, x in found.items():
                low, high = x - 0.005, x + 0.005
                made.append(
                    StudyRow(
                        arm=arm, seed=seed, quantity=quantity, unit="exact match", value=x,
                        low=low, high=high, low90=low, high90=high,
                    )
                )  # fmt: skip
    return made


def words(made):
    return {result.claim.id: result.word for result in decide_claims(STUDY.claims, made, scale="cpu")}


def test_what_our_trials_found():
    found = words(rows())
    assert found.pop("par.8a") == "not supported", "the anchor is not needed with concat injection"
    assert set(found.values()) == {"supported"}
    assert list(found) == [f"par.{n}" for n in (1, 2, 3, 4, 5, 6, 7, "8b", 9, 10, 12)]


def test_a_margin_of_two_tenths_is_asked_for():
    assert words(rows(add_no_anchor=0.85, add_final_only=0.85))["par.8b"] == "not supported"
    assert words(rows(add_no_anchor=0.75, add_final_only=0.75))["par.8b"] == "supported"


def test_missed_predictions_are_results():
    missed = {arm: 0.5 for arm in EXPECTED}
    found = words(rows(**missed))
    assert {found[f"par.{n}"] for n in (1, 2, 3, 5, 6, 7, 9, 12)} == {"not supported"}


def test_every_arm_of_a_claim_is_run_by_default():
    for scale, seeds in (("cpu", 3),):
        arms = STUDY.arms(scale, seeds)
        assert {a for claim in STUDY.claims for part in claim.parts for a in part.arms} <= {arm.name for arm in arms}
        assert [(arm.name, arm.seed) for arm in arms[: len(DECIDING)]] == [(name, 0) for name in DECIDING]


def test_full_adds_the_other_arms_and_seeds_of_the_recipe():
    arms = STUDY.arms("cpu", 3) + STUDY.further("cpu", 3)
    folders = [arm.folder for arm in arms]
    assert len(set(folders)) == len(folders)
    assert {"main-3", "main-4", "rope-2", "z60-0", "soft_anchor-1", "layout_answer-2"} <= set(folders)


def test_all_arms_of_a_group_answer_the_same_words():
    for arm in STUDY.arms("cpu", 1):
        if arm.name != "written":
            assert arm.grid.task == StateTracking(group="swap_s5"), arm.name


def test_quantities_of_the_claims_are_measured():
    asked = {(arm, part.quantity) for claim in STUDY.claims for part in claim.parts for arm in part.arms}
    arms = {arm.name: arm for arm in STUDY.arms("cpu", 1)}
    for name, quantity in asked:
        given = {em(line.length // 8, d) for line in arms[name].grid.lines for d in line.depths}
        given |= {change(line.length // 8, d) for line in arms[name].grid.lines for d in line.depths if d > 1}
        given |= {f"on time at {line.length // 8}x" for line in arms[name].grid.halting}
        assert quantity in given | ({DISTINCT} if arms[name].audit else set()), (name, quantity)


@pytest.mark.slow
def test_a_smoke_run_makes_the_page_and_a_second_one_repeats_nothing(tmp_path, monkeypatch):
    kept = [arm for arm in STUDY.arms("smoke", 1) if arm.name != "indexed"]
    monkeypatch.setattr(type(STUDY), "arms", lambda self, scale, seeds: tuple(kept))
    lines = []
    result = run_study(STUDY, "smoke", 1, tmp_path, say=lines.append)
    folder = tmp_path / "par/smoke"
    assert StudyResult.from_json((folder / "results.json").read_text()) == result
    without = {claim.claim.id for claim in result.claims if claim.word == "-"}
    assert without == {"par.3", "par.8a"}, "they rest on an arm of --full"
    assert {claim.word for claim in result.claims} == {"not identifiable at this scale", "-"}
    names = {path.stem for path in (folder / "figures").iterdir()}
    assert names == {"F1-length", "F2-rms", "F3-margin", "F4-halting"}
    assert "Exact match against length" in (folder / "report.html").read_text()
    assert result.row("main", 0, "rms at k = 8").value == pytest.approx(1.0, abs=1e-3)
    assert result.row("halting", 0, "halting error at 2x") is not None
    ledger = json.loads((folder / "ledger.json").read_text())
    assert set(ledger["arms"]) == {arm.folder for arm in kept}
    assert any("step 20/20" in line for line in lines)
    before = (folder / "results.json").read_bytes()
    again = []
    run_study(STUDY, "smoke", 1, tmp_path, say=again.append, fresh=True)
    assert not any("step 20/20" in line or " grade " in line for line in again)
    assert (folder / "results.json").read_bytes() == before
