"""The study from planted rows, and one small run of it."""

import pytest

from looplab.records import Matched, StudyResult, StudyRow
from looplab.studies.claims import decide_claims
from looplab.studies.run import run_study
from looplab.studies.truncation_progress import (
    CHANCE,
    DECIDING,
    GRID,
    NEEDS_SCALING,
    REFUSED,
    SMOKED,
    WAITING,
    TruncationProgress,
    em,
)

STUDY = TruncationProgress()
EXPECTED = {  # exact match at 1x, 4x, 16x, as section 4 of our trials would have it
    "final-full": (1.0, 0.3, 0.02), "final-window4": (0.05, 0.02, 0.02), "final-window2": (0.03, 0.02, 0.02),
    "final-window1": (0.02, 0.02, 0.02), "final-window1-flops": (0.02, 0.02, 0.02),
    "progress-full": (1.0, 0.98, 0.7), "progress-window4": (1.0, 0.9, 0.3), "progress-window2": (1.0, 0.8, 0.1),
    "progress-window1": (1.0, 0.56, 0.02), "progress-segments1": (1.0, 0.56, 0.02),
    "progress-segments3": (1.0, 0.9, 0.3), "progress-window1-flops": (0.97, 0.3, 0.02),
    "replay-full": (1.0, 1.0, 1.0), "replay-window1": (1.0, 1.0, 1.0), "replay-segments1": (1.0, 1.0, 1.0),
}  # fmt: skip


def rows(**changed):
    """Three seeds, every exact match +-0.01; `changed` are triples of an arm, with _ for -."""
    made = []
    for seed in range(3):
        for arm, values in {**EXPECTED, **{name.replace("_", "-"): each for name, each in changed.items()}}.items():
            for factor, x in zip((1, 4, 16), map(float, values), strict=True):
                low, high = x - 0.01, x + 0.01
                made.append(
                    StudyRow(
                        arm=arm, seed=seed, quantity=em(factor), unit="exact match", value=x,
                        low=low, high=high, low90=low, high90=high, chance=CHANCE, items=256,
                    )
                )  # fmt: skip
        made += [
            StudyRow(arm="final-full", seed=seed, quantity=name, unit=unit, value=None, reason=NEEDS_SCALING)
            for name, unit, _ in WAITING.values()
        ]
    return made


def words(made, **more):
    found = decide_claims(STUDY.claims, made, scale="cpu", **more)
    return {result.claim.id.removeprefix("truncation_progress."): result for result in found}


def test_what_our_trials_found():
    found = words(rows())
    waiting = {name: found.pop(name) for name in WAITING}
    assert {name: result.word for name, result in found.items()} == dict.fromkeys(found, "supported")
    assert list(found) == ["1a", "1b", "1c", "1d", "1e", "2", "3a", "3b", "3c"]
    assert {(result.word, result.reason) for result in waiting.values()} == {("-", NEEDS_SCALING)}


def test_missed_predictions_are_results():
    found = words(rows(progress_window1=(0.5, 0.99, 0.02), final_window1=(0.99, 0.3, 0.02), replay_full=(1, 1, 0.2)))
    for name in ("1a", "1d", "2"):
        assert found[name].word == "not supported", name
    assert found["1b"].word == "not identifiable at this scale" and "ceiling" in found["1b"].reason


def test_a_window_that_costs_the_same_under_both_objectives_is_no_interaction():
    found = words(rows(final_full=(1, 0.98, 0), final_window1=(1, 0.56, 0), final_window1_flops=(1, 0.3, 0)))
    assert found["3b"].word == found["3c"].word == "not supported"
    assert found["3a"].word == "not identifiable at this scale", "all four are right at the trained length"


def test_nothing_is_said_about_windows_where_full_back_propagation_learned_nothing():
    found = words(rows(final_full=(0.3, 0.02, 0.02)))
    assert found["2"].reason == "task not learned: final-full, EM at 1x 0.3, 0.9 needed"
    assert {found[name].word for name in ("2", "3a", "3b", "3c")} == {"not identifiable at this scale"}
    assert found["1a"].word == "supported"


