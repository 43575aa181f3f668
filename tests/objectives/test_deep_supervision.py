"""Numbers recorded from TRM and HRM themselves are in golden/test_trm.py and golden/test_hrm.py."""

import re
from decimal import Decimal, getcontext

import pytest
import torch

from looplab.models.base import PRESETS, build
from looplab.models.hrm import HRMConfig
from looplab.models.trm import SelfAttention, TRMConfig
from looplab.nn.rope import Rope
from looplab.objectives import OBJECTIVES
from looplab.objectives.base import IGNORED, Pass
from looplab.objectives.deep_supervision import (
    HALTED,
    LABELS,
    NEXT,
    ROWS,
    STEPS,
    TOKENS,
    DeepSupervision,
    continue_target,
    log_stablemax,
    row_losses,
    solved,
)
from looplab.recurrence.gradient import FullBPTT, TruncatedBPTT
from looplab.recurrence.ledger import Ledger
from looplab.tasks.rows import TaskRows
from looplab.tasks.sudoku import Sudoku
from tolerances import EXACT, TWIN

getcontext().prec = 50
SHAPE = {"dim": 16, "vocab": 5, "position": Rope(base=10000.0), "prefix": None, "cells": 16, "h_cycles": 2, "steps": 4}
TRM = TRMConfig(layers=1, mixing=SelfAttention(heads=2), l_cycles=2, **SHAPE)
HRM = HRMConfig(heads=2, high_layers=1, low_layers=1, l_cycles=2, **SHAPE)
LOADER = TaskRows(task=Sudoku(size=4), rows=4, difficulties=(6,)).load(seed=0, vocab_size=5)
PLAIN = DeepSupervision(exploration=0.0)


def model(config=TRM, *, halt=-5.0):
    """`halt`: bias of the halting logit; a large one stops every row at once."""
    made = build(config, dtype=torch.float64)
    with torch.no_grad():
        made.q_head.bias.copy_(torch.tensor([halt, 0.0]))
    return made


def given(made, carry=None, *, step=0, **fields):
    fields = {"gradient": TruncatedBPTT(window=3), "fetch": LOADER.numbered} | fields
    return Pass(model=made, batch=LOADER.batch(step), plan=made.spec.plan(), step=step, carry=carry or {}, **fields)


def log_stablemax_in_50_digits(row):
    s = [Decimal(a) + 1 if a >= 0 else 1 / (1 - Decimal(a)) for a in row]
    return [x.ln() - sum(s).ln() for x in s]


@pytest.mark.parametrize("row", [(0.0, 1.0, -1.0), (-1e6, 3.5, 1e6), (1.0, 1e-9, -1e-9), (-3.25, -0.5, -40.0)], ids=str)
def test_stablemax_agrees_with_fifty_digits(row):
    wanted = [float(x) for x in log_stablemax_in_50_digits(row)]
    assert log_stablemax(torch.tensor(row)).dtype == torch.float64
    found = log_stablemax(torch.tensor(row, dtype=torch.float64))
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), **TWIN)


def test_stablemax_has_a_finite_slope_everywhere_and_slope_one_at_zero():
    logits = torch.tensor([[0.0, 1.0, 3.0, -2.0]], requires_grad=True)
    log_stablemax(logits)[0, 0].backward()
    # d log s_0 / d a_0 = 1 - 1 / sum s: s is continuously differentiable at 0, with s' = 1.
    total = 1 + 2 + 4 + 1 / 3
    assert logits.grad[0].tolist() == pytest.approx([1 - 1 / total, -1 / total, -1 / total, -1 / 9 / total], rel=1e-6)


def test_a_rows_loss_is_the_mean_over_its_own_labels():
    logits = torch.tensor([[[1.0, 0.0], [0.0, 3.0]], [[0.5, -0.5], [2.0, 0.0]], [[1.0, 1.0], [1.0, 1.0]]])
    labels = torch.tensor([[0, 1], [IGNORED, 0], [IGNORED, IGNORED]])
    first = [float(x) for x in (log_stablemax_in_50_digits((1, 0))[0], log_stablemax_in_50_digits((0, 3))[1])]
    second = float(log_stablemax_in_50_digits((2, 0))[0])
    found = row_losses(logits.double(), labels).tolist()
    assert found == pytest.approx([-sum(first) / 2, -second, 0.0], rel=1e-12)
    soft = row_losses(logits, labels, "softmax").tolist()
    assert soft == pytest.approx([-(logits.double().log_softmax(-1)[0, [0, 1], [0, 1]]).mean().item(), 0.126928, 0.0])
    assert solved(logits, labels).tolist() == [True, True, True]
    assert solved(logits, torch.tensor([[0, 0], [1, 0], [1, 1]])).tolist() == [False, False, False]


