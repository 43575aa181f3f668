import dataclasses
import re

import pytest

from looplab.recurrence.plan import Blocks, ModelLoop, Plan, TwoLevel
from looplab.recurrence.spec import (
    BlockSpec,
    ClampLast,
    Cycle,
    ParamCount,
    StateField,
    own_function,
    same_function,
)
from tiny import tiny_spec

INDEXED = {"index_parts": frozenset({"router"}), "max_iteration": 9}


def test_a_plan_defaults_to_the_checkpoints_own_steps():
    spec = tiny_spec(Blocks(num_steps=(2, 1)), 2, 4)
    assert str(spec.plan()) == "[0.0 0.1 1.0]"
    assert str(spec.plan(1)) == "[0.0 1.0]"
    assert str(spec.plan((0, 2))) == "[1.0 1.1]"
    assert spec.default_steps == (2, 1)


def test_marks_follow_the_order():
    assert tiny_spec(ModelLoop(num_steps=3), 1, 4).marks() == (3,)
    assert tiny_spec(ModelLoop(num_steps=3), 1, 4).marks(5) == (5,)


def test_an_index_past_the_table_is_refused_by_name():
    spec = tiny_spec(ModelLoop(num_steps=9), 1, 4, **INDEXED)
    spec.plan(9)
    with pytest.raises(
        ValueError,
        match=re.escape("router has 9 iterations; iteration 9 asked for. Choose beyond=ClampLast() or Cycle()"),
    ):
        spec.plan(12)


@pytest.mark.parametrize("beyond", [ClampLast(), Cycle()], ids=lambda b: type(b).__name__)
def test_an_index_past_the_table_is_allowed_where_it_has_a_meaning(beyond):
    assert len(tiny_spec(ModelLoop(num_steps=9), 1, 4, beyond=beyond, **INDEXED).plan(12)) == 12


def test_a_block_that_the_model_lacks_is_refused():
    with pytest.raises(ValueError, match=r"plan: block must be below 1\. Got 1 in \[0\.0 1\.0\]"):
        tiny_spec(ModelLoop(num_steps=2), 1, 4).check(Plan.parse("[0.0 1.0]"))


def test_more_steps_than_the_trained_grid_are_refused_where_ids_stand_for_step_sizes():
    def grid(k):
        if k > 4:
            raise ValueError(f"grid: k must be 1..4. Got {k}.")
        return tuple(range(k))

    spec = tiny_spec(ModelLoop(num_steps=4), 1, 4, max_iteration=10, grid=grid)
    assert len(spec.plan(4)) == 4
    assert len(spec.plan(0)) == 0
    with pytest.raises(ValueError, match=r"k must be 1\.\.4\. Got 7"):
        spec.plan(7)
    spec.check(Plan.parse("[0.4 0.5 0.6]"))  # ids of another grid, named one by one


def test_fewer_steps_are_equal_ones_to_the_same_end_where_iterations_have_step_sizes():
    grids = {1: (4,), 2: (5, 6), 3: (7, 8, 9), 4: (0, 1, 2, 3)}
    spec = tiny_spec(ModelLoop(num_steps=4), 1, 4, max_iteration=10, grid=grids.__getitem__)
    assert str(spec.plan(2)) == "[0.5 0.6]"
    assert str(spec.plan()) == "[0.0 0.1 0.2 0.3]"
    two = tiny_spec(Blocks(num_steps=(4, 4)), 2, 4, max_iteration=10, grid=grids.__getitem__)
    assert str(two.plan((1, 4))) == "[0.4 1.0 1.1 1.2 1.3]"


def test_the_writers_of_the_readout_are_known():
    spec = tiny_spec(TwoLevel(), 2, 4)
    state = {"high": StateField(width=4), "low": StateField(width=4, read_by_coda=False)}
    blocks = (
        BlockSpec(layers=(0,), params=1, reads=("high", "low"), writes=("low",)),
        BlockSpec(layers=(0,), params=0, reads=("high", "low"), writes=("high",)),
    )
    assert dataclasses.replace(spec, state=state, blocks=blocks).writes_readout == {1}
    assert tiny_spec(Blocks(num_steps=(1, 1)), 2, 4).writes_readout == {0, 1}


def test_the_total_sums_every_group():
    groups = [f.name for f in dataclasses.fields(ParamCount) if f.name not in ("core", "active")]
    count = ParamCount(core=(1000, 2000), active=7, **{name: 2**i for i, name in enumerate(groups)})
    assert count.total == 3000 + 2 ** len(groups) - 1


def test_operator_classes_of_plain_models():
    assert [same_function(b, t) for b in range(2) for t in range(2)] == [0, 0, 0, 0]
    assert [own_function(b, t) for b in range(2) for t in range(2)] == [0, 1, 0, 1]