def test_each_table_asks_for_what_it_holds_equal():
    def missed(name, **values):
        return Matched(name=name, equal=False, values={f"{arm}, seed 0": value for arm, value in values.items()})

    applications = missed("gradient_applications", **{"progress-full": "7,200", "progress-window1": "900"})
    found = words(rows(), matched=(applications,), equal=STUDY.equal)
    assert found["1b"].reason == "arms not matched: gradient_applications 8.00"
    assert found["1e"].word == "supported"
    flops = missed("train_flops", **{"progress-full": "1.000e12", "progress-window1-flops": "1.1e12"})
    found = words(rows(), matched=(flops,), equal=STUDY.equal)
    assert found["1e"].reason == "arms not matched: train_flops 1.10"
    assert found["1b"].word == "supported"


def test_arms_of_claims_are_run_by_default_and_full_adds_the_rest_of_the_grid():
    arms, further = STUDY.arms("cpu", 1), STUDY.further("cpu", 1)
    assert {a for claim in STUDY.claims for part in claim.parts for a in part.arms} <= {arm.name for arm in arms}
    assert [arm.name for arm in arms] == [cell.name for cell in DECIDING]
    folders = [arm.folder for arm in (*arms, *further)]
    assert len(set(folders)) == len(folders)
    legal = {cell.name for cell in GRID if cell not in REFUSED}
    assert legal <= {arm.name for arm in (*arms, *further)}
    assert len(legal) == 4 * 6 + 4 + 5, "a loss at the end refuses segments, and one objective alone has implicit"
    assert all(len(arm.source.recipe) < 60 for arm in (*arms, *further))


def test_refused_cells_are_printed_in_the_words_of_the_configuration():
    said = [note for note in STUDY.notes if note.startswith("Refused: ")]
    assert len(said) == len(REFUSED) == 8
    assert any("final-segments3. SegmentedDetach(every=3) needs a loss at iterations 3, 6, ..;" in n for n in said)


def test_quantities_of_the_claims_are_measured():
    lines = {arm.name: {line.length // 8 for line in arm.grid.lines} for arm in STUDY.arms("cpu", 1)}
    for claim in STUDY.claims:
        for part in claim.parts:
            for arm, quantity in part.cells:
                known = {em(factor) for factor in lines[arm]} | {name for name, _, _ in WAITING.values()}
                assert quantity in known, (arm, quantity)


@pytest.mark.slow
def test_a_smoke_run_makes_the_page_and_a_second_one_repeats_nothing(tmp_path, monkeypatch):
    lines = []
    result = run_study(STUDY, "smoke", 1, tmp_path, say=lines.append)
    folder = tmp_path / "truncation_progress/smoke"
    assert StudyResult.from_json((folder / "results.json").read_text()) == result
    assert [arm.name for arm in result.arms] == [cell.name for cell in SMOKED]
    assert {claim.word for claim in result.claims} == {"not identifiable at this scale"}
    facts = {arm.name: arm.facts for arm in result.arms}
    assert facts["final-full"]["init"] == facts["settled-implicit"]["init"]
    assert facts["final-full"]["gradient applications"] == facts["progress-segments1"]["gradient applications"] == "160"
    assert facts["progress-window1"]["gradient applications"] == "20"
    page = (folder / "report.html").read_text()
    assert "Refused: final-segments3" in page and "Exact match against length" in page
    before = (folder / "results.json").read_bytes()
    again = []
    monkeypatch.setattr("looplab.studies.run.write_study", lambda result, folder: None)
    run_study(STUDY, "smoke", 1, tmp_path, say=again.append, fresh=True)
    assert not any("step 20/20" in line or " grade " in line for line in again)
    assert (folder / "results.json").read_bytes() == before
