import dataclasses

import pytest

from looplab._config import config_hash
from looplab.recipes.depth_schedule import LAWS, SMOKE, depth_schedule
from looplab.records import dump_json
from looplab.studies import arms as work
from looplab.studies.base import STUDIES
from looplab.training.trainer import train
from report.sample import two_blocks
from training.tiny_run import tiny_run


def test_the_order_of_data_is_that_of_the_batches(tmp_path):
    config = tiny_run(tmp_path)
    found = work.data_order_hash(config, 259)
    assert work.data_order_hash(dataclasses.replace(config, recipe="other"), 259) == found
    assert work.data_order_hash(dataclasses.replace(config, seed=1), 259) != found
    assert work.data_order_hash(dataclasses.replace(config, steps=config.steps + 1), 259) != found


def test_arms_share_initial_weights(tmp_path):
    record = train(tiny_run(tmp_path), tmp_path / "run")
    facts = [work.training_facts(tiny_run(tmp_path, model=depth_schedule(arm, SMOKE).model), record) for arm in LAWS]
    assert len({fact["init"] for fact in facts}) == len({fact["data_order"] for fact in facts}) == 1
    assert len({fact["config"] for fact in facts}) == len(LAWS)
    assert facts[0]["tokens"] == f"{record.tokens:,}"


def test_a_run_is_trained_once_and_found_by_its_configuration(tmp_path):
    lines = []
    config = tiny_run(tmp_path)
    run = work.train_arm(config, tmp_path / "runs", lines.append)
    model, record = run.folder / "model", run.record
    assert model == tmp_path / "runs" / config_hash(config) / "model"
    assert model.is_dir()
    assert [line for line in lines if "step 6/6" in line]
    lines.clear()
    again = work.train_arm(config, tmp_path / "runs", lines.append)
    assert (again.folder / "model", again.record) == (model, record)
    assert not lines


def test_a_finished_audit_is_read_back_and_one_with_other_settings_is_not(tmp_path, monkeypatch):
    arm = STUDIES["dcp"]().arms("smoke", 0)[0]
    result = dataclasses.replace(two_blocks(), config_hash=config_hash(arm.audit))
    result.save(tmp_path / "same")

    def ran(*args, **kwargs):
        raise RuntimeError("audited again")

    monkeypatch.setattr(work, "plan_audit", ran)
    assert dump_json(work.audit_arm(arm, arm.source, tmp_path / "same", print)) == dump_json(result)
    dataclasses.replace(result, config_hash="other").save(tmp_path / "other")
    with pytest.raises(RuntimeError, match="audited again"):
        work.audit_arm(arm, arm.source, tmp_path / "other", print)


def test_an_audit_says_each_phase_once():
    lines = []
    watcher = work.AuditLines(lines.append)
    for phase, done in (("calibrate", 0), ("calibrate", 5), ("evaluate", 0), ("evaluate", 9)):
        watcher.advanced(phase, "text", done, 9, "full")
    assert lines == ["  calibrate", "  evaluate"]
