"""Our schedules against the plans of the original protocol code, application by application."""

import json
import random
from pathlib import Path

import pytest

from looplab.audit.control import dense_depths
from looplab.audit.schedules import FullPlan, Schedule, full, permute, prefix, repeat, suffix
from looplab.recurrence.plan import Blocks, Plan, Sequential
from looplab.recurrence.spec import own_function

PLANS = json.loads((Path(__file__).parent / "dcp" / "plans.json").read_text())
TWO_BY_FOUR = FullPlan.of(Blocks(num_steps=(4, 4)).plan((4, 4), 2), own_function)
SCHEDULES = {
    **{f"{family}{k}": f"{family}({k})" for family in ("prefix", "suffix", "repeat") for k in range(1, 9)},
    "same4": "same(4)",
    "rfirst8": "repeat_first(8)",
    "cyclic8": "cyclic(8)",
    "extend12": "extend_last(12)",
    "extend16": "extend_last(16)",
    "cycle16": "extend_cycle(12)",  # the original names the length it meant; it runs 12 applications
}
SHUFFLED = "permute8"


def test_every_recorded_plan_has_its_schedule():
    assert set(PLANS["2x4"]) == {*SCHEDULES, SHUFFLED}


@pytest.mark.parametrize("name", SCHEDULES)
def test_two_blocks_of_four_run_the_recorded_plan(name):
    assert str(Schedule.parse(SCHEDULES[name]).plan(TWO_BY_FOUR)) == f"[{PLANS['2x4'][name]}]"


def test_the_recorded_permutation_shuffles_each_block_with_one_generator():
    # Ours draws by the same rule with the same generator, so the seed gives the recorded plan.
    draw, recorded = random.Random(0), Plan.parse(f"[{PLANS['2x4'][SHUFFLED]}]")
    orders = []
    for _ in range(2):
        order = list(range(4))
        while order == sorted(order):
            draw.shuffle(order)
        orders.append(order)
    assert recorded == Plan.of((block, t) for block, order in enumerate(orders) for t in order)
    assert permute(0).plan(TWO_BY_FOUR) == recorded


def dense(layers):
    return FullPlan.of(Sequential().plan(1, layers), own_function)


@pytest.mark.parametrize("layers", sorted(PLANS["dense"], key=int))
def test_dense_stacks_run_the_recorded_plans(layers):
    anatomy, recorded = dense(int(layers)), PLANS["dense"][layers]
    rules = {"full": lambda k: full(), "prefix": prefix, "suffix": suffix, "repeat": repeat}
    for name, plan in recorded.items():
        family = name.rstrip("0123456789")
        ours = rules[family](int(name.removeprefix(family) or 0)).plan(anatomy)
        assert [block for block, _ in ours] == [int(layer) for layer in plan.split()], name


def test_dense_depths_round_half_up_where_the_original_rounds_half_to_even():
    recorded = {
        int(layers): tuple(sorted({int(name[6:]) for name in plans if name.startswith("prefix")}))
        for layers, plans in PLANS["dense"].items()
    }
    assert recorded == {6: (2, 3, 4, 5), 10: (2, 5, 8, 9), 28: (7, 14, 21, 24, 26)}
    ours = {layers: dense_depths(layers) for layers in recorded}
    # Stricter: 0.25 * 10 and 0.75 * 6 are halves; the fractions are taken up there, so 3 and 5.
    assert ours == {6: (2, 3, 5), 10: (3, 5, 8, 9), 28: (7, 14, 21, 24, 26)}
