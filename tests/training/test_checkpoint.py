"""Checkpoints appear whole, are verified to the byte, and a broken one gives way to the one before it."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from looplab.data.documents import DataError
from looplab.interop import load
from looplab.models.folder import load_folder
from looplab.training.checkpoint import CheckpointError, _sum, checkpoints, newest_checkpoint
from looplab.training.config import RunConfig
from looplab.training.trainer import train
from tolerances import EXACT
from training.tiny_run import metrics, tiny_run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of 6 steps with checkpoints at 2, 4 and 6."""
    home = tmp_path_factory.mktemp("finished")
    config = tiny_run(home, keep=3)
    train(config, home / "run")
    return config, home / "run"


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it that has to go on from step 6 to 8."""
    config, folder = finished
    shutil.copytree(folder, tmp_path / "run")
    return dataclasses.replace(config, steps=8), tmp_path / "run"


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_a_checkpoint_holds_model_optimizer_and_state(finished):
    config, folder = finished
    path = folder / "step_4"
    assert sorted(p.name for p in path.iterdir()) == [
        "config.json",
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    state = json.loads((path / "state.json").read_text())
    assert RunConfig.read(state["config"]) == config
    assert state["progress"]["step"] == 4
    assert state["files"]["model.safetensors"]["bytes"] == (path / "model.safetensors").stat().st_size
    assert (folder / "latest").read_text() == "step_6\n"
    assert not list(folder.glob("*.partial"))


def test_every_mth_checkpoint_is_kept_beside_the_last(tmp_path):
    config = tiny_run(tmp_path, steps=8, save_every=1, keep=2, keep_every=3)
    train(config, tmp_path / "run")
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step_8", "step_7", "step_6", "step_3"]


def test_a_checkpoint_and_the_final_model_open_by_themselves(finished):
    _, folder = finished
    model, facts = load_folder(folder / "model")
    assert facts["trained"]["steps"] == 6
    assert facts["trained"]["final_loss"] == metrics(folder, "eval")[-1]["losses"]["4"]
    torch.testing.assert_close(load(folder / "step_6").model.state_dict(), model.state_dict(), **EXACT)


def test_old_checkpoints_are_deleted(tmp_path):
    train(tiny_run(tmp_path, keep=2), tmp_path / "run")
    assert [p.name for p in checkpoints(tmp_path / "run")] == ["step_6", "step_4"]


def test_the_newest_comes_back_with_its_progress(finished):
    config, folder = finished
    found = newest_checkpoint(folder)
    assert found.path.name == "step_6"
    assert found.config == config
    lines = metrics(folder, "train")
    assert found.progress.tokens == lines[-1]["tokens"]
    assert found.progress.depth_sum == sum(line["T"] for line in lines)
    launches = sum(line["ledger"]["launches"] for line in lines)
    assert found.progress.ledger.launches == launches
    assert found.progress.ledger.row_applications == sum(line["ledger"]["row_applications"] for line in lines)


def test_a_folder_without_checkpoints_has_none(tmp_path):
    assert newest_checkpoint(tmp_path) is None


def shorten(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "config.json", "state.json"])
@pytest.mark.parametrize("damage", [shorten, flip, lambda path: path.unlink()], ids=["shorten", "flip", "remove"])
def test_a_broken_checkpoint_gives_way_to_the_one_before(run, name, damage):
    _, folder = run
    damage(folder / "step_6" / name)
    with pytest.warns(UserWarning, match=rf"^step_6/{name}: .* Falling back to step_4\.$"):
        assert newest_checkpoint(folder).path.name == "step_4"


def test_a_changed_number_in_the_state_is_found(run):
    _, folder = run
    path = folder / "step_6" / "state.json"
    path.write_text(path.read_text().replace('"step": 6', '"step": 5'))
    with pytest.warns(
        UserWarning, match=r"^step_6/state.json: changed since it was written. Falling back to step_4\.$"
    ):
        assert newest_checkpoint(folder).path.name == "step_4"


def test_the_message_gives_both_sizes(run):
    _, folder = run
    path = folder / "step_6" / "model.safetensors"
    size = path.stat().st_size
    shorten(path)
    with pytest.warns(UserWarning, match="Falling back") as caught:
        newest_checkpoint(folder)
    message = f"step_6/model.safetensors: {size // 2:,} of {size:,} bytes. Falling back to step_4."
    assert [str(w.message) for w in caught] == [message]


def test_two_broken_ones_give_way_to_the_third_and_three_to_none(run):
    _, folder = run
    shorten(folder / "step_6" / "model.safetensors")
    shorten(folder / "step_4" / "model.safetensors")
    with pytest.warns(UserWarning, match="Falling back") as caught:
        assert newest_checkpoint(folder).path.name == "step_2"
    assert [str(w.message).split(". ")[-1] for w in caught] == ["Falling back to step_4.", "Falling back to step_2."]
    shorten(folder / "step_2" / "model.safetensors")
    with (
        pytest.warns(UserWarning, match="Falling back"),
        pytest.raises(CheckpointError, match=r"^step_2/model.safetensors: .* No earlier checkpoint is left"),
    ):
        newest_checkpoint(folder)


def test_a_run_after_a_fall_back_ends_as_if_nothing_had_happened(finished, run):
    config, straight = finished
    _, folder = run
    (folder / "record.json").unlink()
    shorten(folder / "step_6" / "model.safetensors")
    with pytest.warns(UserWarning, match="Falling back to step_4"):
        train(config, folder)
    torch.testing.assert_close(weights(folder / "step_6"), weights(straight / "step_6"), **EXACT)
    assert metrics(folder) == metrics(straight)


def test_changed_data_is_refused(tmp_path):
    config = tiny_run(tmp_path, steps=2)
    train(config, tmp_path / "run")
    with open(config.data.sources[0], "a") as file:
        file.write('{"text": "more"}\n')
    text = rf"^{config.data.sources[0]} changed since step 2 \(hash \w{{8}}\.\. is now \w{{8}}\.\.\)\.$"
    with pytest.raises(DataError, match=text):
        train(dataclasses.replace(config, steps=4), tmp_path / "run")


def test_a_later_schema_is_refused(run):
    _, folder = run
    path = folder / "step_6" / "state.json"
    state = json.loads(path.read_text())
    state.pop("sum")
    state["schema"] = 2
    path.write_text(json.dumps({**state, "sum": _sum(state)}))
    with pytest.raises(CheckpointError, match="step_6/state.json: schema 2, this version reads 1. Resume with looplab"):
        newest_checkpoint(folder)


def test_metrics_shorter_than_the_checkpoint_says_are_refused(run):
    config, folder = run
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(CheckpointError, match="metrics.jsonl must have at least"):
        train(config, folder)
