import dataclasses
import json

import pytest

from looplab.data.documents import DataError
from looplab.objectives import NextToken
from looplab.training.config import RunConfig
from looplab.training.folder import FolderError, claim, finished, locked
from looplab.training.trainer import train
from training.tiny_run import tiny_run


def test_a_new_folder_gets_the_resolved_configuration(tmp_path):
    run = tmp_path / "a" / "run"
    config = tiny_run(tmp_path)
    with locked(run):
        claim(run, config)
    facts = json.loads((run / "run.json").read_text())
    assert RunConfig.read(facts["config"]) == config
    assert facts["versions"].keys() == {"looplab", "torch"}


def test_a_changed_configuration_is_refused_with_both_values(tmp_path):
    run = tmp_path / "run_7"
    run.mkdir()
    claim(run, tiny_run(tmp_path, objective=NextToken(z_loss=0.1)))
    before = (run / "run.json").read_bytes()
    with pytest.raises(FolderError) as caught:
        claim(run, tiny_run(tmp_path, objective=NextToken(z_loss=0.05)))
    message = "Cannot resume run_7: objective.z_loss was 0.1, is 0.05. Start a new run or restore the value."
    assert str(caught.value) == message
    assert (run / "run.json").read_bytes() == before


def test_steps_may_change(tmp_path):
    config = tiny_run(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    claim(run, config)
    claim(run, dataclasses.replace(config, steps=9))
    assert json.loads((run / "run.json").read_text())["config"]["steps"] == 9


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "thesis.tex").write_text("precious")
    with pytest.raises(FolderError, match="must be empty or hold a run. Found: thesis.tex. Choose another folder."):
        train(tiny_run(tmp_path), run)
    assert [p.name for p in run.iterdir()] == ["thesis.tex"]


def test_a_run_that_cannot_go_on_keeps_its_folder(tmp_path):
    config = tiny_run(tmp_path, steps=1)
    train(config, tmp_path / "run")
    (tmp_path / "text.jsonl").write_text('{"text": "another"}')
    with pytest.raises(DataError, match="changed since step 1"):
        train(dataclasses.replace(config, steps=2), tmp_path / "run")
    assert {"run.json", "lock", "step_1"} <= {p.name for p in (tmp_path / "run").iterdir()}


def test_two_processes_do_not_share_a_folder(tmp_path):
    with locked(tmp_path / "run"):
        with pytest.raises(FolderError, match="is in use by another process"), locked(tmp_path / "run"):
            pass
        assert (tmp_path / "run" / "lock").exists()
    with locked(tmp_path / "run"):
        pass


def test_a_finished_run_is_recognised_by_its_whole_configuration(tmp_path):
    config = tiny_run(tmp_path, steps=1)
    record = train(config, tmp_path / "run")
    assert finished(tmp_path / "run", config) == record
    assert finished(tmp_path / "run", dataclasses.replace(config, steps=2)) is None
