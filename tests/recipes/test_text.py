"""The recipes of the built-in checkpoints: comparable, small, and learning from the first steps."""

import dataclasses

import pytest

from looplab.models.base import build
from looplab.recipes import RECIPES
from looplab.training.trainer import train
from training.tiny_run import metrics

TEXT = ("text-2x4-fixed", "text-2x4-sampled", "text-dense", "text-core")


def executed_layers(config):
    spec = build(config, device="meta").spec
    once = spec.cost.prelude.layers + spec.cost.coda.layers
    return once + sum(spec.cost.blocks[block].layers for block, _ in spec.plan())


def test_the_arms_differ_in_depth_only():
    configs = [RECIPES[name]() for name in TEXT]
    assert {executed_layers(c.model) for c in configs} == {10}
    for config in configs[1:]:
        assert dataclasses.replace(config, recipe="", model=configs[0].model) == dataclasses.replace(
            configs[0], recipe=""
        )
    fixed, sampled = configs[:2]
    assert dataclasses.replace(sampled.model, trained_depth=fixed.model.trained_depth) == fixed.model


def test_the_laws_are_those_of_the_arms():
    fixed, sampled, _, core = (build(RECIPES[name]().model, device="meta").spec for name in TEXT)
    assert fixed.trained_depth.of_prefix
    assert fixed.trained_depth.support() == core.trained_depth.support() == (8,)
    assert sampled.trained_depth.support() == tuple(range(1, 9))
    assert sampled.trained_depth.of_prefix
    assert (len(fixed.plan()), len(core.plan())) == (8, 8)
    assert fixed.index_parts
    assert not core.index_parts


def test_the_checkpoints_fit_into_four_megabytes():
    parameters = sum(build(RECIPES[name]().model, device="meta").spec.params.total for name in TEXT)
    assert 4 * parameters < 4e6


@pytest.mark.slow
@pytest.mark.parametrize("name", TEXT)
def test_twenty_steps_make_the_loss_fall(tmp_path, name):
    config = RECIPES[name]()
    packing = dataclasses.replace(config.data.packing, rows=4, seq_len=64)
    config = dataclasses.replace(
        config,
        steps=20,
        data=dataclasses.replace(config.data, packing=packing),
        schedule=dataclasses.replace(config.schedule, warmup_steps=5),
        evaluation=dataclasses.replace(config.evaluation, batches=1, depths=(10,) if name == "text-dense" else (8,)),
    )
    record = train(config, tmp_path / "run")
    losses = [line["loss"] for line in metrics(tmp_path / "run", "train")]
    assert losses[0] == pytest.approx(5.56, abs=0.1)
    assert sum(losses[-4:]) / 4 < 4.2
    assert record.loss < 4.5