def test_the_parts_are_the_written_out_losses_of_one_step():
    made = model()
    outcome = PLAIN.run(given(made))
    batch = LOADER.batch(0)
    context = made.encode(batch.tokens)
    state = made.init_state(context, None)
    for block, iteration in made.spec.plan(1):
        state = made.step(state, context, block, torch.full((4,), iteration))
    logits, q = made.head(made.coda(state, context)), made.halt(state)
    right = (logits.argmax(-1) == batch.labels).all(1)
    lm = row_losses(logits, batch.labels).mean()
    halt = -torch.where(right, q[:, 0].sigmoid(), 1 - q[:, 0].sigmoid()).log().mean()
    assert outcome.parts.means() == pytest.approx({"lm": lm.item(), "halt": halt.item()}, rel=1e-12)
    assert outcome.parts.total == pytest.approx(lm.item() + 0.5 * halt.item(), rel=1e-12)
    assert len(outcome.plan) == 2 * (2 + 1)
    assert PLAIN.counts(batch.labels) == {"lm": 4, "halt": 4}


def test_the_gradient_reaches_the_window_only():
    made = model()
    start = made.high_start.start
    context = made.encode(LOADER.batch(0).tokens)
    first = made.init_state(context, None)
    found = []
    for gradient in (TruncatedBPTT(window=3), FullBPTT()):
        loss = PLAIN.run(given(made, gradient=gradient)).parts.share({"lm": 4, "halt": 4})
        found.append(torch.autograd.grad(loss, list(made.core.parameters())))
        # What comes before the window is a constant: the slow twin runs it without a graph.
        with torch.set_grad_enabled(isinstance(gradient, FullBPTT)):
            state = first
            for block, iteration in made.spec.plan(1)[:3]:
                state = made.step(state, context, block, torch.full((4,), iteration))
        for block, iteration in made.spec.plan(1)[3:]:
            state = made.step(state, context, block, torch.full((4,), iteration))
        logits, q = made.head(made.coda(state, context)), made.halt(state)
        right = solved(logits, LOADER.batch(0).labels).double()
        slow = row_losses(logits, LOADER.batch(0).labels).mean()
        slow = slow + 0.5 * torch.nn.functional.binary_cross_entropy_with_logits(q[:, 0], right)
        for one, other in zip(found[-1], torch.autograd.grad(slow, list(made.core.parameters())), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)
    assert not torch.allclose(found[0][0], found[1][0])
    assert not start.requires_grad


def test_the_gradient_agrees_with_finite_differences():
    made = model(HRM)
    with torch.no_grad():
        made.q_head.weight.normal_(generator=torch.Generator().manual_seed(0))
    parameters = [*made.core.parameters(), made.lm_head.own_weight, made.q_head.weight]
    make = torch.Generator().manual_seed(1)
    along = [torch.randn(p.shape, generator=make, dtype=p.dtype) for p in parameters]
    objective, counts = PLAIN, {"lm": 4, "halt": 4}

    def loss():
        return objective.run(given(made, gradient=FullBPTT())).parts.share(counts)

    slope = sum((g * v).sum() for g, v in zip(torch.autograd.grad(loss(), parameters), along, strict=True))
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            for p, v in zip(parameters, along, strict=True):
                p.add_(v, alpha=sign * 1e-6)
            ends.append(loss())
            for p, v in zip(parameters, along, strict=True):
                p.add_(v, alpha=-sign * 1e-6)
    assert ((ends[0] - ends[1]) / 2e-6).item() == pytest.approx(slope.item(), rel=1e-6)


def test_the_stopping_logits_read_the_answer_and_not_the_latent():
    made = model()
    with torch.no_grad():
        made.q_head.weight.fill_(1.0)
    state = PLAIN.run(given(made)).last
    high, low = state.high.detach().requires_grad_(), state.low.detach().requires_grad_()
    slopes = torch.autograd.grad(made.halt(state._replace(high=high, low=low)).sum(), (high, low), allow_unused=True)
    assert slopes[1] is None
    assert slopes[0][:, 0].all()


def test_the_carry_holds_no_graph_and_the_next_step_starts_from_it():
    made = model()
    one = PLAIN.run(given(made))
    assert not any(tensor.requires_grad for tensor in one.carry.values())
    assert one.last.high.requires_grad
    two = PLAIN.run(given(made, one.carry, step=1))
    torch.testing.assert_close(two.first.high, one.last.high.detach(), **EXACT)
    torch.testing.assert_close(two.first.low, one.last.low.detach(), **EXACT)
    assert two.carry[STEPS].tolist() == [2, 2, 2, 2]
    torch.testing.assert_close(two.carry[TOKENS], one.carry[TOKENS], **EXACT)


def test_halted_rows_are_replaced_in_place_by_the_next_of_the_stream():
    made = model()
    carry = PLAIN.run(given(made)).carry
    assert carry[ROWS].tolist() == [0, 1, 2, 3]
    carry = {**carry, HALTED: torch.tensor([False, True, False, True])}
    outcome = PLAIN.run(given(made, carry, step=1))
    after = outcome.carry
    assert after[ROWS].tolist() == [0, 4, 2, 5]
    assert after[STEPS].tolist() == [2, 1, 2, 1]
    assert int(after[NEXT]) == 6
    rows = LOADER.numbered(6, [0, 4, 2, 5])
    torch.testing.assert_close(after[TOKENS], rows.tokens, **EXACT)
    torch.testing.assert_close(after[LABELS], rows.labels, **EXACT)
    fresh = made.init_state(made.encode(rows.tokens), None)
    for slot in (1, 3):
        torch.testing.assert_close(outcome.first.high[slot], fresh.high[slot], **EXACT)
    torch.testing.assert_close(outcome.first.high[0], carry["state.0"][0], **EXACT)


