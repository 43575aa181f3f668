import torch

from looplab.models.base import build
from looplab.recipes import RECIPES
from looplab.recipes.depth_schedule import CPU, LAWS, SMOKE, depth_schedule


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
