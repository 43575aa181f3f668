import dataclasses
import fcntl
import json
import os

import pytest

from looplab.records import StudyResult, dump_json
from looplab.studies import arms as work
from looplab.studies import rows
from looplab.studies import run as runs
from looplab.studies.base import EQUAL, STUDIES
from looplab.studies.choice import Choice
from looplab.studies.predictions import digest
from looplab.studies.run import command, few_seeds, predict, run_study, study_arms, study_folder
from looplab.training.divergence import DivergedError
from looplab.training.folder import FolderError
from report.sample import dense, single_core, two_blocks

PLANTED = {"text-core": single_core, "text-dense": dense}


@pytest.fixture
def audited(monkeypatch):
    """Planted audits instead of real ones; the names of those that were run."""
    ran = []

    def audit(arm, model, folder, say):
        if not (folder / "results.json").exists():
            ran.append(arm.folder)
            folder.mkdir(parents=True)
            (folder / "ledger.json").write_text(dump_json({"seconds": 1.5, "counts": {"applications": 8}}))
            PLANTED.get(arm.name, two_blocks)().save(folder)
        return work.AuditResult.load(folder)

    monkeypatch.setattr(work, "audit_arm", audit)
    return ran


@pytest.fixture
def plain(monkeypatch):
    """No page: it is written by the tests of looplab.report.study, and by the first two here."""
    monkeypatch.setattr(runs, "write_study", lambda result, folder: None)


def silent(line):
    pass


def dcp(out, *, scale="cpu", **more):
    return run_study(STUDIES["dcp"](), scale, 0, out, say=silent, **more)


def test_a_study_leaves_its_files_and_a_result_that_reads_back(tmp_path, audited):
    result = dcp(tmp_path)
    folder = tmp_path / "dcp" / "cpu"
    for name in ("predictions.json", "results.json", "ledger.json", "report.html", "tables.tex"):
        assert (folder / name).stat().st_size > 100
    assert {path.suffix for path in (folder / "figures").iterdir()} == {".svg", ".pdf"}
    assert StudyResult.from_json((folder / "results.json").read_text()) == result
    assert result.predictions == digest((folder / "predictions.json").read_text())
    assert audited == [arm.name for arm in result.arms]


def test_times_are_in_the_ledger_alone(tmp_path, audited, plain):
    dcp(tmp_path)
    folder = tmp_path / "dcp" / "cpu"
    ledger = json.loads((folder / "ledger.json").read_text())
    assert ledger["arms"]["text-core"]["audit_seconds"] == 1.5
    assert ledger["arms"]["text-core"]["audit_counts"] == {"applications": 8}
    assert ledger["predictions_written"].startswith("20")
    assert "seconds" not in (folder / "results.json").read_text()


def test_equal_inputs_give_equal_bytes(tmp_path, audited):
    for place in ("a", "b"):
        dcp(tmp_path / place)
    for name in ("predictions.json", "results.json", "report.html", "tables.tex", "figures/F1-shares.svg"):
        assert (tmp_path / "a/dcp/cpu" / name).read_bytes() == (tmp_path / "b/dcp/cpu" / name).read_bytes(), name


def test_predictions_are_written_before_the_first_arm(tmp_path, audited, plain, monkeypatch):
    planted = work.audit_arm

    def checked(arm, model, folder, say):
        assert (folder.parent.parent / "predictions.json").exists()
        return planted(arm, model, folder, say)

    monkeypatch.setattr(work, "audit_arm", checked)
    before = predict(STUDIES["dcp"](), "cpu", 0, tmp_path / "alone")
    assert sorted(os.listdir(tmp_path / "alone/dcp/cpu")) == [".lock", "ledger.json", "predictions.json"]
    assert dcp(tmp_path / "whole").predictions == before
    assert dcp(tmp_path / "alone").predictions == before


def test_a_killed_study_goes_on_with_what_is_missing(tmp_path, audited, plain):
    class KilledError(Exception):
        pass

    def kill(line):
        if line.startswith("[3/4]"):
            raise KilledError

    with pytest.raises(KilledError):
        run_study(STUDIES["dcp"](), "cpu", 0, tmp_path / "cut", say=kill)
    assert audited == ["text-2x4-fixed", "text-2x4-sampled"]
    dcp(tmp_path / "cut")
    assert audited == ["text-2x4-fixed", "text-2x4-sampled", "text-core", "text-dense"]
    dcp(tmp_path / "whole")
    results = [(tmp_path / place / "dcp/cpu/results.json").read_bytes() for place in ("cut", "whole")]
    assert results[0] == results[1]
    assert len(audited) == 8


