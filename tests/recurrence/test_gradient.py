"""Closed forms are those of a linear core h' = A h + B e with loss v.h_T: dL/dB = sum over i < T of (A^T)^i v e^T."""

import dataclasses
import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contract.zoo import noise, tiny, tokens
from looplab.models.base import PRESETS, build
from looplab.recurrence import state as states
from looplab.recurrence.depth import Unknown
from looplab.recurrence.gradient import (
    GRADIENT_STRATEGIES,
    CheckpointApplication,
    CheckpointUnit,
    FullBPTT,
    GrowingWindow,
    Implicit,
    LastStep,
    NotConverged,
    SegmentedDetach,
    TruncatedBPTT,
)
from looplab.recurrence.gradient.implicit import fixed_point
from looplab.recurrence.loop import run_plan
from looplab.recurrence.plan import LayerLoop, ModelLoop, Plan
from looplab.recurrence.trace import Recorder
from tiny import Mixing
from tolerances import EXACT, TWIN

DIM = 6
STEPS = 7
strategies = (
    st.just(FullBPTT())
    | st.integers(1, 12).map(lambda n: TruncatedBPTT(window=n))
    | st.integers(1, 12).map(lambda n: SegmentedDetach(every=n))
)


def linear_core():
    """A = 0.9 * rotation, B, e, v, h_0."""
    make = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=make, dtype=torch.float64)  # noqa: E731
    a = 0.9 * torch.linalg.qr(draw(DIM, DIM)).Q
    return a, draw(DIM, DIM).requires_grad_(), draw(DIM), draw(DIM), draw(DIM).requires_grad_()


def chain(steps):
    return ModelLoop(num_steps=steps).plan(steps, 1)


def term(a, v, e, i):
    return torch.outer(torch.linalg.matrix_power(a.T, i) @ v, e)


def walked(strategy, steps=STEPS):
    """dL/dB and dL/dh_0, with a loss v.h at the end of every segment."""
    a, b, e, v, h = linear_core()
    step = strategy.wrap(lambda h, e: a @ h + b @ e)
    losses = []
    strategy.walk(chain(steps), lambda h, unit: step(h, e), h, lambda h, done: losses.append(v @ h))
    return torch.autograd.grad(sum(losses), (b, h), allow_unused=True)


def test_full_back_propagation_has_the_whole_sum():
    a, _, e, v, _ = linear_core()
    gradient, start = walked(FullBPTT())
    torch.testing.assert_close(gradient, sum(term(a, v, e, i) for i in range(STEPS)), **TWIN)
    torch.testing.assert_close(start, torch.linalg.matrix_power(a.T, STEPS) @ v, **TWIN)


@pytest.mark.parametrize("window", [1, 3, 6])
def test_truncation_has_the_terms_inside_the_window(window):
    a, _, e, v, _ = linear_core()
    gradient, start = walked(TruncatedBPTT(window=window))
    torch.testing.assert_close(gradient, sum(term(a, v, e, i) for i in range(window)), **TWIN)
    assert start is None


@pytest.mark.parametrize("every", [1, 3, 7])
def test_segments_have_the_terms_inside_each_segment(every):
    a, _, e, v, _ = linear_core()
    gradient, _ = walked(SegmentedDetach(every=every))
    lengths = [min(every, STEPS - start) for start in range(0, STEPS, every)]
    torch.testing.assert_close(gradient, sum(term(a, v, e, i) for n in lengths for i in range(n)), **TWIN)


@pytest.mark.parametrize("window", [STEPS, STEPS + 1, 100])
def test_a_window_over_everything_is_full_back_propagation_to_the_bit(window):
    for one, other in zip(walked(TruncatedBPTT(window=window)), walked(FullBPTT()), strict=True):
        torch.testing.assert_close(one, other, **EXACT)


@pytest.mark.parametrize(
    "inner", [FullBPTT(), TruncatedBPTT(window=3), SegmentedDetach(every=3)], ids=lambda s: type(s).__name__
)
def test_recomputation_changes_no_bit(inner):
    for one, other in zip(walked(CheckpointApplication(inner=inner)), walked(inner), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, **EXACT)


@given(strategies, st.integers(0, 20))
def test_segments_cover_the_plan_once_and_the_window_is_min_of_window_and_length(strategy, length):
    segments = strategy.segments(length)
    assert [s.start for s in segments] == [0, *(s.stop for s in segments[:-1])]
    assert segments[-1].stop == length
    with_gradient = strategy.gradient_count(length)
    without = sum(s.stop - s.start for s in segments if not s.gradient)
    assert with_gradient + without == length
    assert with_gradient == (min(strategy.window, length) if isinstance(strategy, TruncatedBPTT) else length)
    again = CheckpointApplication(inner=strategy)
    assert again.segments(length) == segments
    assert (strategy.recomputes, again.recomputes) == (False, True)


