import itertools
from dataclasses import replace

import pytest
import torch

from looplab.models.base import build
from looplab.objectives import OBJECTIVES
from looplab.objectives.base import Pass
from looplab.objectives.progress_aligned import LABELS, STATES, ProgressAligned
from looplab.recipes.par import par
from looplab.recurrence.gradient import SegmentedDetach, TruncatedBPTT
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.loop import forward
from looplab.tasks.rows import TaskRows
from looplab.tasks.state_tracking import StateTracking
from reference import progress_aligned as reference
from tolerances import TWIN

TASK = StateTracking(group="swap_s3", train_length=4)
CONFIG = par("test", TASK)
PLAIN = ProgressAligned(iterations=3)


def model(dtype=torch.float64, seed=0):
    return build(CONFIG.model, seed=seed, dtype=dtype)


def given(made, depth=5, rows=4, **fields):
    batch = TaskRows(task=TASK, rows=rows).load(seed=0, vocab_size=len(TASK.tokens)).batch(0)
    return Pass(model=made, batch=batch, plan=made.spec.plan(depth), steps=100, **fields)


@pytest.mark.parametrize("depth", [3, 5])
def test_it_equals_the_loss_written_out(depth):
    made = model()
    one = given(made, depth)
    outcome = PLAIN.run(one)
    logits = [forward(made, one.batch.tokens, num_steps=k).logits.tolist() for k in range(depth - 2, depth + 1)]
    words = [TASK.decode(row.numpy()).operations for row in one.batch.tokens]
    wanted = reference.loss(logits, words, TASK.generators.tolist(), free=depth - 3, iterations=3, slots=3)
    assert outcome.parts.total == pytest.approx(wanted, rel=TWIN["rtol"])
    assert {name: part.count for name, part in outcome.parts.items()} == PLAIN.counts(one.batch.labels, depth)


def test_the_ledger_counts_burn_in_and_scored_applications_once():
    ledger = Ledger()
    PLAIN.run(given(model(), 5, ledger=ledger))
    assert ledger.applications == {0: 20}


def test_burn_in_equals_a_run_without_graph_and_then_one_with():
    made = model()
    one = given(made, 5)
    context = one.encode()
    with torch.no_grad():
        state = made.init_state(context, None)
        for k in range(2):
            state = made.step(state, context, 0, torch.full((4,), k))
    losses = []
    for k in range(2, 5):
        state = made.step(state, context, 0, torch.full((4,), k))
        labels = torch.tensor(
            [
                [
                    reference.window_target(TASK.generators.tolist(), TASK.decode(row.numpy()).operations, j, k + 1)
                    for j in range(5)
                ]
                for row in one.batch.tokens
            ]
        )
        laws = made.head(made.coda(state, context)).unflatten(-1, (3, -1)).log_softmax(-1)
        losses.append(-laws.gather(-1, labels[..., None]).sum())
    slow = sum(losses) / (3 * 4 * 5)
    wanted = torch.autograd.grad(slow, list(made.parameters()), allow_unused=True)
    fast = PLAIN.run(one).parts.share(PLAIN.counts(one.batch.labels, 5))
    got = torch.autograd.grad(fast, list(made.parameters()), allow_unused=True)
    assert fast.item() == pytest.approx(slow.item(), rel=1e-12)
    for a, b in zip(got, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)


def test_gradient_may_be_cut_between_scored_iterations():
    made = model()
    whole, cut = (PLAIN.run(given(made, 3, gradient=g)) for g in (TruncatedBPTT(window=3), SegmentedDetach(every=1)))
    assert whole.parts.total == cut.parts.total
    grads = []
    for outcome in (whole, cut):
        made.zero_grad()
        outcome.parts.share(PLAIN.counts(given(made).batch.labels, 3)).backward()
        grads.append(torch.cat([p.grad.flatten() for p in made.parameters() if p.grad is not None]))
    assert not torch.allclose(grads[0], grads[1])


def test_layouts_agree_at_the_answer_and_score_what_they_say():
    made = model()
    labels = given(made).batch.labels
    assert ProgressAligned(iterations=2, layout="window").counts(labels, 4) == {"progress": 2 * 4 * 5}
    assert ProgressAligned(iterations=2, layout="prefix").counts(labels, 4) == {"progress": 4 * (4 + 5)}
    assert ProgressAligned(iterations=2, layout="answer").counts(labels, 4) == {"progress": 2 * 4}
    only = {
        layout: ProgressAligned(iterations=1, layout=layout).run(given(made, 4)).parts.total
        for layout in ("window", "prefix")
    }
    assert only["window"] == pytest.approx(only["prefix"], rel=1e-12)  # after n iterations every position is done
    one = given(made, 2)
    laws = forward(made, one.batch.tokens, num_steps=2).logits[:, -1].unflatten(-1, (3, -1)).log_softmax(-1)
    wanted = -laws.gather(-1, one.batch.labels[:, 2][..., None]).sum(1).mean()
    assert ProgressAligned(iterations=1, layout="answer").run(one).parts.total == pytest.approx(wanted.item())


def test_without_noise_and_replay_a_step_is_a_function_of_its_batch():
    made = model()
    assert PLAIN.run(given(made, step=3)).parts.total == PLAIN.run(given(made, step=70)).parts.total
    noisy = replace(PLAIN, state_noise=0.1)
    assert noisy.run(given(made, step=3)).parts.total != noisy.run(given(made, step=4)).parts.total
    assert noisy.run(given(made, step=3)).parts.total == noisy.run(given(made, step=3)).parts.total


