import pytest
import torch

from looplab.models.base import build
from looplab.nn.residual import LoomResidual, UnitResidual
from looplab.recipes import RECIPES
from looplab.recipes.stability import CPU, DEEPEST, EXPRESSIVE, KINDS, RATES, SMOKE, STABILISERS, stability


@pytest.mark.parametrize("kind", KINDS)
def test_every_arm_runs_as_many_layers_as_loops_ask_for(kind):
    spec = build(stability(kind, 4, RATES[0]).model, device="meta").spec
    assert sum(len(spec.blocks[block].layers) for block, _ in spec.plan()) == 8
    assert len({layer for block in spec.blocks for layer in block.layers}) == (8 if kind == "untied" else 2)


def test_the_recipes_are_arms_at_the_deepest_loop_and_the_middle_rate():
    for kind in STABILISERS:
        assert RECIPES[f"stability-{kind.replace('_', '-')}"]() == stability(kind, DEEPEST, RATES[1], CPU, 0)


def test_arms_of_one_shape_begin_with_equal_weights_whatever_loops_and_rate():
    models = [
        stability(kind, loops, rate, SMOKE, 2).build_model().state_dict()
        for kind, loops, rate in (("none", 1, RATES[0]), ("loom", 4, RATES[2]), ("end_norm", 16, RATES[1]),
                                  ("segments_3", 4, RATES[1]))
    ]  # fmt: skip
    for model in models[1:]:
        assert model.keys() == models[0].keys()
        assert all(torch.equal(model[name], tensor) for name, tensor in models[0].items())


def test_only_loom_scales_branches_and_only_wide_is_wide():
    for kind in KINDS:
        model = stability(kind, 4, RATES[0]).model
        assert isinstance(model.residual, LoomResidual if kind == "loom" else UnitResidual)
        assert model.dim == (2 * CPU.width if kind == "wide" else CPU.width)
    assert EXPRESSIVE == ("untied", "wide")


def test_a_run_is_evaluated_where_failure_is_judged():
    for size in (CPU, SMOKE):
        assert size.early % size.every == 0
        assert size.early < size.steps
