"""What trackers are told, that they go on after a resume, and that they harm no run."""

import json
import re
import warnings

import pytest

from looplab.training.folder import claimed, locked
from looplab.training.trackers import TRACKERS, TrackerError, Trackers, check_trackers
from looplab.training.trackers.base import IDENTITY, flat
from looplab.training.trainer import Trainer, train
from training.tiny_run import metrics, tiny_run
from training.trackers.recorded import logged, register


def test_an_interrupted_run_goes_on_as_the_same_run_of_the_tracker(tmp_path, monkeypatch):
    config, run = tiny_run(tmp_path, log_every=2, steps=7), tmp_path / "run"
    told = register(monkeypatch)
    with locked(run), claimed(run, config):
        trainer = Trainer(config, run, track=["kept"])
        for _ in range(3):
            trainer._train_step()
        trainer._save()
        trainer._train_step()  # after the checkpoint, so it is lost
        trainer.metrics.close()
    before = len(told)
    train(config, run, track=["kept"])
    (_, first), (_, second) = told[0], told[before]
    assert (first.step, second.step) == (0, 3)
    assert first.id == second.id == json.loads((run / IDENTITY).read_text())["id"]
    assert first.name == second.name == f"run-{first.id}"
    assert first.project == "tiny" and first.config["steps"] == 7
    assert told[-1] == ("close", None)
    one, two = logged(told[:before]), logged(told[before:])
    assert [step for step, _ in one] == [2, 4]
    assert [step for step, _ in two] == [4, 6, 6, 7, 7]  # evaluations, and the last step
    same = ("train/loss", "train/T", "train/parts/ce", "train/ledger/flops_forward")
    assert {name: one[1][1][name] for name in same} == {name: two[0][1][name] for name in same}
    line = metrics(run, "train")[-1]
    assert two[3][1]["train/loss"] == line["loss"]
    assert two[4][1]["eval/losses/4"] == metrics(run, "eval")[-1]["losses"]["4"]


@pytest.mark.parametrize("fails", ["start", "log", "close"])
def test_a_tracker_that_fails_warns_once_and_the_run_ends_as_without_it(tmp_path, monkeypatch, fails):
    config = tiny_run(tmp_path, steps=2, log_every=1)
    train(config, tmp_path / "alone")
    told = register(monkeypatch, fails=[fails])
    with pytest.warns(UserWarning, match=re.escape(f"Tracker kept failed (OSError: no {fails}).")) as caught:
        train(config, tmp_path / "run", track=["kept"])
    assert len([w for w in caught if "Tracker" in str(w.message)]) == 1
    assert told[-1][0] == fails  # it is not called again
    assert metrics(tmp_path / "run") == metrics(tmp_path / "alone")


def test_another_folder_is_another_run(tmp_path, monkeypatch):
    told, config = register(monkeypatch), tiny_run(tmp_path)
    for name in ("a", "b", "a"):
        (tmp_path / name).mkdir(exist_ok=True)
        Trackers(["kept"], tmp_path / name, config)
    ids = [run.id for _, run in told]
    assert ids[0] == ids[2] != ids[1]


def test_nobody_is_told_unless_asked(tmp_path, monkeypatch):
    told = register(monkeypatch)
    train(tiny_run(tmp_path, steps=1), tmp_path / "run")
    assert told == [] and not (tmp_path / "run" / IDENTITY).exists()


def test_lines_become_numbers_with_names():
    cells = [{"difficulty": 4, "num_steps": 8, "loss": 0.5, "exact_match": 1.0}]
    line = {"kind": "eval", "step": 3, "cells": cells, "losses": {2: 0.25}, "hash": "ab", "skipped": True, "x": None}
    assert dict(flat(line)) == {
        "eval/cells/4@8/loss": 0.5,
        "eval/cells/4@8/exact_match": 1.0,
        "eval/losses/2": 0.25,
        "eval/skipped": 1.0,
    }


def test_what_cannot_be_had_is_refused_by_name(monkeypatch):
    with pytest.raises(KeyError, match="Unknown tracker 'trakio'. Did you mean 'trackio'"):
        check_trackers(["trakio"])
    with pytest.raises(TrackerError, match="must name every tracker once"):
        check_trackers(["kept", "kept"] if register(monkeypatch) == [] else [])
    for name in ("trackio", "wandb"):
        monkeypatch.setattr(TRACKERS[name], "package", "not_installed")
        message = f"Got '{name}', whose package not_installed is missing. Install it: pip install 'looplab["
        with pytest.raises(TrackerError, match=re.escape(message)):
            check_trackers([name])


def test_a_refused_tracker_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(TRACKERS["wandb"], "package", "not_installed")
    with warnings.catch_warnings(), pytest.raises(TrackerError):
        train(tiny_run(tmp_path), tmp_path / "run", track=["wandb"])
    assert not (tmp_path / "run").exists()
