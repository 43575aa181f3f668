"""What wandb is asked for, and the real one offline where it is installed."""

import importlib.util
import sys
import types

import pytest

from looplab.training.trackers import TRACKERS
from looplab.training.trackers.base import Tracked


def test_it_is_asked_for_one_run_by_its_id_and_for_nothing_beyond_numbers(tmp_path, monkeypatch):
    asked, done = {}, []
    run = types.SimpleNamespace(
        log=lambda numbers, step: done.append((step, numbers)), finish=lambda: done.append("finish")
    )
    fake = types.SimpleNamespace(
        init=lambda **given: asked.update(given) or run, Settings=lambda **given: types.SimpleNamespace(**given)
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_ERROR_REPORTING", raising=False)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")  # so that it is put back
    tracker = TRACKERS["wandb"](Tracked(tmp_path, "0a1b", "tiny", {"steps": 3}, 2))
    tracker.log({"train/loss": 0.5}, 3)
    tracker.close()
    assert (asked["project"], asked["id"], asked["resume"]) == ("tiny", "0a1b", "allow")
    assert (asked["config"], asked["dir"]) == ({"steps": 3}, str(tmp_path))
    settings = asked["settings"]
    assert settings.console == "off" and settings.disable_code and settings.disable_git
    assert settings.x_disable_meta and settings.x_disable_stats and settings.x_disable_machine_info
    assert done == [(3, {"train/loss": 0.5}), "finish"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs wandb")
def test_offline_it_writes_into_the_folder_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = TRACKERS["wandb"](Tracked(tmp_path, "0a1b", "tiny", {"steps": 3}, 0))
    tracker.log({"train/loss": 0.5}, 1)
    tracker.close()
    (folder,) = (tmp_path / "wandb").glob("offline-run-*-0a1b")
    assert (folder / "run-0a1b.wandb").stat().st_size > 0
