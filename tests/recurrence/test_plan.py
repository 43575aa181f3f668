import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looplab.recurrence.plan import (
    Application,
    Blocks,
    DeepSupervision,
    LayerLoop,
    ModelLoop,
    Plan,
    PlanNode,
    Sequential,
    TwoLevel,
    check_steps,
)

pairs = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 400)), max_size=12)


@pytest.mark.parametrize(
    ("order", "steps", "blocks", "written"),
    [
        (ModelLoop(num_steps=3), 3, 1, "[0.0 0.1 0.2]"),
        (ModelLoop(num_steps=3), (2,), 1, "[0.0 0.1]"),
        (LayerLoop(num_steps=2), 2, 3, "[0.0 0.1 1.0 1.1 2.0 2.1]"),
        (Blocks(num_steps=(4, 4)), (4, 4), 2, "[0.0 0.1 0.2 0.3 1.0 1.1 1.2 1.3]"),
        (Blocks(num_steps=(4, 4)), 2, 2, "[0.0 0.1 1.0 1.1]"),
        (Blocks(num_steps=(4, 4)), (1, 3), 2, "[0.0 1.0 1.1 1.2]"),
        (TwoLevel(h=2, l=2), (2, 2), 2, "[0.0 0.1 1.0 0.2 0.3 1.1]"),
        (TwoLevel(h=2, l=3), 1, 2, "[0.0 0.1 0.2 1.0]"),
        (DeepSupervision(steps=4, h=1, l=2), 2, 2, "[0.0 0.1 1.0 0.2 0.3 1.1]"),
        (DeepSupervision(steps=4, h=2, l=1), (1,), 2, "[0.0 1.0 0.1 1.1]"),
        (DeepSupervision(steps=4, h=2, l=1), 0, 2, "[]"),
        (Sequential(), 1, 3, "[0.0 1.0 2.0]"),
        (ModelLoop(num_steps=3), 0, 1, "[]"),
        (TwoLevel(), 0, 2, "[]"),
    ],
)
def test_orders_give_the_plans_of_their_definition(order, steps, blocks, written):
    plan = order.plan(steps, blocks)
    assert str(plan) == written
    assert Plan.parse(written) == plan


def test_a_supervision_step_of_trm_has_21_applications():
    order = DeepSupervision(steps=16, h=3, l=6)
    assert order.plan(1, 2) == TwoLevel(h=3, l=6).plan((3, 6), 2)
    assert order.applications == len(order.plan(1, 2)) == 21
    assert order.plan(order.default_steps, 2).iterations() == {0: 16 * 18, 1: 16 * 3}


@pytest.mark.parametrize(
    "order",
    [ModelLoop(num_steps=5), TwoLevel(h=5, l=2), DeepSupervision(steps=5, h=2, l=2)],
    ids=["model-loop", "two-level", "supervision"],
)
@given(short=st.integers(0, 6), more=st.integers(0, 4))
def test_fewer_steps_are_a_prefix_of_more(order, short, more):
    blocks = 1 if isinstance(order, ModelLoop) else 2
    plan, longer = order.plan(short, blocks), order.plan(short + more, blocks)
    assert longer[: len(plan)] == plan


def test_default_steps_are_those_of_the_checkpoint():
    assert ModelLoop(num_steps=3).default_steps == 3
    assert LayerLoop(num_steps=2).default_steps == 2
    assert Blocks(num_steps=(4, 2)).default_steps == (4, 2)
    assert TwoLevel(h=2, l=3).default_steps == (2, 3)
    assert Sequential().default_steps == 1


def test_the_readout_is_trained_at_the_end_of_the_plan():
    assert ModelLoop(num_steps=3).marks(3, 1) == (3,)
    assert TwoLevel(h=2, l=3).marks((2, 3), 2) == (8,)


def test_deep_supervision_trains_the_readout_after_every_step():
    order = DeepSupervision(steps=3, h=2, l=3)
    assert order.default_steps == 3
    assert order.marks(3, 2) == (8, 16, 24)
    assert order.marks(0, 2) == ()


@given(pairs)
def test_plans_survive_being_written_and_read(entries):
    plan = Plan.of(entries)
    assert Plan.parse(str(plan)) == plan
    assert hash(Plan.parse(str(plan))) == hash(plan)
    assert Plan.parse(f"  {plan}\n") == plan