def test_segment_ends_are_announced_before_the_cut_and_windows_only_where_gradient_flows():
    ended = []
    start = torch.ones(1, requires_grad=True)
    step = lambda h, unit: h * 1  # noqa: E731
    SegmentedDetach(every=3).walk(chain(7), step, start, lambda h, done: ended.append((done, h.requires_grad)))
    TruncatedBPTT(window=2).walk(chain(7), step, start, lambda h, done: ended.append((done, h.requires_grad)))
    # Later segments start from detached states, and nothing here but the state has a gradient.
    assert ended == [(3, True), (6, False), (7, False), (7, False)]


def test_nothing_carries_gradient_under_no_grad():
    with torch.no_grad():
        assert not FullBPTT().walk(chain(2), lambda h, unit: h * 1, torch.ones(1, requires_grad=True)).requires_grad


def test_a_run_in_segments_needs_somebody_who_reads_their_ends():
    model = Mixing(blocks=1, steps=5)
    context = model.encode(torch.zeros(1, 3, dtype=torch.long))
    state = model.init_state(context, None)
    with pytest.raises(
        ValueError,
        match=re.escape(
            "SegmentedDetach(every=2) needs a loss after 2, 4, 5 applications; nothing reads the states there. "
            "Give on_segment_end or a recorder that keeps states, or use TruncatedBPTT"
        ),
    ):
        run_plan(model, chain(5), context, state, gradient=SegmentedDetach(every=2))
    with torch.no_grad():
        run_plan(model, chain(5), context, state, gradient=SegmentedDetach(every=2))
    run_plan(model, chain(2), context, state, gradient=SegmentedDetach(every=2))
    recorder = Recorder()
    run_plan(model, chain(5), context, state, gradient=SegmentedDetach(every=2), recorder=recorder)
    assert all(recorder.states[end].requires_grad for end in (2, 4, 5))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TruncatedBPTT(window=0), "TruncatedBPTT.window must be at least 1. Got 0."),
        (lambda: SegmentedDetach(every=0), "SegmentedDetach.every must be at least 1. Got 0."),
        (
            lambda: CheckpointApplication(inner=CheckpointApplication()),
            "CheckpointApplication.inner must be another strategy. Got CheckpointApplication.",
        ),
        (lambda: SegmentedDetach(every=1, last=0), "SegmentedDetach.last must be at least 1, or None. Got 0."),
        (lambda: GrowingWindow(window=0, ramp_steps=1), "GrowingWindow.window must be at least 1. Got 0."),
        (lambda: Implicit(max_iter=0), "Implicit.max_iter must be at least 1. Got 0."),
        (lambda: Implicit(tol=0.0), "Implicit.tol must be positive. Got 0.0."),
        (
            lambda: CheckpointApplication(inner=Implicit()),
            "CheckpointApplication.inner must be a strategy that cuts the graph only. Got Implicit. Use it alone.",
        ),
        (
            lambda: CheckpointUnit(inner=CheckpointApplication()),
            "CheckpointUnit.inner must be another strategy. Got CheckpointApplication.",
        ),
    ],
)
def test_impossible_windows_are_refused(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_every_registered_strategy_is_tested_here():
    assert set(GRADIENT_STRATEGIES) == {
        "full",
        "truncated",
        "segmented",
        "last_step",
        "growing",
        "implicit",
        "checkpoint",
        "checkpoint_unit",
    }


def test_the_last_step_alone_is_a_window_of_one():
    for one, other in zip(walked(LastStep()), walked(TruncatedBPTT(window=1)), strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
    assert LastStep().segments(0) == TruncatedBPTT(window=1).segments(0)


@pytest.mark.parametrize(("every", "last"), [(2, 5), (3, 3), (2, 9)])
def test_segments_of_the_last_applications_only(every, last):
    a, _, e, v, _ = linear_core()
    strategy = SegmentedDetach(every=every, last=last)
    gradient, start = walked(strategy)
    inside = min(last, STEPS)
    lengths = [min(every, inside - start) for start in range(0, inside, every)]
    torch.testing.assert_close(gradient, sum(term(a, v, e, i) for n in lengths for i in range(n)), **TWIN)
    assert strategy.gradient_count(STEPS) == inside
    assert (start is None) == (last < STEPS)


def test_a_growing_window_grows_to_its_size():
    strategy = GrowingWindow(window=8, ramp_steps=100)
    assert [strategy.at(step).window for step in (0, 1, 12, 13, 50, 99, 100, 1000)] == [1, 1, 1, 2, 4, 8, 8, 8]
    assert strategy.segments(20) == TruncatedBPTT(window=8).segments(20)
    assert GrowingWindow(window=8, ramp_steps=100, shape="one_minus_sqrt").at(50).window == 3
    inner = CheckpointApplication(inner=strategy)
    assert inner.at(50) == CheckpointApplication(inner=TruncatedBPTT(window=4))
    assert FullBPTT().at(3) == FullBPTT()


@pytest.mark.parametrize("solver", ["iteration", "anderson"])
def test_the_implicit_gradient_is_that_of_the_fixed_point(solver):
    a, _, e, v, _ = linear_core()
    strategy = Implicit(solver=solver, tol=1e-13, max_iter=400, memory=DIM + 1)
    gradient, start = walked(strategy, steps=320)
    wanted = torch.outer(torch.linalg.solve(torch.eye(DIM, dtype=torch.float64) - a.T, v), e)
    torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-11)
    assert start is None


def test_anderson_needs_as_many_products_as_there_are_directions():
    a, _, _, v, _ = linear_core()
    calls = []

    def advance(u):
        calls.append(u)
        return v + a.T @ u

    for memory, most in ((1, 500), (DIM + 1, DIM + 3)):
        del calls[:]
        u, residual = fixed_point(advance, v, tol=1e-10, max_iter=500, memory=memory)
        assert residual <= 1e-10 and len(calls) <= most
        torch.testing.assert_close(u, v + a.T @ u, rtol=1e-9, atol=1e-9)
        assert memory > 1 or len(calls) > 100


def test_the_implicit_gradient_of_a_model_is_the_limit_of_the_full_one():
    model = Mixing(blocks=1, steps=60, indexed=False, dtype=torch.float64)
    context = model.encode(torch.tensor([[0, 1, 2], [3, 4, 5]]))
    found = []
    for strategy in (FullBPTT(), Implicit(tol=1e-12, max_iter=200)):
        state = run_plan(model, chain(60), context, model.init_state(context, None), gradient=strategy)
        loss = model.head(model.coda(state, context)).square().mean()
        parameters = (model.inner, model.across, model.embedding)
        found.append(torch.autograd.grad(loss, parameters, retain_graph=True))
    for one, other in zip(*found, strict=True):
        assert one.abs().max() > 1e-3
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-10)


