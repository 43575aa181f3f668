import dataclasses
import json
import math

import pytest

from looplab.records import StudyRow
from looplab.studies import stability as study
from looplab.studies.base import STUDIES
from looplab.studies.claims import DIVERGED, decide_claims
from looplab.studies.stability import Cell
from looplab.studies.trained import TrainedRun
from test_records import RUN

STUDY = STUDIES["stability"]()
IDS = ["1", "2a", "2b", "3a", "3b", "4", "5a", "5b", "6"]


def test_the_grid_is_loops_by_rates_by_stabilisers_with_models_and_contracts_beside_it():
    kinds = [arm.name.partition(" ")[0] for arm in STUDY.arms("cpu", 1)]
    counts = {kind: kinds.count(kind) for kind in kinds}
    assert counts == {
        "none": 9, "end_norm": 9, "loom": 9, "diagonal": 9, "untied": 6, "wide": 6,
        "window_1": 1, "segments_3": 1, "every_loop": 1,
    }  # fmt: skip
    names = [arm.name for arm in (*STUDY.arms("cpu", 1), *STUDY.further("cpu", 1))]
    assert len(set(names)) == len(names) == 51 + 30
    assert not any("," in name for name in names), "--arms is a list with commas"


def test_arms_of_a_kind_differ_in_loops_and_rate_alone_and_share_data_and_steps():
    first, *rest = STUDY.arms("cpu", 2)
    for arm in rest:
        for field in ("data", "steps", "schedule", "clip_norm"):
            assert getattr(arm.source, field) == getattr(first.source, field)
        assert dataclasses.replace(arm.source.evaluation, depths=(1,)) == first.source.evaluation


def loss(cell):
    """As predicted: without a stabiliser, loops cost at the top rate; a stabiliser wins more than models do."""
    base = 3.0 - 0.1 * math.log2(cell.loops) + (0.05 if cell.rate != 3e-3 else 0.0)
    won = {"loom": 0.3, "end_norm": 0.1, "diagonal": 0.05, "untied": 0.1, "wide": 0.15}
    contract = {"window_1": 0.9, "segments_3": 0.5, "every_loop": 0.2}
    return base - won.get(cell.kind, 0.0) + contract.get(cell.kind, 0.0)


def failed(cell):
    return float(cell.kind == "none" and cell.loops * cell.rate >= 0.035)


def spikes(cell):
    return {"none": 1.0 + math.log2(cell.loops)}.get(cell.kind, 0.5)


def rows(loss=loss, failed=failed, spikes=spikes, without=(), lost=()):
    """Rows of all runs of three seeds, with what is combined of them."""
    made = []
    for cell in study.GRID:
        for seed in range(3):
            if cell.name in without:
                continue
            found = {study.FAILED: failed(cell), study.SPIKES: spikes(cell)}
            if (cell.name, seed) in lost:
                found[study.FAILED] = 1.0
            else:
                found |= {study.LOSS: loss(cell) + 0.001 * seed, study.FLOPS_LOSS: loss(cell) + 0.5 + 0.001 * seed}
            made += [
                StudyRow(arm=cell.name, seed=seed, quantity=quantity, unit="", value=value)
                for quantity, value in found.items()
            ]
    return made + list(STUDY.combined(made))


def results(made):
    return {
        r.claim.id.partition(".")[2]: r for r in decide_claims(STUDY.claims, made, scale="cpu", matched=(), equal=())
    }


def words(made):
    return {number: result.word for number, result in results(made).items()}


def test_the_predictions_as_they_were_made():
    assert words(rows()) == dict.fromkeys(IDS, "supported")


def test_missed_predictions_are_results():
    def worse(cell):
        """Loops cost, the models win, contracts hardly matter."""
        won = {"untied": 0.6, "wide": 0.9}
        return 3.0 + 0.1 * math.log2(cell.loops) - won.get(cell.kind, 0.0) + 0.02 * len(cell.kind)

    def fewer(cell):
        return float(cell.loops == 1 and cell.rate > 1e-3) if cell.kind == "none" else 1.0

    found = words(rows(worse, fewer, lambda cell: 2.0 - 0.2 * math.log2(cell.loops) + (cell.kind != "none")))
    assert found == dict.fromkeys(IDS, "not supported")


def test_where_nothing_fails_there_is_nothing_to_explain():
    found = results(rows(failed=lambda cell: 0.0))
    for number in ("2b", "3b", "4"):
        assert found[number].word == "not identifiable at this scale"
        assert found[number].reason.startswith("too few events")
    assert {found[number].word for number in ("1", "2a", "3a", "5a", "5b", "6")} == {"supported"}


