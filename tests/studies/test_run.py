import fcntl
import json
import os

import pytest

from looplab.records import StudyResult, dump_json
from looplab.studies import arms as work
from looplab.studies import run as runs
from looplab.studies.base import STUDIES
from looplab.studies.predictions import digest
from looplab.studies.run import predict, run_study, study_folder
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


def test_arms_that_share_nothing_are_seen():
    def arm(name, seed, init):
        facts = dict.fromkeys(runs.EQUAL, "x") | {"init": init}
        return runs.StudyArm(name=name, title="", seed=seed, audit="", sentence="", facts=facts)

    same = runs.matches([arm("A", 0, "1"), arm("B", 0, "1"), arm("A", 1, "2"), arm("B", 1, "2")])
    assert [(match.name, match.equal) for match in same] == [(name, True) for name in runs.EQUAL]
    other = {match.name: match.equal for match in runs.matches([arm("A", 0, "1"), arm("B", 0, "2")])}
    assert other == {"init": False, "data_order": True, "steps": True, "tokens": True, "parameters": True}
    assert runs.matches([arm("text-core", None, "1")]) == ()


@pytest.mark.slow
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
        if "step 20/20" in line:  # after the checkpoint of step 10
            raise KilledError

    with pytest.raises(KilledError):
        run_study(study, "smoke", 1, tmp_path / "cut", say=kill)
    again = []
    run_study(study, "smoke", 1, tmp_path / "cut", say=again.append)
    assert any("at step 10" in line for line in again)
    whole = run_study(study, "smoke", 1, tmp_path / "whole", say=silent)
    results = [(tmp_path / place / "depth_schedule/smoke/results.json").read_bytes() for place in ("cut", "whole")]
    assert results[0] == results[1]
    assert {match.name: match.equal for match in whole.matched} == dict.fromkeys(runs.EQUAL, True)
    assert [claim.word for claim in whole.claims] == ["not identifiable at this scale"]
    assert "Nothing is shown" in whole.notes[0]
    assert len(list((tmp_path / "whole/runs").iterdir())) == 1


def test_a_run_that_diverges_is_an_outcome_and_the_others_go_on(tmp_path, monkeypatch, plain):
    study = STUDIES["par"]()
    pair = [arm for arm in study.arms("smoke", 1) if arm.name in ("main", "final_only")]
    monkeypatch.setattr(type(study), "arms", lambda self, scale, seeds: tuple(pair))

    def train(config, runs, say):
        raise DivergedError(f"step 3: loss is nan ({config.recipe})")

    monkeypatch.setattr(work, "train_arm", train)
    lines = []
    result = run_study(study, "smoke", 1, tmp_path, say=lines.append)
    assert [arm.facts["diverged"] for arm in result.arms] == [
        "step 3: loss is nan (par-swap-s5)",
        "step 3: loss is nan (par-final-only)",
    ]
    assert {row.reason for row in result.rows} == {"diverged"}
    assert [line for line in lines if "diverged: step 3" in line]


@pytest.mark.slow
def test_workers_give_the_same_bytes(tmp_path, monkeypatch):
    study = STUDIES["par"]()
    pair = tuple(arm for arm in study.arms("smoke", 1) if arm.name in ("main", "halting"))
    monkeypatch.setattr(type(study), "arms", lambda self, scale, seeds: pair)
    for workers in (1, 2):
        run_study(study, "smoke", 1, tmp_path / str(workers), workers=workers, say=silent)
    first, second = ((tmp_path / n / "par/smoke/results.json").read_bytes() for n in "12")
    assert first == second
