import itertools

import pytest
import torch

from looplab.models.base import build
from looplab.recipes import RECIPES
from looplab.recipes.depth_schedule import (
    APPLICATIONS,
    CPU,
    FLOPS,
    LAWS,
    SMOKE,
    _costs,
    depth_schedule,
    matched_steps,
)
from looplab.recurrence.expected_cost import expected_flops
from looplab.training.step import draw_depth


def test_the_recipes_are_the_arms_at_the_size_of_one_cpu():
    for arm, (name, law) in LAWS.items():
        assert RECIPES[name]() == depth_schedule(arm, CPU, 0)
        assert RECIPES[name]().model.trained_depth.law == law


def test_the_initial_weights_do_not_depend_on_the_law():
    models = [depth_schedule(arm, SMOKE, 3).build_model() for arm in LAWS]
    for model in models[1:]:
        for (name, first), (_, other) in zip(models[0].named_parameters(), model.named_parameters(), strict=True):
            assert torch.equal(first, other), name
    other = depth_schedule("A", SMOKE, 4).build_model()
    assert not all(torch.equal(x, y) for x, y in zip(models[0].parameters(), other.parameters(), strict=True))


def test_the_plan_is_two_blocks_of_four():
    spec = build(RECIPES["depth-schedule-fixed"]().model, device="meta").spec
    assert str(spec.plan()) == "[0.0 0.1 0.2 0.3 1.0 1.1 1.2 1.3]"
    assert spec.index_parts
    assert (spec.cost.prelude.layers, spec.cost.coda.layers) == (2, 0)


def test_longer_runs_of_b_spend_what_a_spends():
    a, b = depth_schedule("A", CPU, 1), depth_schedule("B", CPU, 1)
    spec = build(b.model, device="meta").spec
    longer = depth_schedule("B_app", CPU, 1)
    drawn = sum(draw_depth(spec, 1, step)[0] for step in range(longer.steps))
    assert abs(drawn - 8 * a.steps) <= 4
    assert longer.steps == pytest.approx(a.steps * 16 / 9, rel=0.03)
    longer = depth_schedule("B_flop", CPU, 1)
    shape = {"rows": a.data.rows, "tokens": a.data.seq_len}
    whole = a.steps * expected_flops(build(a.model, device="meta").spec, a.gradient, **shape)
    assert sum(itertools.islice(_costs(longer, FLOPS), longer.steps)) == pytest.approx(whole, rel=1e-3)
    assert longer.steps * expected_flops(spec, b.gradient, **shape) == pytest.approx(whole, rel=0.03)


def test_a_run_is_as_long_as_itself():
    for what in (APPLICATIONS, FLOPS):
        run = depth_schedule("B", SMOKE, 2)
        assert matched_steps(run, run, what) == run.steps