def test_a_diverged_run_is_a_failure_and_its_rate_is_not_the_best():
    best = Cell("loom", 16, 3e-3).name
    made = rows(lost={(best, 1)})
    value = {(r.arm, r.seed, r.quantity): r for r in made}
    assert value["loom", 1, "failed, H = 16"].value == pytest.approx(1 / 3)
    assert value["loom", 0, "best loss, H = 16"].value == pytest.approx(loss(Cell("loom", 16, 1e-3)))
    assert value[study.BEST, 0, "recovered, H = 16"].word == Cell("loom", 16, 1e-3).name
    everywhere = {(Cell("loom", 16, rate).name, 0) for rate in study.RATES}
    found = results(rows(lost=everywhere))["5a"]
    assert (found.word, DIVERGED in found.reason) == ("undecided", True)


def test_claims_on_runs_that_are_missing_have_no_word():
    found = results(rows(without={Cell("none", 16, 9e-3).name, Cell("window_1", 16, 3e-3).name}))
    assert {number: found[number].word for number in ("1", "2a", "6")} == dict.fromkeys(("1", "2a", "6"), "-")
    assert found["2a"].reason == study.MISSING


def test_the_highest_rate_without_failure_is_one_step_below_the_lowest_where_all_fail():
    made = rows(failed=lambda cell: 1.0)
    found = {(r.arm, r.quantity): r.value for r in made}
    assert found["none", f"{study.HIGHEST}, H = 4"] == pytest.approx(-math.log2(3))
    found = {(r.arm, r.quantity): r.value for r in rows()}
    assert found["none", f"{study.HIGHEST}, H = 1"] == pytest.approx(math.log2(9))


def planted(folder, final, config):
    """A run whose loss falls to 2 at the early step and ends at `final`."""
    size = study.SIZES["smoke"]
    lines = []
    for step in range(1, size.steps + 1):
        ledger = {"flops_forward": 10**9, "flops_backward": 0}
        lines.append(
            {"kind": "train", "step": step, "loss": 2.0, "grad_norm": 1.0, "skipped": False, "rms_last": float(step),
             "ledger": ledger}
        )  # fmt: skip
        if step % size.every == 0:
            held = 2.0 if step <= size.early else final
            lines.append({"kind": "eval", "step": step, "losses": {"1": 9.0, "4": held}})
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    record = None if math.isnan(final) else dataclasses.replace(RUN, loss=final)
    return TrainedRun(config, folder, record, "step 3: loss is nan" if record is None else "")


@pytest.mark.parametrize(("final", "fails"), [(1.9, 0.0), (2.1, 1.0), (math.nan, 1.0)])
def test_a_run_fails_if_it_diverges_or_ends_above_its_early_loss(tmp_path, final, fails):
    arm = STUDY.arms("smoke", 1)[1]
    found = {row.quantity: row.value for row in STUDY.trained(arm, planted(tmp_path / "run", final, arm.source))}
    assert found[study.FAILED] == fails
    assert found[study.SPIKES] == 0
    assert (study.LOSS in found) == (not math.isnan(final))
    if not math.isnan(final):
        assert found["largest state"] == study.SIZES["smoke"].steps


def test_the_loss_at_equal_flops_is_where_the_run_has_spent_those_of_one_loop(tmp_path):
    plain, looped = STUDY.arms("smoke", 1)[:2]
    assert (plain.name, looped.name) == ("none H1 1e-3", "none H4 9e-3")
    whole = study._one_loop(study.SIZES["smoke"])
    run = planted(tmp_path / "run", 1.0, looped.source)
    step = whole / 1e9
    assert step < 3, "planted FLOPs are larger than any step of this size"
    assert study.FLOPS_LOSS not in {row.quantity for row in STUDY.trained(looped, run)}
    cheap = run.folder / "metrics.jsonl"
    cheap.write_text(cheap.read_text().replace("1000000000", str(int(whole / 7.5))))
    again = TrainedRun(looped.source, run.folder, run.record)
    found = {row.quantity: row.value for row in STUDY.trained(looped, again)}
    assert found[study.FLOPS_LOSS] == pytest.approx(1.0)


def test_the_published_claims_are_those_of_the_survey():
    assert {c.id.partition(".")[2]: c.quote for c in STUDY.claims if c.quote} == {
        "1": "training stability (rather than expressiveness) as the binding constraint",
        "5a": "lack of compute-matched baselines",
        "5b": "lack of compute-matched baselines",
        "6": "depends on the training contract, not expressiveness",
    }
    assert [c.id.partition(".")[2] for c in STUDY.claims] == IDS
