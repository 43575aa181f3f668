import math

import pytest
import torch
from torch.testing import assert_close

from looplab.objectives import OBJECTIVES, NextToken, Rollout
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.loop import run_plan
from looplab.recurrence.plan import Plan
from reference.next_token import loss_sums
from tiny import LETTERS, Mixing
from tolerances import BF16_LOSS, CHUNKED, DIFFERENCES, TWIN

CONFIGS = [NextToken(), NextToken(z_loss=1e-2), NextToken(label_smoothing=0.2, z_loss=0.3, chunk=3), NextToken(chunk=4)]


def batch(rows=3, seq=7, seed=0, ignored=True):
    make = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, LETTERS, (rows, seq), generator=make)
    labels = torch.randint(0, LETTERS, (rows, seq), generator=make)
    if ignored:
        labels[0, :3] = -100
    return tokens, labels


def rollout(model, tokens, steps=3, ledger=None):
    context = model.encode(tokens)
    plan = model.spec.plan(steps)
    state = run_plan(model, plan, context, model.init_state(context, None))
    return Rollout(model=model, context=context, plan=plan, states={len(plan): state}, ledger=ledger)


def share(objective, model, tokens, labels, counts=None):
    counts = counts or objective.counts(labels)
    return objective.loss(rollout(model, tokens), labels).share(counts)


