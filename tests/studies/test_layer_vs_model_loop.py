"""The study from planted rows, and one small run of it."""

import pytest
import torch

from looplab.records import StudyResult, StudyRow
from looplab.studies import layer_vs_model_loop as study
from looplab.studies.claims import decide_claims
from looplab.studies.layer_vs_model_loop import (
    BEYOND,
    NUM_STEPS,
    RMS_GROWTH,
    SMOKED,
    TASKS,
    UPDATE_GROWTH,
    LayerVsModelLoop,
    cells,
    change,
    decided,
    quality,
)
from looplab.studies.run import run_study

STUDY = LayerVsModelLoop()


def rows(value, *, learned=0.9, tasks=TASKS):
    """Three seeds, every quantity +-0.001; `value(quantity, order, state, law)` says what it is."""
    made = []
    for seed in range(3):
        for task in tasks:
            for arm in cells(task):
                _, order, state, law = arm.split("-")
                found = {name: value(name, order, state, law) for name in (decided(), *map(change, BEYOND))}
                found |= {RMS_GROWTH: value(RMS_GROWTH, order, state, law)}
                found |= {UPDATE_GROWTH: value(UPDATE_GROWTH, order, state, law)}
                found |= {quality(task, NUM_STEPS): learned}
                for quantity, x in found.items():
                    low, high = x - 0.001, x + 0.001
                    made.append(
                        StudyRow(
                            arm=arm, seed=seed, quantity=quantity, unit="share", value=x,
                            low=low, high=high, low90=low, high90=high,
                        )
                    )  # fmt: skip
    return made


def words(made):
    found = decide_claims(
        STUDY.claims, made, scale="cpu", not_run=dict.fromkeys(cells("sums"), "not measured (--full)")
    )
    return {result.claim.id.removeprefix("layer_vs_model_loop."): result.word for result in found}


def test_orders_that_differ_in_everything():
    def value(name, order, state, law):
        layer = order == "layer"
        return 0.5 + 0.2 * layer + 0.1 * layer * (state == "inject") + 0.1 * layer * (law == "sampled")

    found = words(rows(value))
    assert found.pop("1c") == "-", "prefix sums are of --full"
    assert set(found.values()) == {"supported"}


def test_orders_that_differ_in_nothing():
    found = words(rows(lambda *_: 0.5))
    del found["1c"]
    assert set(found.values()) == {"not supported"}


def test_an_effect_of_the_order_alone_is_no_interaction():
    found = words(rows(lambda name, order, state, law: 0.5 + 0.2 * (order == "layer")))
    assert {found[name] for name in ("1a", "1b", "2a", "2b")} == {"supported"}
    assert {found[name] for name in ("2c", "2d", "2e", "2f", "3a", "3b", "4a", "4b")} == {"not supported"}


def test_an_effect_of_injection_alone_is_not_one_of_the_order_or_the_law():
    found = words(rows(lambda name, order, state, law: 0.5 + 0.2 * (state == "inject")))
    assert {found[name] for name in ("2c", "2d")} == {"supported"}
    assert {found[name] for name in ("1a", "2a", "2e", "3a", "4a", "4c")} == {"not supported"}


def test_a_task_that_was_not_learned_decides_nothing_about_it():
    found = words(rows(lambda name, order, *_: 0.5 + 0.2 * (order == "layer"), learned=0.1))
    assert found["1b"] == found["2b"] == found["3b"] == "not identifiable at this scale"
    assert found["1a"] == "supported"


def test_prefix_sums_are_decided_with_full():
    found = decide_claims(
        STUDY.claims, rows(lambda name, order, *_: 0.5 + 0.2 * (order == "layer"), tasks=(*TASKS, "sums")), scale="cpu"
    )
    assert {result.claim.id: result.word for result in found}["layer_vs_model_loop.1c"] == "supported"


def test_arms_of_claims_are_run_seed_by_seed():
    arms, further = STUDY.arms("cpu", 2), STUDY.further("cpu", 1)
    assert [arm.seed for arm in arms] == [0] * 16 + [1] * 16
    named = {arm.name for arm in (*arms, *further)}
    assert {a for claim in STUDY.claims for part in claim.parts for a in part.arms} <= named
    assert {arm.name for arm in further} == set(cells("sums"))


def test_quality_and_shares_are_means_over_labelled_positions(monkeypatch):
    labels = torch.tensor([[-100, 1, 2, 3], [-100, -100, 4, 5]])
    top = torch.tensor([[[9, 1, 7, 3], [9, 9, 4, 8]], [[9, 1, 2, 3], [9, 9, 4, 8]]])
    found = study.Lens(top, torch.zeros(2, 4, 10), torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.25]))
    monkeypatch.setattr(study, "lens", lambda model, tokens, depth: found)
    monkeypatch.setattr(study, "_items", lambda config, task: [(labels, labels)])
    run = study.recipes.layer_vs_model_loop(SMOKED[0], study.recipes.SMOKE)
    seen = study._measured(None, run, "chase", 2)
    assert seen.quality.tolist() == [1.0, 0.5]
    assert seen.decided.tolist() == pytest.approx([2 / 3, 1.0])
    assert seen.first_stay.tolist() == pytest.approx([4 / 3, 1.0])
    assert (seen.rms, seen.update) == (2.0, 0.25)
    text = study._measured(None, run, "text", 2)
    assert text.quality.tolist() == pytest.approx([torch.tensor(10.0).log().item()] * 2)


@pytest.mark.nightly
def test_a_smoke_run_makes_the_page_and_a_second_one_trains_nothing(tmp_path, monkeypatch):
    lines = []
    result = run_study(STUDY, "smoke", 1, tmp_path, say=lines.append)
    folder = tmp_path / "layer_vs_model_loop/smoke"
    assert StudyResult.from_json((folder / "results.json").read_text()) == result
    assert [arm.name for arm in result.arms] == [cell.name for cell in SMOKED]
    found = {claim.claim.id: claim.word for claim in result.claims}
    assert found.pop("layer_vs_model_loop.1c") == "-", "prefix sums are of --full"
    assert set(found.values()) == {"not identifiable at this scale"}
    asked = {q for plot in STUDY.plots for q in plot.quantities} | set(STUDY.columns)
    assert asked <= {row.quantity for row in result.rows}
    pinned = result.row("text-layer-inject-sampled", 0, RMS_GROWTH)
    assert pinned.value == pytest.approx(1.0, abs=1e-3)
    loss = result.row("text-model-inject-sampled", 0, "loss at R = 4")
    assert loss.low < loss.low90 < loss.value < loss.high90 < loss.high
    assert "Held-out loss against iterations" in (folder / "report.html").read_text()
    before = (folder / "results.json").read_bytes()
    again = []
    monkeypatch.setattr("looplab.studies.run.write_study", lambda result, folder: None)
    run_study(STUDY, "smoke", 1, tmp_path, say=again.append, fresh=True)
    assert not any("step 10/10" in line for line in again)
    assert (folder / "results.json").read_bytes() == before