def test_scales_and_studies_share_a_folder_of_studies(tmp_path, audited, plain):
    dcp(tmp_path, scale="smoke")
    dcp(tmp_path)
    assert sorted(os.listdir(tmp_path / "dcp")) == ["cpu", "smoke"]


def test_fresh_removes_what_the_study_wrote_and_nothing_else(tmp_path, audited, plain):
    dcp(tmp_path)
    folder = study_folder(tmp_path, STUDIES["dcp"](), "cpu")
    (folder / "predictions.json").write_text("{}")
    (folder / ".notes").touch()
    with pytest.raises(FolderError, match="holds other predictions"):
        dcp(tmp_path)
    dcp(tmp_path, fresh=True)
    assert len(audited) == 8
    assert (folder / ".notes").exists()


def test_a_folder_in_use_or_of_something_else_is_refused(tmp_path, audited, plain):
    (tmp_path / "dcp/cpu").mkdir(parents=True)
    with (tmp_path / "dcp/cpu/.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(FolderError, match="in use by another process"):
            dcp(tmp_path)
    (tmp_path / "run.json").touch()
    with pytest.raises(FolderError, match=r"holds something else \(run\.json\)"):
        dcp(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(FolderError, match="must be a folder"):
        dcp(tmp_path / "file")


def test_a_part_of_the_arms_leaves_reasons_and_the_rest_makes_it_whole(tmp_path, audited, plain):
    part = dcp(tmp_path / "a", choice=Choice(arms=("text-core", "text-dense")))
    assert audited == ["text-core", "text-dense"]
    assert {(claim.word, claim.reason) for claim in part.claims} == {("-", "not measured (--arms)")}
    assert [arm.name for arm in part.arms] == ["text-core", "text-dense"]
    dcp(tmp_path / "a")
    assert len(audited) == 4
    dcp(tmp_path / "b")
    results = [(tmp_path / place / "dcp/cpu/results.json").read_bytes() for place in "ab"]
    assert results[0] == results[1]


def test_an_arm_is_measured_once_for_one_code(tmp_path, audited, plain, monkeypatch):
    study, measured = STUDIES["dcp"], []
    before = study.measure
    monkeypatch.setattr(
        study, "measure", lambda self, arm, result: measured.append(arm.name) or before(self, arm, result)
    )
    dcp(tmp_path)
    dcp(tmp_path)
    assert len(measured) == 4
    monkeypatch.setattr(rows, "code_hash", lambda: "other")
    dcp(tmp_path)
    assert (len(measured), len(audited)) == (8, 4), "measured again from the audits that are kept"


def test_what_does_not_fit_into_the_minutes_is_left_for_the_next_call(tmp_path, audited, plain):
    found = dcp(tmp_path, choice=Choice(minutes=1.0), seconds=lambda arm: 100.0 if arm.name == "text-core" else 1.0)
    assert audited == ["text-2x4-fixed", "text-2x4-sampled", "text-dense"]
    assert {claim.reason for claim in found.claims} == {"not measured (--minutes)"}
    assert "-" not in {claim.word for claim in dcp(tmp_path).claims}


def test_a_model_of_the_users_that_is_refused_is_a_reason_and_the_others_go_on(tmp_path, audited, plain, monkeypatch):
    planted = work.audit_arm

    def audit(arm, model, folder, say):
        if arm.theirs:
            raise KeyError("MODEL must be a folder")
        return planted(arm, model, folder, say)

    monkeypatch.setattr(work, "audit_arm", audit)
    study = STUDIES["dcp"]().with_given({"mine": "nowhere"}, {})
    found = run_study(study, "cpu", 0, tmp_path / "theirs", say=silent)
    without = dcp(tmp_path / "ours")
    assert [claim.word for claim in found.claims] == [claim.word for claim in without.claims]
    assert found.row("mine", None, "O_app").reason == "refused: MODEL must be a folder"
    assert found.command == "looplab study dcp --scale cpu --model mine=nowhere"


def test_rows_of_several_arms_come_after_all_of_them(tmp_path, audited, plain, monkeypatch):
    def combined(self, rows):
        return (dataclasses.replace(rows[0], arm="all", quantity="arms", value=float(len({row.arm for row in rows}))),)

    monkeypatch.setattr(STUDIES["dcp"], "combined", combined)
    assert dcp(tmp_path).row("all", None, "arms").value == 4.0


def test_seeds_are_counted_or_named():
    study = STUDIES["par"]()
    assert {arm.seed for arm in study_arms(study, "cpu", 2)} == {0, 1}
    assert {arm.seed for arm in study_arms(study, "cpu", (0, 2))} == {0, 2}
    assert command(study, "cpu", (0, 1, 2)) == "looplab study par --scale cpu --seeds 3"
    assert command(study, "cpu", (0, 2), full=True) == "looplab study par --scale cpu --seeds 0,2 --full"
    assert command(study, "cpu", (3,)) == "looplab study par --scale cpu --seeds 3,"
    assert few_seeds(study, (0, 1)) == "2 seeds: 12 of 12 claims can only end as undecided (3 needed)"
    assert few_seeds(study, (0, 1, 2)) == few_seeds(STUDIES["dcp"](), ()) == ""


@pytest.mark.nightly
def test_a_cut_training_run_ends_in_the_same_bytes(tmp_path, monkeypatch, plain):
    """Real training and real audits of one arm; the first call is killed inside training, the second finishes."""

    class KilledError(Exception):
        pass

    study = STUDIES["depth_schedule"]()
    first = study.arms("smoke", 1)[:1]
    monkeypatch.setattr(type(study), "arms", lambda self, scale, seeds: first)
    monkeypatch.setattr(type(study), "claims", study.claims[:1])
    monkeypatch.setattr(work, "write_report", lambda result, folder: None)

    def kill(line):
        if "step 20/20" in line:  # after the checkpoint of step 15
            raise KilledError

    with pytest.raises(KilledError):
        run_study(study, "smoke", 1, tmp_path / "cut", say=kill)
    again = []
    run_study(study, "smoke", 1, tmp_path / "cut", say=again.append)
    assert any("at step 15" in line for line in again)
    whole = run_study(study, "smoke", 1, tmp_path / "whole", say=silent)
    results = [(tmp_path / place / "depth_schedule/smoke/results.json").read_bytes() for place in ("cut", "whole")]
    assert results[0] == results[1]
    assert {match.name: match.equal for match in whole.matched} == dict.fromkeys(EQUAL, True)
    assert [claim.word for claim in whole.claims] == ["not identifiable at this scale"]
    assert "Nothing is shown" in whole.notes[0]
    assert len(list((tmp_path / "whole/runs").iterdir())) == 1


def test_a_run_that_diverges_is_an_outcome_and_the_others_go_on(tmp_path, monkeypatch, plain):
    study = STUDIES["par"]()
    pair = [arm for arm in study.arms("smoke", 1) if arm.name in ("main", "final_only")]
    monkeypatch.setattr(type(study), "arms", lambda self, scale, seeds: tuple(pair))

    def train(config, run, display):
        run.mkdir(parents=True)
        raise DivergedError(f"step 3: loss is nan ({config.recipe})")

    monkeypatch.setattr(work, "train", train)
    lines = []
    result = run_study(study, "smoke", 1, tmp_path, say=lines.append)
    assert [arm.facts["diverged"] for arm in result.arms] == [
        "step 3: loss is nan (par-swap-s5)",
        "step 3: loss is nan (par-final-only)",
    ]
    assert {row.reason for row in result.rows} == {"diverged"}
    assert [line for line in lines if "diverged: step 3" in line]


@pytest.mark.nightly
def test_workers_give_the_same_bytes(tmp_path, monkeypatch):
    study = STUDIES["par"]()
    pair = tuple(arm for arm in study.arms("smoke", 1) if arm.name in ("main", "halting"))
    monkeypatch.setattr(type(study), "arms", lambda self, scale, seeds: pair)
    for workers in (1, 2):
        run_study(study, "smoke", 1, tmp_path / str(workers), workers=workers, say=silent)
    first, second = ((tmp_path / n / "par/smoke/results.json").read_bytes() for n in "12")
    assert first == second