def gradients(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def model64():
    return Mixing(dtype=torch.float64)


@pytest.mark.parametrize("objective", CONFIGS, ids=str)
def test_it_equals_the_loss_written_out(objective):
    model, (tokens, labels) = model64(), batch()
    run = rollout(model, tokens)
    logits = model.head(model.coda(run.states[len(run.plan)], run.context))
    ce, z, count = loss_sums(logits.tolist(), labels.tolist(), smoothing=objective.label_smoothing)
    parts = objective.loss(run, labels)
    assert parts.means()["ce"] == pytest.approx(ce / count, rel=TWIN["rtol"])
    assert parts.total == pytest.approx((ce + objective.z_loss * z) / count, rel=TWIN["rtol"])
    assert {parts[name].count for name in parts} == {count}


@pytest.mark.parametrize("objective", CONFIGS, ids=str)
def test_the_parts_sum_to_the_total(objective):
    model, (tokens, labels) = model64(), batch()
    parts = objective.loss(rollout(model, tokens), labels)
    assert parts.total == sum(parts[name].weight * value for name, value in parts.means().items())
    assert_close(float(parts.share(objective.counts(labels)).detach()), parts.total, **CHUNKED)


@pytest.mark.parametrize("chunk", [1, 2, 5, 20, 21, 100])
def test_chunks_change_neither_loss_nor_gradient(chunk):
    model, (tokens, labels) = model64(), batch()
    whole = NextToken(z_loss=0.1, label_smoothing=0.1)
    pieces = NextToken(z_loss=0.1, label_smoothing=0.1, chunk=chunk)
    found = []
    for objective in (whole, pieces):
        loss = share(objective, model, tokens, labels)
        loss.backward()
        found.append((loss.detach(), gradients(model)))
    assert_close(found[0], found[1], **CHUNKED)


@pytest.mark.parametrize("objective", CONFIGS, ids=str)
def test_micro_batches_give_the_gradient_of_the_whole(objective):
    model, (tokens, labels) = model64(), batch()
    share(objective, model, tokens, labels).backward()
    whole = gradients(model)
    counts = objective.counts(labels)
    for row in range(len(tokens)):
        share(objective, model, tokens[row : row + 1], labels[row : row + 1], counts).backward()
    assert_close(gradients(model), whole, **CHUNKED)


def test_the_parts_of_micro_batches_add_up():
    model, (tokens, labels) = model64(), batch()
    objective = NextToken(z_loss=0.5)
    one, two = (objective.loss(rollout(model, tokens[s]), labels[s]) for s in (slice(0, 1), slice(1, 3)))
    whole = objective.loss(rollout(model, tokens), labels)
    assert (one + two).total == pytest.approx(whole.total, rel=CHUNKED["rtol"])
    assert (one + two)["ce"].count == whole["ce"].count


def test_the_gradient_is_that_of_finite_differences():
    model, (tokens, labels) = model64(), batch(rows=1, seq=3, ignored=False)
    objective = NextToken(z_loss=0.1, label_smoothing=0.1, chunk=2)
    share(objective, model, tokens, labels).backward()
    for parameter in (model.inner, model.unembedding):
        analytic = parameter.grad.flatten()[:2]
        flat, numeric = parameter.data.view(-1), []
        for index in range(2):
            values = []
            for sign in (1, -1):
                flat[index] += sign * 1e-5
                values.append(float(share(objective, model, tokens, labels).detach()))
                flat[index] -= sign * 1e-5
            numeric.append((values[0] - values[1]) / 2e-5)
        assert_close(analytic, torch.tensor(numeric, dtype=torch.float64), **DIFFERENCES)


def test_ignored_labels_do_not_matter_and_scored_ones_do():
    model, (tokens, labels) = model64(), batch()
    objective = NextToken(z_loss=0.1)
    before = objective.loss(rollout(model, tokens), labels)
    only = labels.clone()
    only[1:] = -100
    after = objective.loss(rollout(model, tokens), only)
    assert after["ce"].count == before["ce"].count - 14
    alone = objective.loss(rollout(model, tokens[:1]), labels[:1])
    assert after.total == pytest.approx(alone.total, rel=CHUNKED["rtol"])


def test_a_batch_without_labels_is_refused():
    with pytest.raises(ValueError, match="NextToken needs at least one label"):
        NextToken().counts(torch.full((2, 3), -100))


def test_one_iteration_is_scored_after_that_iteration():
    model, (tokens, labels) = model64(), batch()
    context = model.encode(tokens)
    plan = Plan.of([(0, 0)])
    state = model.step(model.init_state(context, None), context, 0, torch.zeros(3, dtype=torch.long))
    direct = torch.nn.functional.cross_entropy(model.head(state).flatten(0, 1), labels.flatten())
    run = Rollout(model=model, context=context, plan=plan, states={1: state})
    assert NextToken().loss(run, labels).total == pytest.approx(float(direct.detach()), rel=CHUNKED["rtol"])


@pytest.mark.parametrize("chunk", [None, 5])
def test_the_ledger_counts_the_head_and_what_is_computed_twice(chunk):
    model, (tokens, labels) = model64(), batch()
    ledger = Ledger()
    NextToken(chunk=chunk).loss(rollout(model, tokens, ledger=ledger), labels)
    forward = 2 * model.spec.cost.head.matmul * tokens.numel()
    assert ledger.head_tokens == tokens.numel()
    assert ledger.readouts == len(tokens)
    assert ledger.flops_forward == forward
    assert ledger.flops_backward == 2 * forward
    assert ledger.flops_recompute == (forward if chunk else 0)


def test_only_one_chunk_of_logits_exists_at_a_time():
    model, (tokens, labels) = model64(), batch()
    heads = []
    inner = model.head
    model.head = lambda hidden: heads.append(hidden.shape) or inner(hidden)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        share(NextToken(chunk=5), model, tokens, labels)
    assert [shape[1] for shape in heads] == [5, 5, 5, 5, 1]
    assert not [shape for shape in saved if len(shape) == 2 and shape[-1] == LETTERS and shape[0] in (5, 21)]


def test_bfloat16_stays_near():
    model, (tokens, labels) = Mixing(), batch()
    wide = NextToken().loss(rollout(model, tokens), labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = NextToken().loss(rollout(model, tokens), labels)
    assert narrow["ce"].sum.dtype == torch.float32
    assert narrow.total == pytest.approx(wide.total, rel=BF16_LOSS)
    assert narrow.total != wide.total


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk": 0}, "NextToken.chunk must be at least 1 token, or None. Got 0."),
        ({"z_loss": -1.0}, "NextToken.z_loss must be at least 0. Got -1.0."),
        ({"label_smoothing": 1.0}, r"NextToken.label_smoothing must be in \[0, 1\). Got 1.0."),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        NextToken(**options)


def test_it_is_registered_and_needs_the_last_state_only():
    assert OBJECTIVES["next_token"] is NextToken
    assert NextToken.needs.states == "last"
    assert math.isfinite(NextToken().loss(rollout(model64(), batch()[0]), batch()[1]).total)