def test_noise_of_its_size_comes_before_every_scored_application_and_no_other():
    made = model()
    seen = []
    step = made.step

    def watched(state, *rest, **options):
        seen.append(state.detach())
        return step(state, *rest, **options)

    made.step = watched
    PLAIN.run(given(made, 5))
    clean = list(seen)
    seen.clear()
    ProgressAligned(iterations=3, state_noise=0.15).run(given(made, 5))
    assert torch.equal(seen[1], clean[1])
    assert float((seen[2] - clean[2]).std()) == pytest.approx(0.15, rel=0.1)
    assert not torch.equal(seen[3], clean[3])


def test_replay_starts_from_kept_states_with_targets_by_the_rule():
    made = model()
    objective = ProgressAligned(iterations=2, replay=1.0, replay_start=0.0)
    first = objective.run(given(made, 4, step=0))
    assert set(first.carry) == {STATES, LABELS}
    assert not first.carry[STATES].requires_grad
    batch = TaskRows(task=TASK, rows=4).load(seed=0, vocab_size=len(TASK.tokens)).batch(1)
    carry = {STATES: torch.randn(4, 5, 64, dtype=torch.float64), LABELS: TASK.start(batch.tokens)}
    carry[LABELS] = torch.tensor(TASK.elements)[torch.randint(0, 6, (4, 5), generator=torch.manual_seed(1))]
    carry[LABELS][:, 0] = torch.arange(3)  # what <bos> stands for
    ledger = Ledger()
    one = replace(given(made, 4, step=1, ledger=ledger), batch=batch, carry=carry)
    outcome = objective.run(one)
    assert ledger.applications == {0: 8}  # no burn-in after a replay
    assert len(outcome.plan) == 2
    pairs = {
        (tuple(state.tolist()), tuple(label.tolist()))
        for state, label in zip(carry[STATES][:, 1:].flatten(0, 1), carry[LABELS][:, 1:].flatten(0, 1), strict=True)
    }
    start = outcome.first
    assert torch.equal(start[:, 0], carry[STATES][:, 0])  # <bos> stays
    assert {tuple(s.tolist()) for s in start[:, 1:].flatten(0, 1)} == {state for state, _ in pairs}
    label_of = dict(pairs)
    values = [[label_of[tuple(start[r, j].tolist())] if j else (0, 1, 2) for j in range(5)] for r in range(4)]
    laws = []
    context, state = one.encode(), start
    for k in range(2):
        state = made.step(state, context, 0, torch.full((4,), k))
        laws.append(made.head(made.coda(state, context)).unflatten(-1, (3, -1)).log_softmax(-1))
    total = 0.0
    for k in range(2):
        nxt = [[(0, 1, 2)] * 5 for _ in range(4)]
        for r in range(4):
            for j in range(1, 5):
                before = values[r][j - 1]
                move = TASK.generators[int(batch.tokens[r, j]) - 1]
                nxt[r][j] = tuple(before[i] for i in move)
        values = nxt
        for row, place, slot in itertools.product(range(4), range(5), range(3)):
            total -= float(laws[k][row, place, slot, values[row][place][slot]].detach())
    assert outcome.parts.total == pytest.approx(total / 40, rel=1e-10)


def test_a_state_that_does_not_read_as_its_label_is_reset():
    made = model(seed=2)
    outcome = ProgressAligned(iterations=2, replay=0.5).run(given(made, 4, rows=32))
    logits = made.head(made.coda(outcome.last, given(made, rows=32).encode()))
    right = (logits.unflatten(-1, (3, -1)).argmax(-1) == outcome.carry[LABELS]).all(-1)
    zero = (outcome.carry[STATES] == 0).all(-1)
    assert bool(zero.any()) and bool((~zero).any())
    assert bool((outcome.carry[LABELS][zero] == torch.arange(3)).all())
    assert bool(right[~zero].all())


def test_replay_waits_for_its_part_of_the_run_and_has_its_probability():
    made = model(torch.float32)
    objective = ProgressAligned(iterations=2, replay=0.6, replay_start=0.2)
    carry = objective.run(given(made, 4)).carry
    ran = [len(objective.run(given(made, 4, step=step, carry=carry)).plan) for step in range(100)]
    assert ran[:20] == [4] * 20
    assert 0.4 < ran[20:].count(2) / 80 < 0.8


def test_the_soft_anchor_is_the_squared_distance_of_the_size():
    made = build(replace(CONFIG.model, boundary=type(CONFIG.model.boundary)(c=2.0)), dtype=torch.float64)
    parts = ProgressAligned(iterations=2, anchor=0.1).run(given(made, 3)).parts
    assert parts.means()["anchor"] == pytest.approx(1.0, rel=1e-6)
    assert parts["anchor"].weight == 0.1


def test_it_is_registered_and_says_what_it_needs():
    assert OBJECTIVES["progress_aligned"] is ProgressAligned
    assert ProgressAligned.needs.targets and ProgressAligned(replay=0.1).carries and not ProgressAligned().carries


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"iterations": 0}, "iterations must be at least 1. Got 0."),
        ({"replay": 1.5}, "replay must be from 0 to 1. Got 1.5."),
        ({"state_noise": -0.1}, "state_noise must be at least 0"),
        ({"replay": 0.5, "layout": "prefix"}, "replay needs layout='window'.*Got 'prefix'"),
    ],
)
def test_bad_fields_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ProgressAligned(**fields)
