import json
import time
from collections import Counter

import pytest
import torch

from contract.zoo import NAMES, depths, excused, noise, run, tiny, tokens
from looplab.models.base import PRESETS, build
from looplab.recurrence.gradient import CheckpointApplication, FullBPTT, SegmentedDetach, TruncatedBPTT
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.loop import forward, new_cache, run_plan, walk
from looplab.recurrence.plan import Plan, PlanNode
from looplab.recurrence.trace import Recorder

STRATEGIES = [
    FullBPTT(),
    TruncatedBPTT(window=1),
    TruncatedBPTT(window=3),
    SegmentedDetach(every=2),
    CheckpointApplication(),
    CheckpointApplication(inner=TruncatedBPTT(window=2)),
]
pytestmark = pytest.mark.filterwarnings("ignore:num_steps=:UserWarning")


@pytest.fixture(scope="module", params=NAMES)
def model(request):
    return tiny(request.param, dtype=torch.float32)


def plans(model):
    """The full plan, a prefix of it, and its end run twice."""
    full = model.spec.plan()
    return [full, full[: len(full) // 2], full + full[-2:]]


def per_block(plan):
    return Counter(block for block, _ in plan)


def pairs(model):
    return "causal" if model.spec.causal else "square"


def test_counts_are_the_cost_formulas_for_every_plan_window_and_recomputation(model, monkeypatch):
    monkeypatch.setattr(model, "step", lambda state, *args, **options: state)  # counts do not depend on values
    spec, rows = model.spec, 2
    ids = tokens(model, rows, 5)
    seq = ids.shape[1]
    shape = {"tokens": seq, "rows": rows, "pairs": pairs(model)}
    for plan in plans(model):
        for strategy in STRATEGIES:
            ledger = Ledger()
            run(model, ids, plan=plan, gradient=strategy, ledger=ledger, recorder=Recorder())
            inside = plan[len(plan) - strategy.gradient_count(len(plan)) :]
            assert ledger.flops_forward == spec.cost.forward(per_block(plan), **shape)
            assert ledger.flops_backward == spec.cost.backward(per_block(inside), **shape)
            again = sum(spec.cost.blocks[block].forward(**shape) for block, _ in inside)
            assert ledger.flops_recompute == (again if strategy.recomputes else 0)
            assert ledger.applications == {b: rows * n for b, n in per_block(plan).items()}
            assert (ledger.launches, ledger.row_applications) == (len(plan), rows * len(plan))
            assert (ledger.encoded_tokens, ledger.readouts, ledger.head_tokens) == (rows * seq, rows, rows * seq)


def test_without_gradient_nothing_is_counted_backward(model):
    ledger, ids = Ledger(), tokens(model, 2, 5)
    with torch.no_grad():
        run(model, ids, ledger=ledger, gradient=CheckpointApplication(), logits_to_keep=1)
    assert ledger.flops_backward == ledger.flops_recompute == 0
    shape = {"tokens": ids.shape[1], "rows": 2, "pairs": pairs(model)}
    expected = model.spec.cost.forward(per_block(model.spec.plan()), scored=1, **shape)
    assert ledger.flops_forward == expected


def test_rows_that_stopped_are_not_counted(model):
    spec, counts, ledger = model.spec, [2, 0, 1] if 0 in depths(model) else [1, 1, 1], Ledger()
    ids = tokens(model, 3, 4)
    run(model, ids, num_steps=torch.tensor(counts), ledger=ledger)
    shape = {"tokens": ids.shape[1], "pairs": pairs(model)}
    own = [spec.plan(n) for n in counts]
    assert ledger.row_applications == sum(map(len, own))
    ends = spec.cost.forward({}, rows=3, **shape)
    loops = sum(spec.cost.blocks[block].forward(**shape) for plan in own for block, _ in plan)
    assert ledger.flops_forward == ends + loops
    assert ledger.launches == len({application for plan in own for application in plan})


def test_decoding_in_pieces_costs_what_one_pass_costs_and_holds_the_bytes_of_the_formula(model):
    excused(model, "cache")
    spec, ids = model.spec, tokens(model, 2, 6)
    drawn = noise(model, torch.arange(6).expand(2, -1), dtype=torch.float32)
    cache, ledger = new_cache(spec, rows=2, capacity=9), Ledger()
    with torch.no_grad():
        for start, end in ((0, 4), (4, 5), (5, 6)):
            part = None if drawn is None else drawn[:, start:end]
            forward(model, ids[:, start:end], noise=part, cache=cache, ledger=ledger)
    per_row = 2 * 2 * sum(spec.cost.blocks[block].matmul_per_row for block, _ in spec.plan())  # again in every piece
    assert ledger.flops_forward == spec.cost.forward(per_block(spec.plan()), tokens=6, rows=2) + 2 * per_row
    per_token = spec.cost.kv_bytes_per_token("DepthIndexed", spec.plan().iterations(), itemsize=4)
    assert ledger.kv_bytes == 2 * 6 * per_token


def test_a_walk_counts_every_node_once():
    model = tiny("tiny-blocks", dtype=torch.float32)
    context = model.encode(tokens(model, 2, 3))
    first = PlanNode(Plan.parse("[0.0]")[0], children=[PlanNode(a) for a in Plan.parse("[0.1 1.0]")])
    ledger = Ledger()
    walk(model, context, model.init_state(context, None), PlanNode(None, children=[first]), print, ledger=ledger)
    assert ledger.applications == {0: 4, 1: 2}
    shape = {"tokens": 3, "rows": 2}
    first_block, second = (block.forward(**shape) for block in model.spec.cost.blocks)
    assert (ledger.flops_forward, ledger.flops_backward) == (2 * first_block + second, 0)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_of_every_size_count_by_their_formulas(name):
    model = build(PRESETS[name](), device="meta")
    spec, ledger = model.spec, Ledger()
    ledger.count_encode(spec, rows=2, tokens=7)
    for block, _ in spec.plan():
        ledger.count_step(spec, block, rows=2, tokens=7)
    ledger.count_coda(spec, rows=2, tokens=7)
    ledger.count_head(spec, tokens=14)
    pairs = "causal" if spec.causal else "square"
    assert ledger.flops_forward == spec.cost.forward(per_block(spec.plan()), tokens=7, rows=2, pairs=pairs)


def test_a_model_that_sees_both_ways_counts_every_pair():
    from looplab.nn.attention import Attention
    from looplab.nn.rope import NoPE

    config = PRESETS["tiny-dense"]()
    both = Attention(heads=2, kv_heads=2, head_dim=16, position=NoPE(), causal=False)
    model = build(type(config)(dim=32, vocab=64, layers=3, attention=both, ffn=config.ffn))
    ledger = Ledger()
    forward(model, torch.zeros(1, 5, dtype=torch.long), ledger=ledger)
    assert ledger.flops_forward == model.spec.cost.forward({0: 1, 1: 1, 2: 1}, tokens=5, pairs="square")


def test_ledgers_add_up():
    one = Ledger(applications={0: 1, 1: 2}, launches=3, encoded_tokens=4, readouts=5, head_tokens=6, flops_forward=7,
                 flops_backward=8, flops_recompute=9, kv_bytes=10, seconds={"a": 1.0})  # fmt: skip
    other = Ledger(applications={1: 5}, launches=30, encoded_tokens=40, readouts=50, head_tokens=60, flops_forward=70,
                   flops_backward=80, flops_recompute=90, kv_bytes=9, seconds={"a": 0.5, "b": 2.0})  # fmt: skip
    total = Ledger(applications={0: 1, 1: 7}, launches=33, encoded_tokens=44, readouts=55, head_tokens=66,
                   flops_forward=77, flops_backward=88, flops_recompute=99, kv_bytes=10,
                   seconds={"a": 1.5, "b": 2.0})  # fmt: skip
    assert one + other == total
    assert one.applications == {0: 1, 1: 2}


def test_a_ledger_is_json_without_times_the_same_for_equal_runs():
    model = tiny("tiny-core", dtype=torch.float32)
    dicts = []
    for _ in range(2):
        ledger = Ledger()
        with ledger.phase("forward"):
            run(model, tokens(model, 1, 3), ledger=ledger)
        dicts.append(ledger.to_dict(times=False))
        assert set(json.loads(json.dumps(ledger.to_dict()))) == {*dicts[-1], "seconds"}
    assert dicts[0] == dicts[1]
    assert dicts[0]["applications"] == {"0": 4}
    assert dicts[0]["row_applications"] == 4


def test_phases_add_their_wall_time_even_when_they_fail():
    ledger = Ledger()

    def fail():
        with ledger.phase("work"):
            time.sleep(0.01)
            raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            fail()
    assert ledger.seconds["work"] >= 0.02


def test_a_run_without_a_ledger_counts_nothing():
    model = tiny("tiny-core", dtype=torch.float32)
    context = model.encode(tokens(model, 1, 3))
    state = model.init_state(context, noise(model, context.positions, dtype=torch.float32))
    ledger = Ledger()
    run_plan(model, model.spec.plan(2), context, state)
    assert ledger == Ledger()