@given(pairs, st.integers(-15, 15))
def test_a_plan_is_a_sequence_of_applications(entries, cut):
    plan = Plan.of(entries)
    assert len(plan) == len(entries)
    assert [tuple(application) for application in plan] == entries
    assert plan[:cut] + plan[cut:] == plan
    if entries:
        assert plan[-1] == Application(*entries[-1])


@pytest.mark.parametrize(
    "text", ["", "0.0 0.1", "[0.0,0.1]", "[0]", "[0.0 0.1", "[a.b]", "[0.00.1]", "[-1.0]", "[1.2.3]"]
)
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match=r"Plan must be written like \[0\.0 0\.1 1\.0\]\. Got"):
        Plan.parse(text)


def test_negative_numbers_are_refused():
    with pytest.raises(ValueError, match=r"block and iteration must be at least 0\. Got \(0, -1\)"):
        Plan.of([(0, 0), (0, -1)])


def test_iterations_count_the_distinct_indices_of_each_block():
    plan = Plan.parse("[0.2 0.3 1.0 0.2]")
    assert plan.iterations() == {0: 2, 1: 1}
    assert plan.indices() == {0: (2, 3, 2), 1: (0,)}
    assert Plan.parse("[]").iterations() == {}


@pytest.mark.parametrize("steps", [-1, 2.5, "3", True, None, (1, -1), (1, 2.0), ()])
def test_steps_that_are_no_counts_are_refused(steps):
    with pytest.raises(ValueError, match=re.escape(f"num_steps must be an int >= 0 or Int[batch]. Got {steps!r}")):
        check_steps(steps)


@pytest.mark.parametrize("steps", [0, 7, (3, 1)])
def test_counts_pass(steps):
    assert check_steps(steps) == steps


@pytest.mark.parametrize(
    ("order", "steps", "blocks", "message"),
    [
        (ModelLoop(num_steps=2), 2, 2, "ModelLoop repeats one block. Got 2 blocks"),
        (ModelLoop(num_steps=2), (2, 2), 1, r"num_steps of ModelLoop must be one int. Got \(2, 2\)"),
        (LayerLoop(num_steps=2), (2, 2), 2, "num_steps of LayerLoop must be one int"),
        (Blocks(num_steps=(2, 2)), (2, 2, 2), 2, r"one entry per block \(2\). Got \(2, 2, 2\)"),
        (TwoLevel(), (2, 0), 2, r"at least 1 low step. Got \(2, 0\)"),
        (DeepSupervision(steps=2, h=1, l=1), (2, 3), 2, r"num_steps of DeepSupervision must be one int. Got \(2, 3\)"),
        (TwoLevel(), (2,), 2, r"\(high cycles, low steps per cycle\).* Got \(2,\)"),
        (Sequential(), 2, 3, "num_steps of a dense model must be 1"),
        (Sequential(), 0, 3, "num_steps of a dense model must be 1"),
    ],
)
def test_steps_that_do_not_fit_the_order_are_refused(order, steps, blocks, message):
    with pytest.raises(ValueError, match=message):
        order.plan(steps, blocks)


@pytest.mark.parametrize("counts", [{"h": 0}, {"l": 0}, {"repeats": 0}])
def test_two_levels_need_every_count(counts):
    with pytest.raises(ValueError, match=r"DeepSupervision\.h must be at least 1\. Got 0\."):
        DeepSupervision(steps=1, h=0, l=1)
    with pytest.raises(ValueError, match=r"TwoLevel\.h, l and repeats must be at least 1\. Got"):
        TwoLevel(**counts)


def test_orders_refuse_steps_that_are_no_counts():
    for make in (lambda: ModelLoop(num_steps=-1), lambda: LayerLoop(num_steps=-1), lambda: Blocks(num_steps=(1, -1))):
        with pytest.raises(ValueError, match="num_steps must be an int >= 0"):
            make()


def test_a_trie_counts_its_applications_without_the_root():
    leaf = PlanNode(Application(0, 1), wanted=["two"])
    root = PlanNode(None, children=[PlanNode(Application(0, 0), children=[leaf])])
    assert (root.size(), root.children[0].size(), leaf.size()) == (2, 2, 1)