def test_a_loop_or_an_equation_that_does_not_settle_is_an_error_or_the_last_step_if_declared():
    with pytest.raises(
        NotConverged, match=r"Implicit\(tol=0.001, max_iter=50\): the loop has a relative residual of 0"
    ):
        walked(Implicit(), steps=3)
    with pytest.raises(NotConverged, match=r"the backward equation has a relative residual of .* Raise max_iter, keep"):
        walked(Implicit(solver="iteration", tol=1e-6, max_iter=3), steps=320)
    last = walked(LastStep(), steps=3)[0]
    torch.testing.assert_close(walked(Implicit(otherwise="last_step"), steps=3)[0], last, **EXACT)
    few = Implicit(solver="iteration", tol=1e-6, max_iter=3, otherwise="last_step")
    torch.testing.assert_close(walked(few, steps=320)[0], walked(LastStep(), steps=320)[0], **EXACT)


def test_an_implicit_run_keeps_what_one_application_keeps(stage):
    one = saved_bytes(stage, FullBPTT(), 1)
    held = saved_bytes(stage, Implicit(tol=1e9), 8)
    assert held == pytest.approx(one, rel=0.02)


@pytest.fixture(scope="module")
def stage():
    """A model, its context and its first state: 2 rows of 16 tokens."""
    model = tiny("tiny-core", dtype=torch.float32)
    context = model.encode(tokens(model, 2, 16))
    context = context._replace(embeds=context.embeds.detach(), injected=context.injected.detach().requires_grad_())
    return model, context, model.init_state(context, noise(model, context.positions, dtype=torch.float32))


