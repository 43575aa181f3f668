import dataclasses
import json
import math

import pytest
import torch

from looplab.models.base import build
from looplab.recipes import RECIPES
from looplab.recipes.par import ARMS, ITERATIONS, LENGTH, SWAPS, par_arm, smoke
from looplab.training.trainer import train


def trained(name, folder):
    """Metrics of 20 steps."""
    train(smoke(par_arm(name)), folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "train"]


def test_the_recipe_has_the_size_of_its_table():
    model = build(RECIPES["par-swap-s5"]().model, device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == 76_257


def test_the_loss_falls_from_that_of_a_guess(tmp_path):
    lines = trained("main", tmp_path)
    losses = [line["loss"] for line in lines]
    assert len(losses) == 20
    assert losses[0] == pytest.approx(5 * math.log(5), abs=2.5)
    assert sum(losses[-4:]) < sum(losses[:4])
    assert {line["g"] for line in lines} == {ITERATIONS}, "burn-in has no gradient"
    assert len({line["n0"] for line in lines}) > 1


UNLIKE = ("final_only", "distillation", "halting", "indexed", "written", "add_soft_anchor", "layout_answer", "falling")
"""Arms with an objective, a model or words of their own; the others change a number."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in UNLIKE else pytest.mark.nightly) for name in ARMS if name != "main"],
)
def test_every_arm_learns_something_in_twenty_steps(tmp_path, name):
    losses = [line["loss"] for line in trained(name, tmp_path)]
    assert sum(losses[-4:]) < sum(losses[:4])


def test_the_main_arm_is_the_recipe():
    run = RECIPES["par-swap-s5"]()
    assert dataclasses.replace(par_arm("main"), evaluation=run.evaluation) == run
    assert dataclasses.replace(par_arm("main", seed=3), seed=0) == par_arm("main")


def test_the_recipe_without_a_window_is_an_arm():
    run, arm = RECIPES["par-swap-s5-causal"](), par_arm("falling")
    assert run.model == arm.model and run.model.attention.window is None
    assert run.objective == RECIPES["par-swap-s5"]().objective and run.steps == arm.steps


def test_no_two_arms_are_the_same_run():
    runs = [dataclasses.replace(par_arm(name), recipe="") for name in ARMS]
    assert all(runs.count(run) == 1 for run in runs)
    assert len({par_arm(name).recipe for name in ARMS}) == len(ARMS)


@pytest.mark.parametrize("name", ["no_anchor", "final_only", "every_iteration", "no_replay", "no_noise"])
def test_arms_of_one_shape_share_initial_weights_and_words(name):
    main, other = par_arm("main", 3), par_arm(name, 3)
    pairs = zip(main.build_model().named_parameters(), other.build_model().named_parameters(), strict=True)
    for (parameter, first), (_, second) in pairs:
        assert torch.equal(first, second), parameter
    batches = [run.data.load(seed=3, vocab_size=len(SWAPS.tokens)).batch(5) for run in (main, other)]
    assert torch.equal(batches[0].tokens, batches[1].tokens)


def test_arms_without_progress_read_the_answer_alone():
    for name in ("final_only", "add_final_only", "final_lengths", "distillation"):
        batch = par_arm(name).data.load(seed=0, vocab_size=len(SWAPS.tokens)).batch(0)
        assert (batch.labels[:, :-1] == -100).all(), name
        assert (batch.labels[:, -1] >= 0).all(), name


def test_words_of_distillation_have_every_length_and_are_those_of_its_control():
    loaders = [par_arm(name).data.load(seed=0, vocab_size=11) for name in ("distillation", "final_lengths")]
    assert {loaders[0].difficulty(step) for step in range(100)} == set(range(1, LENGTH + 1))
    assert torch.equal(loaders[0].batch(7).tokens, loaders[1].batch(7).tokens)


def test_the_indexed_arm_knows_its_iteration_and_the_recipe_does_not():
    assert build(par_arm("indexed").model, device="meta").spec.index_parts
    assert not build(par_arm("main").model, device="meta").spec.index_parts


def test_the_written_arms_differ_in_steps_alone():
    short, long = par_arm("written"), par_arm("written_longer")
    assert long.steps > short.steps == par_arm("main").steps
    assert long.model == short.model and long.data == short.data
