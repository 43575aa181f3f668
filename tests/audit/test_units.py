"""Units, kmid, inner runs and the full plan of a LoopSpec."""

import re

import pytest

from looplab.audit.units import FullPlan, cut_units, full_plan
from looplab.models.base import build
from looplab.models.looped import LoopedConfig
from looplab.nn.attention import Attention
from looplab.nn.mlp import SwiGLU
from looplab.nn.rope import Rope
from looplab.recurrence.depth import Grid
from looplab.recurrence.plan import Blocks, LayerLoop, ModelLoop, Plan, Sequential, TwoLevel
from looplab.recurrence.signal import AdaLN
from looplab.recurrence.spec import ClampLast
from tiny import Mixing, TinyDense, tiny_spec


def exactly(message):
    return f"^{re.escape(message)}$"


def shared(block, iteration):
    return 0


def anatomy(order, blocks=1, **more):
    return FullPlan.of(order.plan(order.default_steps, blocks), shared, **more)


ARCHITECTURES = {
    "model-loop": (ModelLoop(num_steps=4), 1, 1, 4, 4),
    "layer-loop": (LayerLoop(num_steps=2), 3, 1, 6, 2),
    "two blocks": (Blocks(num_steps=(4, 4)), 2, 1, 8, 4),
    "blocks of unequal length": (Blocks(num_steps=(3, 2)), 2, 1, 5, 3),
    "two levels": (TwoLevel(h=3, l=2), 2, 3, 3, 3),
    "one high cycle": (TwoLevel(h=1, l=2), 2, 1, 3, 2),
    "dense": (Sequential(), 6, 1, 6, 1),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_units_and_kmid_of_every_order(name):
    order, blocks, length, units, kmid = ARCHITECTURES[name]
    found = anatomy(order, blocks)
    assert {len(unit) for unit in found.units} == {length}
    assert (found.M, found.kmid) == (units, kmid)


def test_units_of_built_models():
    assert [full_plan(model.spec).kmid for model in (Mixing(), Mixing(blocks=1), TinyDense(4))] == [4, 4, 1]


def test_a_supervision_step_is_the_unit_of_a_plan_with_several_marks():
    plan = Plan.of([(0, 0), (0, 1), (1, 0), (0, 2), (0, 3), (1, 1)] * 2)
    assert [len(unit) for unit in cut_units(plan, (6, 12))] == [6, 6]
    assert [len(unit) for unit in cut_units(plan, (12,))] == [3, 3, 3, 3]


def test_the_low_steps_of_a_two_level_model_are_its_inner_runs():
    found = anatomy(TwoLevel(h=2, l=3), 2)
    assert found.inner_block == 0
    assert str(found.inner.plan) == "[0.0 0.1 0.2]"
    assert (found.inner.M, found.inner.kmid, found.inner.default_grid()) == (3, 3, (1, 2, 3))


def test_a_supervision_step_holds_one_inner_run_per_cycle():
    plan = Plan.of([(0, 0), (0, 1), (1, 0), (0, 2), (0, 3), (1, 1)] * 2)
    found = FullPlan.of(plan, shared, marks=(6, 12))
    assert (found.M, found.inner.M) == (2, 2)


@pytest.mark.parametrize(
    "pairs",
    [
        [(0, 0), (0, 1), (0, 2)],  # one core
        [(0, 0), (0, 1), (1, 0), (1, 1)],  # blocks in turn: each application is a unit
        [(0, 0), (1, 0), (0, 1), (1, 1)],  # a pass of single applications
        [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)],  # two blocks that both repeat
        [(0, 0), (0, 1), (1, 0), (0, 2), (0, 0), (0, 1), (1, 0), (0, 2)],  # the same block, not equally often
    ],
    ids=str,
)
def test_other_plans_have_no_inner_runs(pairs):
    found = FullPlan.of(Plan.of(pairs), shared)
    assert found.inner_block is None
    assert found.inner is None


def test_a_supervision_step_of_one_block_has_no_inner_run():
    found = FullPlan.of(Plan.of([(0, 0), (0, 1), (0, 2), (0, 3)]), shared, marks=(2, 4))
    assert (found.M, found.inner) == (2, None)


def indexed(order, blocks, limit, **more):
    return tiny_spec(order, blocks, 4, max_iteration=limit, index_parts=frozenset({"embedding"}), **more)


def test_steps_beyond_the_table_are_answered_with_the_extension():
    message = (
        "--num-steps 12 needs iteration indices 8..11, but the model has 8. Use --extend 12 to reuse trained indices."
    )
    with pytest.raises(ValueError, match=exactly(message)):
        full_plan(indexed(ModelLoop(num_steps=8), 1, 8), 12)


def test_the_extension_counts_units_of_all_blocks():
    message = (
        "--num-steps 4,6 needs iteration indices 4..5, but the model has 4. Use --extend 10 to reuse trained indices."
    )
    with pytest.raises(ValueError, match=exactly(message)):
        full_plan(indexed(Blocks(num_steps=(4, 4)), 2, 4), (4, 6))


def test_where_nothing_is_extended_fewer_steps_are_the_way_out():
    message = "--num-steps 2,5 needs iteration index 4, but the model has 4. Use at most 4 steps of each block."
    with pytest.raises(ValueError, match=exactly(message)):
        full_plan(indexed(Blocks(num_steps=(4, 4)), 2, 4), (2, 5))


def test_a_model_that_goes_on_past_its_table_runs_as_many_steps_as_asked():
    assert full_plan(indexed(ModelLoop(num_steps=8), 1, 8, beyond=ClampLast()), 12).M == 12


def stepwise():
    config = LoopedConfig(
        dim=8,
        vocab=11,
        attention=Attention(heads=2, kv_heads=2, head_dim=4, position=Rope(base=100.0)),
        ffn=SwiGLU(hidden=8),
        blocks=(1,),
        order=ModelLoop(num_steps=4),
        trained_depth=Grid(sizes=(0.25,) * 4),
        signal=AdaLN(freq_dim=4),
    )
    return build(config).spec


def test_a_model_conditioned_on_the_step_size_brings_its_grid():
    found = full_plan(stepwise())
    assert found.regrids
    assert found.grid(2) == (5, 6)
    with pytest.raises(ValueError, match=r"grid: k must be 1\.\.4"):
        full_plan(stepwise(), 5)


def test_without_a_grid_or_with_several_kinds_of_unit_nothing_is_regridded():
    grid = stepwise().grid
    assert not anatomy(ModelLoop(num_steps=4)).regrids
    assert not anatomy(Blocks(num_steps=(2, 2)), 2, grid=grid).regrids
    assert not anatomy(TwoLevel(h=2, l=2), 2, grid=grid).regrids, "two indices in one unit"
    passes = Plan.of([(0, 0), (1, 0), (0, 1), (1, 1)])
    assert FullPlan.of(passes, shared, grid=grid).regrids


def test_a_layer_view_is_declared_by_the_spec():
    assert not full_plan(Mixing().spec).layer_view
    assert full_plan(tiny_spec(ModelLoop(num_steps=2), 1, 4, refine=lambda: None)).layer_view