def saved_bytes(stage, strategy, steps):
    """Bytes that autograd holds after so many applications, or a plan: unique storages, not parameters or context."""
    model, context, state = stage
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *states.leaves(context))}
    held = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            held[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        end = run_plan(model, chain(steps) if isinstance(steps, int) else steps, context, state, gradient=strategy)
    total = sum(storage.nbytes() for storage in held.values())
    del end
    return total


@pytest.mark.parametrize("steps", [2, 8])
def test_held_activations_are_those_of_the_window_and_never_depend_on_what_runs_before(stage, steps):
    state_bytes = math.prod(stage[2].shape) * 4
    one = saved_bytes(stage, FullBPTT(), 1)  # A
    assert one > 10 * state_bytes
    assert saved_bytes(stage, FullBPTT(), steps) == pytest.approx(steps * one, rel=0.02)
    for window in (1, 2, 4):
        g = min(window, steps)
        truncated = TruncatedBPTT(window=window)
        assert saved_bytes(stage, truncated, steps) == pytest.approx(g * one, rel=0.02)
        # g*S while the forward pass goes on; the A of one application comes on top going back, see the next test.
        checkpointed = saved_bytes(stage, CheckpointApplication(inner=truncated), steps)
        assert checkpointed == pytest.approx(g * state_bytes, rel=0.02)
    assert saved_bytes(stage, CheckpointApplication(), steps) == pytest.approx(steps * state_bytes, rel=0.02)


def test_going_back_one_application_is_recomputed_at_a_time(stage, monkeypatch):
    model, context, state = stage
    events, recorder = [], Recorder()
    original = model.step

    def step(s, c, block, iteration, *args, **options):
        events.append(("run", int(iteration[0])))
        return original(s, c, block, iteration, *args, **options)

    monkeypatch.setattr(model, "step", step)
    strategy = CheckpointApplication(inner=TruncatedBPTT(window=3))
    end = run_plan(model, chain(5), context, state, gradient=strategy, recorder=recorder)
    assert events == [("run", t) for t in range(5)]
    for k in (3, 4):  # the gradient at the input of application k: its interior has been used up
        recorder.states[k].register_hook(lambda gradient, k=k: events.append(("through", k)))
    del events[:]
    end.sum().backward()
    assert events == [("run", 4), ("through", 4), ("run", 3), ("through", 3), ("run", 2)]


def layer_loop(steps, strategy, layers=3):
    """Bytes held after the loop of a layer-looped stack, and the loss's gradients, in float64."""
    config = dataclasses.replace(
        PRESETS["tiny-layer-loop"](), blocks=(layers,), order=LayerLoop(num_steps=steps), trained_depth=Unknown()
    )
    model = build(config, dtype=torch.float64)
    context = model.encode(tokens(model, 2, 16))
    context = context._replace(embeds=context.embeds.detach(), injected=context.injected.detach())
    state = model.init_state(context, None).clone().requires_grad_()
    held = saved_bytes((model, context, state), strategy, model.spec.plan())
    end = run_plan(model, model.spec.plan(), context, state, gradient=strategy)
    loss = model.head(model.coda(end, context)).square().mean()
    return held, torch.autograd.grad(loss, [state, *model.core.parameters()], materialize_grads=True, allow_unused=True)


@pytest.mark.parametrize("inner", [FullBPTT(), TruncatedBPTT(window=4)], ids=lambda s: type(s).__name__)
def test_recomputing_all_applications_of_a_layer_together_changes_no_bit(inner):
    for steps in (1, 3):
        pair = layer_loop(steps, CheckpointUnit(inner=inner))[1], layer_loop(steps, inner)[1]
        for one, other in zip(*pair, strict=True):
            torch.testing.assert_close(one, other, **EXACT)


def test_a_layer_loop_keeps_one_boundary_per_stored_layer_however_often_a_layer_runs():
    once, _ = layer_loop(1, CheckpointUnit())
    state = 2 * 16 * 32 * 8
    assert once == 3 * state
    for steps in (2, 3, 5):
        assert layer_loop(steps, CheckpointUnit())[0] == once
        assert layer_loop(steps, CheckpointApplication())[0] == steps * once


def test_units_are_runs_of_one_block_and_windows_cut_them():
    events = []
    plan = Plan.parse("[0.0 0.1 1.0 0.2 0.3 0.4]")

    def step(state, unit):
        events.append(tuple(unit))
        return state

    CheckpointUnit(inner=TruncatedBPTT(window=5)).walk(plan, step, torch.ones(1))
    assert [Plan.of(unit) for unit in events] == [
        Plan.parse(text) for text in ("[0.0]", "[0.1]", "[1.0]", "[0.2 0.3 0.4]")
    ]


def test_records_keep_their_gradient_under_recomputation():
    class Recording(Mixing):
        def step(self, state, context, block, iteration, cache=None, *, record=None):
            new = super().step(state, context, block, iteration, cache)
            if record is not None:
                record["speed"] = (new - state).square().mean(dim=(1, 2))
            return new

    found = []
    for strategy in (FullBPTT(), CheckpointApplication()):
        model = Recording(blocks=1, dtype=torch.float64)
        context = model.encode(torch.tensor([[0, 1, 2], [3, 4, 5]]))
        recorder = Recorder(keep_records=True, keep_states=False)
        plan = Plan.parse("[0.0 0.1 0.2]")
        run_plan(model, plan, context, model.init_state(context, None), gradient=strategy, recorder=recorder)
        assert [list(record) for record in recorder.records] == [["speed"]] * 3
        total = sum(record["speed"].sum() for record in recorder.records)
        found.append(torch.autograd.grad(total, [model.inner, model.across, model.index]))
    for one, other in zip(*found, strict=True):
        assert one.any()
        torch.testing.assert_close(one, other, **EXACT)
