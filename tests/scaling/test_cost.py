"""Costs: the golden numbers of published designs, the ledger's counts, and what truncation saves."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from looplab.models.base import PRESETS, build
from looplab.nn.cost import CostSpec, Group
from looplab.recurrence.expected_cost import step_flops
from looplab.recurrence.gradient import TruncatedBPTT
from looplab.scaling.cost import Device, mean_flops, row_flops, serving_cost, training_flops
from looplab.scaling.family import IsoDepth, Shape

SQUARE = {"seq_len": 2048, "pairs": "square"}
SHAPES = st.builds(
    Shape,
    n_once=st.integers(0, 10**9),
    n_rec=st.integers(1, 10**9),
    layers_once=st.integers(0, 40),
    layers_core=st.integers(1, 40),
    width=st.integers(1, 10**4),
    vocab_size=st.integers(1, 10**6),
)


def test_tokens_at_a_budget_are_those_of_the_iso_depth_paper():
    """Printed: 955 M tokens at 1e18 FLOPs for r = 4 with injection, 973 M without."""
    for injection, millions in ((2, 955), (0, 973)):
        shape = IsoDepth(injection=injection).shape(640, 4)
        assert round(1e18 / mean_flops(shape, 4, 4, tokens=1, **SQUARE) / 1e6) == millions


def test_the_formula_of_one_core():
    shape = IsoDepth().shape(128, 4)
    for pairs, seen in (("square", 64), ("causal", 65 / 2)):
        attention = (12 * 4 + (4 * 4 + 8 * 2) * 4) * 128 * seen
        formula = 6 * shape.n_once + (2 * 4 + 4 * 2) * shape.n_rec + attention + 6 * 128 * 32_064
        assert training_flops(shape, 4, 2, seq_len=64, tokens=64, pairs=pairs) == formula * 64


@given(SHAPES, st.integers(1, 20), st.integers(1, 20))
@settings(max_examples=30, deadline=None)
def test_flops_rise_with_depth_and_window(shape, window, more):
    at = {"seq_len": 16, "tokens": 16}
    less, full = training_flops(shape, window + more, window, **at), training_flops(shape, window + more, **at)
    assert 0 < training_flops(shape, window, **at) < less < full
    assert less == pytest.approx(mean_flops(shape, window + more, window, **at), rel=1e-12)
    core = training_flops(shape, window + 1, **at) - training_flops(shape, window, **at)
    assert core == 6 * shape.n_rec * 16 + 12 * shape.layers_core * shape.width * 16 * 17 // 2


def test_readouts_and_a_prelude_without_gradient():
    cost = CostSpec(
        prelude=Group(matmul=10), blocks=(Group(matmul=100),), coda=Group(matmul=1000), head=Group(matmul=10_000)
    )
    plain = row_flops(cost, {0: 4}, {0: 2}, seq_len=1)
    assert plain == 2 * (3 * 10 + 4 * 100 + 2 * 2 * 100 + 3 * 11_000)
    assert row_flops(cost, {0: 4}, {0: 2}, seq_len=1, readouts=3) - plain == 2 * 2 * 3 * 11_000
    assert plain - row_flops(cost, {0: 4}, {0: 2}, seq_len=1, reinjected=False) == 2 * 2 * 10
    assert row_flops(cost, {0: 4}, {0: 4}, seq_len=1, reinjected=False) == row_flops(cost, {0: 4}, {0: 4}, seq_len=1)
    with pytest.raises(ValueError, match=r"window must be 0 to num_steps \(4\). Got 5"):
        row_flops(cost, {0: 4}, {0: 5}, seq_len=1)


@pytest.mark.parametrize("name", sorted(name for name in PRESETS if name.startswith("tiny-")))
def test_the_ledger_of_a_step_counts_the_same(name):
    """Every tiny architecture, as integers; `step_flops` is what the ledger counts while a step runs."""
    spec = build(PRESETS[name]()).spec
    for steps in (1, 3):
        steps = spec.default_steps if not isinstance(spec.default_steps, int) else steps
        try:
            plan = spec.plan(steps)
        except ValueError:
            plan = spec.plan()
        for window in (1, 2, len(plan)):
            kept = plan[max(0, len(plan) - window) :]
            counts = [
                {b: sum(block == b for block, _ in part) for b in range(len(spec.blocks))} for part in (plan, kept)
            ]
            ledger = step_flops(spec, plan, TruncatedBPTT(window=window), rows=1, tokens=6)
            pairs = "causal" if spec.causal else "square"
            assert row_flops(spec.cost, *counts, seq_len=6, pairs=pairs) == ledger


def test_serving_counts_and_estimates():
    shape = Shape(n_once=100, n_rec=1000, layers_once=2, layers_core=3, width=8, vocab_size=50, kv_width=4)
    device = Device(flops_per_second=1e3, bytes_per_second=1e9, launch_seconds=2.0, price_per_hour=3600.0)
    cost = serving_cost(shape, 4, context=10, batch=2, device=device)
    assert cost.decode_flops == 2 * 100 + 2 * 4 * 1000 + 4 * 8 * 10 * (2 + 4 * 3) + 2 * 8 * 50
    assert cost.kv_bytes_per_token == 2 * 4 * (2 + 4 * 3)
    assert cost.bytes_read == 2 * ((100 + 4 * 1000 + 400) / 2 + 10 * 4 * (2 + 4 * 3))
    assert cost.seconds == pytest.approx(cost.decode_flops / 1e3 + 5 * 2.0 / 2)
    assert cost.price_per_million == pytest.approx(cost.seconds * 1e6)
    assert serving_cost(shape, 4, context=10, kv_rule="Single").kv_bytes_per_token == 2 * 4 * 5
    assert serving_cost(shape, 4, context=10).seconds is None
    with pytest.raises(ValueError, match="kv_rule must be one of"):
        serving_cost(shape, 4, context=10, kv_rule="single")
    with pytest.raises(ValueError, match=r"Device.bytes_per_second must be above 0. Got 0"):
        Device(flops_per_second=1.0, bytes_per_second=0.0)
