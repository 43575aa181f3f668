"""The recipe of the checkpoint that is served out of the box."""

import dataclasses
import json

import pytest
import torch

from looplab.engine.gates import gates_of
from looplab.engine.verdict import read_results
from looplab.interop import load
from looplab.models.base import build
from looplab.models.folder import weight_hash
from looplab.recipes import RECIPES
from looplab.recipes.demo import STEPS
from looplab.recurrence.exit import HazardExit, exit_points, forward_until
from looplab.training.trainer import train


def test_it_may_stop_after_every_step_and_is_small():
    config = RECIPES["demo"]()
    spec = build(config.model, device="meta").spec
    assert list(exit_points(spec)) == [1, 2, 3, STEPS]
    HazardExit(threshold=0.5).check(spec)
    assert 4 * spec.params.total < 1.5e6


@pytest.mark.slow
def test_a_few_steps_make_the_loss_fall(tmp_path):
    config = RECIPES["demo"]()
    packing = dataclasses.replace(config.data.packing, rows=4, seq_len=64)
    config = dataclasses.replace(
        config,
        steps=12,
        data=dataclasses.replace(config.data, packing=packing),
        schedule=dataclasses.replace(config.schedule, warmup_steps=4),
        evaluation=dataclasses.replace(config.evaluation, batches=1),
    )
    record = train(config, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["parts"]["expected_ce"] for line in lines if line["kind"] == "train"]
    assert losses[-1] < losses[0] - 0.5 and record.loss < losses[0]


def test_the_built_in_demo_is_that_of_the_recipe_and_exits_mean_something():
    loaded = load("demo")
    assert loaded.model.config == RECIPES["demo"]().model
    weights = weight_hash(loaded.model)
    assert set(gates_of(loaded.folder, loaded.model)) == {"lookahead", "preloop", "same_step"}
    (result,) = read_results(loaded.folder)
    assert (result.weights, result.exit_rule) == (weights, "hazard(0.5)")
    assert sum(file.stat().st_size for file in loaded.folder.rglob("*") if file.is_file()) < 1.5e6
    text = (
        "Return a new list containing all items from the iterable in ascending order.\n\nA custom key function can be"
    )
    tokens = torch.tensor([loaded.tokenizer.encode(text)])
    with torch.no_grad():
        steps = forward_until(loaded.model, tokens, HazardExit(threshold=0.5)).steps
    assert len(set(steps.flatten().tolist())) >= 3, "tokens hardly differ in depth"
