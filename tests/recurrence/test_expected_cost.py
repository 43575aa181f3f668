import dataclasses

import numpy as np
import pytest
import torch

from contract.zoo import noise, tokens
from looplab.models.base import PRESETS, build
from looplab.recurrence.depth import Curriculum, PoissonDepth, PrefixDepth, UniformDepth
from looplab.recurrence.expected_cost import expected_flops, step_flops
from looplab.recurrence.gradient import CheckpointApplication, FullBPTT, GrowingWindow, TruncatedBPTT
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.loop import forward
from looplab.recurrence.philox import stream_key

ROWS, TOKENS = 2, 6


def model(law, preset="tiny-core"):
    return build(dataclasses.replace(PRESETS[preset](), trained_depth=law))


def executed(made, plan, strategy):
    """FLOPs that the ledger counts while a training step runs."""
    ledger, rows = Ledger(), tokens(made, ROWS, TOKENS)
    places = torch.arange(TOKENS).expand(ROWS, -1)
    start = noise(made, places, dtype=torch.float32) if made.spec.noise_width else None
    forward(made, rows, plan=plan, noise=start, gradient=strategy, ledger=ledger)
    return ledger.flops_forward + ledger.flops_backward + ledger.flops_recompute


@pytest.mark.parametrize(
    "strategy",
    [FullBPTT(), TruncatedBPTT(window=2), CheckpointApplication(inner=TruncatedBPTT(window=3))],
    ids=str,
)
def test_a_step_costs_what_the_ledger_counts_and_what_the_formula_says(strategy):
    made = model(UniformDepth(low=1, high=5))
    once, app = (
        step_flops(made.spec, made.spec.plan(n), TruncatedBPTT(window=100), rows=ROWS, tokens=TOKENS) for n in (0, 1)
    )
    app = (app - once) // 3
    for depth in range(1, 6):
        plan = made.spec.plan(depth)
        g, c = strategy.gradient_count(depth), strategy.recomputes
        found = step_flops(made.spec, plan, strategy, rows=ROWS, tokens=TOKENS)
        assert found == executed(made, plan, strategy)
        assert found == once + app * (depth + 2 * g + c * g)


def test_the_sum_over_drawn_depths_is_the_ledgers_and_its_mean_is_the_expectation():
    law = PoissonDepth(rate=3.0, max_steps=9)
    made, strategy = model(law), TruncatedBPTT(window=2)
    shape = {"rows": ROWS, "tokens": TOKENS}
    cost = np.array([step_flops(made.spec, made.spec.plan(n), strategy, **shape) if n else 0 for n in range(10)], float)
    drawn = law.draw(stream_key(0, "depth"), 0, np.arange(100_000))
    expected = expected_flops(made.spec, strategy, **shape)
    spread = cost[drawn].std() / np.sqrt(len(drawn))
    assert cost[drawn].mean() == pytest.approx(expected, abs=4 * spread)
    few = [int(law.draw(stream_key(0, "depth"), step, np.zeros(1, np.int64))[0]) for step in range(6)]
    assert sum(executed(made, made.spec.plan(n), strategy) for n in few) == cost[few].sum()


def test_the_expectation_follows_ramps_and_prefixes():
    law = Curriculum(law=PoissonDepth(rate=6.0, max_steps=20), ramp_steps=10)
    made, shape = model(law), {"rows": ROWS, "tokens": TOKENS}
    costs = [expected_flops(made.spec, FullBPTT(), **shape, step=step) for step in (0, 5, 10)]
    assert costs == sorted(costs) and costs[0] < costs[2] == expected_flops(made.spec, FullBPTT(), **shape)
    growing = GrowingWindow(window=8, ramp_steps=10)
    assert expected_flops(made.spec, growing, **shape, step=0) == expected_flops(
        made.spec, TruncatedBPTT(window=1), **shape, step=0
    )
    two = model(PrefixDepth(law=UniformDepth(low=1, high=4)), "tiny-blocks")
    plans = [two.spec.plan()[:n] for n in range(1, 5)]
    mean = sum(step_flops(two.spec, plan, FullBPTT(), **shape) for plan in plans) / 4
    assert expected_flops(two.spec, FullBPTT(), **shape) == pytest.approx(mean, rel=1e-12)