def test_a_row_runs_to_the_last_step_and_then_leaves():
    made, carry, steps, rows = model(), {}, [], []
    for step in range(6):
        carry = PLAIN.run(given(made, carry, step=step)).carry
        steps.append(carry[STEPS].tolist()[0])
        rows.append(carry[ROWS].tolist()[0])
    assert steps == [1, 2, 3, 4, 1, 2]
    assert rows == [0, 0, 0, 0, 4, 4]


def test_a_positive_logit_stops_a_row_and_for_hrm_one_above_the_other():
    assert PLAIN.run(given(model(halt=1e4))).carry[HALTED].all()
    above = HRM  # halts where q_halt > q_continue, whose bias is 0 here
    assert PLAIN.run(given(model(above, halt=1e4))).carry[HALTED].all()
    made = model(above, halt=-1.0)
    with torch.no_grad():
        made.q_head.bias.copy_(torch.tensor([-1.0, -2.0]))
        made.q_head.weight.zero_()
    assert PLAIN.run(given(made)).carry[HALTED].all()


def test_exploration_holds_some_rows_back_for_a_random_number_of_steps():
    made = model(halt=1e4)
    assert DeepSupervision(exploration=0.0)._least(given(made), 1000, 16).tolist() == [0] * 1000
    least = torch.stack([DeepSupervision()._least(given(made, step=step), 1000, 16) for step in range(40)])
    held = least[least > 0]
    assert len(held) / least.numel() == pytest.approx(0.1, abs=0.006)
    counts = torch.bincount(held, minlength=17)
    assert counts[:2].tolist() == [0, 0] and len(counts) == 17
    assert counts[2:].double().std() < 4 * counts[2:].double().mean().sqrt()
    carry, always = {}, DeepSupervision(exploration=1.0)
    for step in range(4):
        carry = always.run(given(made, carry, step=step)).carry
        assert not (carry[HALTED] & (carry[STEPS] < 2)).any()


def test_the_continue_target_is_what_one_more_step_would_say():
    made = model(HRM)
    ledger = Ledger()
    objective = DeepSupervision(continue_loss=True, exploration=0.0)
    outcome = objective.run(given(made, ledger=ledger, gradient=TruncatedBPTT(window=2)))
    again = PLAIN.run(given(made, {**PLAIN.run(given(made)).carry, HALTED: torch.zeros(4, dtype=torch.bool)}, step=1))
    target = made.halt(again.last).amax(1).sigmoid().detach()
    q = made.halt(outcome.last)[:, 1].detach()
    wanted = torch.nn.functional.binary_cross_entropy_with_logits(q, target)
    assert outcome.parts.means()["continue"] == pytest.approx(wanted.item(), rel=1e-10)
    assert ledger.row_applications == 2 * 4 * len(made.spec.plan(1))
    assert objective.counts(LOADER.batch(0).labels) == {"lm": 4, "halt": 4, "continue": 4}
    both = torch.tensor([[0.0, 1.0], [0.0, 1.0], [2.0, 1.0]])
    found = continue_target(both, torch.tensor([False, True, False]))
    assert found.tolist() == pytest.approx([0.7310586, 0.5, 0.8807971])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DeepSupervision(exploration=1.5), "DeepSupervision.exploration must be from 0 to 1. Got 1.5."),
        (
            lambda: PLAIN.run(given(model(), fetch=None)),
            "DeepSupervision needs rows with numbers, to replace those that halted. Got text. Train on a task "
            "(TaskRows).",
        ),
        (
            lambda: PLAIN.check(build(PRESETS["tiny-core"]())),
            "DeepSupervision needs a model with a halt and a continue logit per row. 'looped' has no halt(). Models "
            "with them: trm, hrm.",
        ),
        (
            lambda: PLAIN.check(build(PRESETS["tiny-ouro"]())),
            "'looped' has hazard per token. Models with them: trm, hrm.",
        ),
        (lambda: PLAIN.counts(torch.full((2, 3), IGNORED)), "DeepSupervision needs at least one label."),
    ],
)
def test_what_cannot_be_trained_is_refused(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_rows_of_another_length_are_refused():
    other = TaskRows(task=Sudoku(size=6), rows=4).load(seed=0, vocab_size=7)
    carry = PLAIN.run(given(model(halt=1e4))).carry
    with pytest.raises(ValueError, match="DeepSupervision keeps rows of one length. Got 36 tokens beside 16."):
        PLAIN.run(given(model(), carry, step=1, fetch=lambda difficulty, numbers: other.numbered(16, numbers)))


def test_it_is_registered():
    assert OBJECTIVES["deep_supervision"] is DeepSupervision
