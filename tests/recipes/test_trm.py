"""The recipe for tiny Sudoku: it learns from the first steps, and a run broken off in mid-carry is the same run."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from looplab.models.base import build
from looplab.models.puzzle import PuzzlePrefix
from looplab.recipes import RECIPES
from looplab.training.optimizer import SignSGD
from looplab.training.trainer import train
from tolerances import EXACT
from training.tiny_run import broken_off, metrics


def small(**changes):
    config = RECIPES["trm-sudoku-4x4"]()
    fields = {
        "steps": 20,
        "save_every": 20,
        "data": dataclasses.replace(config.data, rows=8),
        "schedule": dataclasses.replace(config.schedule, warmup_steps=5),
        "evaluation": dataclasses.replace(config.evaluation, every=100, items=4, depths=(1.0,)),
    }
    return dataclasses.replace(config, **{**fields, **changes})


def test_its_window_is_all_of_the_last_high_cycle():
    config = RECIPES["trm-sudoku-4x4"]()
    plan = build(config.model, device="meta").spec.plan(1)
    assert str(plan[-config.gradient.window :]) == "[0.3 0.4 0.5 1.1]"


def test_twenty_steps_make_the_loss_fall(tmp_path):
    record = train(small(), tmp_path / "run")
    losses = [line["loss"] for line in metrics(tmp_path / "run", "train")]
    assert losses[0] == pytest.approx(torch.log(torch.tensor(5.0)).item(), abs=0.4)
    assert sum(losses[-5:]) / 5 < losses[0] - 0.3
    assert record.loss > 0


def test_a_run_resumed_in_mid_carry_and_with_a_puzzle_table_ends_with_the_same_bits(tmp_path):
    config = small(steps=5, save_every=5)
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, steps=3, prefix=PuzzlePrefix(entries=2, width=64, slots=1)),
        optimizer=dataclasses.replace(config.optimizer, tables=SignSGD(lr=1e-2)),
    )
    train(config, tmp_path / "whole")
    part = broken_off(config, tmp_path / "part", steps=2)
    assert part.carry["steps"].tolist() == [2] * 8  # rows are under way
    train(config, tmp_path / "part")
    for name in ("model", "ema", "optimizer", "carry"):
        one, two = (load_file(tmp_path / run / "step_5" / f"{name}.safetensors") for run in ("whole", "part"))
        assert one.keys() == two.keys()
        torch.testing.assert_close(one, two, **EXACT)
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "part")
    table = load_file(tmp_path / "whole" / "step_5" / "model.safetensors")["puzzles.table"]
    assert table[0].any() and not table[1].any()
