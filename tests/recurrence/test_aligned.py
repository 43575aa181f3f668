"""Rows of their own depth, together: each is as if it had run alone."""

import dataclasses
import re

import pytest
import torch

from contract.zoo import noise, tiny, tokens
from looplab.recurrence import state as states
from looplab.recurrence.aligned import run_aligned
from looplab.recurrence.gradient import CheckpointApplication, FullBPTT, Implicit, TruncatedBPTT
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.loop import run_plan
from looplab.recurrence.plan import ModelLoop
from looplab.recurrence.trace import Recorder
from tiny import Mixing
from tolerances import EXACT, GRADIENTS, ROWS

DEPTHS = torch.tensor([2, 5, 1, 3, 5])
LETTERS = torch.tensor([[0, 1, 2], [3, 4, 5], [1, 1, 0], [5, 2, 3], [4, 0, 2]])
STRATEGIES = [
    FullBPTT(),
    TruncatedBPTT(window=2),
    TruncatedBPTT(window=4),
    CheckpointApplication(inner=TruncatedBPTT(window=2)),
]


def model(**fields):
    return Mixing(blocks=1, steps=6, dtype=torch.float64, **fields)


def started(made):
    context = made.encode(LETTERS)
    noise = torch.randn(5, 3, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return context, made.init_state(context, noise if made.spec.noise_width else None)


def alone(made, strategy):
    """Slow twin: every row by itself, in a loop."""
    rows = []
    for row, depth in enumerate(DEPTHS.tolist()):
        context, state = started(made)
        one = slice(row, row + 1)
        context, state = states.select(context, one), states.select(state, one)
        rows.append(run_plan(made, made.spec.plan(depth), context, state, gradient=strategy))
    return torch.cat(rows)


@pytest.mark.parametrize("bucket", [1, 2, 5, 8])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_states_and_gradients_are_those_of_every_row_alone(strategy, bucket):
    made = model()
    context, state = started(made)
    fast = run_aligned(made, DEPTHS, context, state, gradient=strategy, row_bucket=bucket)
    slow = alone(made, strategy)
    torch.testing.assert_close(fast, slow, **ROWS)
    weight = torch.randn(fast.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    parameters = (made.embedding, made.inner, made.across, made.index)
    for one, other in zip(*(torch.autograd.grad((s * weight).sum(), parameters) for s in (fast, slow)), strict=True):
        assert other.any()
        torch.testing.assert_close(one, other, **GRADIENTS)


def test_a_start_with_a_graph_is_reached_by_the_rows_whose_window_reaches_it():
    made = model(noise=True)
    context, state = started(made)
    state = state.clone().requires_grad_()
    end = run_aligned(made, DEPTHS, context, state, gradient=TruncatedBPTT(window=3))
    (slope,) = torch.autograd.grad(end.sum(), state)
    assert [bool(row.any()) for row in slope] == [depth <= 3 for depth in DEPTHS.tolist()]


def test_rows_that_all_have_one_depth_are_an_ordinary_run_to_the_bit():
    made = model()
    context, state = started(made)
    for one, other in (
        (run_aligned(made, torch.full((5,), 4), context, state), run_plan(made, made.spec.plan(4), context, state)),
    ):
        torch.testing.assert_close(one, other, **EXACT)


def test_a_registered_model_with_noise_and_prelude_too():
    made = tiny("tiny-core", dtype=torch.float64)
    context = made.encode(tokens(made, 5, 6))
    state = made.init_state(context, noise(made, context.positions, dtype=torch.float64))
    fast = run_aligned(made, DEPTHS, context, state)
    for row, depth in enumerate(DEPTHS.tolist()):
        one = slice(row, row + 1)
        slow = run_plan(made, made.spec.plan(depth), states.select(context, one), states.select(state, one))
        torch.testing.assert_close(states.select(fast, one), slow, **ROWS)


@pytest.mark.parametrize(("bucket", "launched"), [(1, 16), (2, 2 + 2 + 4 + 4 + 5), (4, 4 + 4 + 4 + 4 + 5), (5, 25)])
def test_the_ledger_counts_the_rows_that_were_launched(bucket, launched):
    made, ledger, recorder = model(), Ledger(), Recorder()
    context, state = started(made)
    run_aligned(made, DEPTHS, context, state, row_bucket=bucket, ledger=ledger, recorder=recorder)
    assert ledger.row_applications == launched
    assert ledger.launches == 5
    assert [len(s) for s in recorder.states] == [5, 2, 2, 3, 4, 5]
    assert int(DEPTHS.sum()) == 16


def test_backward_work_is_that_of_the_window():
    made, found = model(), []
    for strategy in (TruncatedBPTT(window=2), CheckpointApplication(inner=TruncatedBPTT(window=2))):
        ledger = Ledger()
        context, state = started(made)
        run_aligned(made, DEPTHS, context, state, gradient=strategy, ledger=ledger)
        found.append(ledger)
    carried = sum(min(2, depth) for depth in DEPTHS.tolist())
    for ledger in found:
        assert ledger.flops_backward * 16 == 2 * ledger.flops_forward * carried
    assert found[1].flops_recompute * 2 == found[1].flops_backward and found[0].flops_recompute == 0


def test_what_rows_of_their_own_depth_cannot_have_is_refused():
    two = Mixing(blocks=2, steps=3)
    context = two.encode(LETTERS)
    with pytest.raises(
        ValueError, match=re.escape("depth_per='sequence' needs a model that repeats one block. 'tiny'")
    ):
        run_aligned(two, DEPTHS, context, two.init_state(context, None))
    one = model()
    context, state = started(one)
    with pytest.raises(ValueError, match="needs a gradient strategy that cuts the graph only. Got Implicit. Use Trunc"):
        run_aligned(one, DEPTHS, context, state, gradient=Implicit())
    with pytest.raises(ValueError, match="iteration"):
        run_aligned(one, DEPTHS + 3, context, state)
    assert isinstance(one.spec.order, ModelLoop) and dataclasses.is_dataclass(one.spec)
