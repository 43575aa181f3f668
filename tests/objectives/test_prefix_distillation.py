from dataclasses import replace

import pytest
import torch

from linear_core import TASK, Line, given, share, words
from looplab.models.base import build
from looplab.models.looped import tiny_core
from looplab.objectives.prefix_distillation import AVERAGE, PrefixDistillation, answer_positions
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.loop import forward
from reference import objectives as reference
from tolerances import TWIN

ANSWER, WINDOW = PrefixDistillation(), PrefixDistillation(layout="window")


@pytest.mark.parametrize("depth", [3, 5])
def test_the_answer_layout_equals_its_slow_twin(depth):
    model, batch = Line(), words()
    states = reference.trace(model.a.item(), model.b.item(), model.table[batch.tokens].tolist(), depth)
    wanted = reference.prefix_distillation(states, model.readout.tolist(), batch.labels.tolist(), 0.7, "answer")
    parts = replace(ANSWER, weight=0.7).run(given(model, batch, depth)).parts
    assert parts.total == pytest.approx(wanted, rel=TWIN["rtol"])


@pytest.mark.parametrize("objective", [ANSWER, WINDOW, PrefixDistillation(layout="prefix", teacher="ema")], ids=str)
def test_no_label_but_that_of_the_answer_is_read(objective):
    model, batch = Line(), words()
    found = objective.run(given(model, batch)).parts
    noise = torch.randint(0, 3, batch.labels.shape, generator=torch.Generator().manual_seed(5))
    for labels in (noise, torch.full_like(noise, -100)):
        labels[:, -1] = batch.labels[:, -1]
        changed = objective.run(given(model, replace(batch, labels=labels))).parts
        assert changed.means() == found.means()
    answers = batch.labels.clone()
    answers[:, -1] = (answers[:, -1] + 1) % 3
    other = objective.run(given(model, replace(batch, labels=answers))).parts.means()
    assert other["answer"] != found.means()["answer"] and other["distillation"] == found.means()["distillation"]


def test_teacher_and_student_in_one_state_are_refused():
    with pytest.raises(ValueError, match="PrefixDistillation") as caught:
        PrefixDistillation(layout="prefix")
    assert str(caught.value) == (
        "PrefixDistillation: layout 'prefix' in a causal model reads teacher and student from the same state; "
        "the loss is zero. Use layout 'answer'."
    )


def test_averaged_weights_follow_and_teach():
    objective = PrefixDistillation(layout="prefix", teacher="ema", decay=0.75)
    assert objective.carries and not ANSWER.carries
    model, batch = Line(a=0.6), words()
    first = objective.run(given(model, batch))
    assert float(first.carry[AVERAGE + "a"]) == 0.6 and not first.carry[AVERAGE + "a"].requires_grad
    assert first.parts.means()["distillation"] == pytest.approx(0.0, abs=1e-15)  # the average is the model still
    with torch.no_grad():
        model.a.fill_(1.0)
    second = objective.run(given(model, batch, carry=first.carry))
    assert float(second.carry[AVERAGE + "a"]) == pytest.approx(0.7)
    assert model.a.item() == 1.0  # the model has its own weights back
    teacher, total, count = Line(a=0.7), 0.0, 0
    for k in range(1, 4):
        laws = [forward(m, batch.tokens, num_steps=k).logits[:, k].detach().tolist() for m in (teacher, model)]
        total += sum(reference.kl(*pair) for pair in zip(*laws, strict=True))
        count += 4
    assert second.parts.means()["distillation"] == pytest.approx(total / count, rel=1e-10)


def test_the_teachers_own_pass_is_counted_and_carries_no_gradient():
    found = {}
    for objective in (ANSWER, WINDOW):
        found[objective.layout] = Ledger()
        objective.run(given(Line(), words(), ledger=found[objective.layout]))
    assert found["answer"].applications == {0: 4 * 4}
    assert found["window"].applications == {0: 2 * 4 * 4}
    core = 2 * 9 * words().tokens.numel() * 4
    head = 2 * 3 * 8  # per token read
    plain, other = (ledger.flops_backward - 2 * core for ledger in found.values())
    assert plain % head == other % head == 0 and other <= plain  # the rest are readouts of the students


def test_training_draws_student_and_teacher_together():
    model, batch = Line(a=0.9, b=0.6), words(16)
    before = ANSWER.run(given(model, batch)).parts.means()["distillation"]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(40):
        optimizer.zero_grad()
        share(replace(ANSWER, weight=20.0), model, batch)[0].backward()
        optimizer.step()
    assert ANSWER.run(given(model, batch)).parts.means()["distillation"] < before / 2


def test_counts_are_those_of_every_layout():
    labels = words().labels  # 4 rows of 3 operations
    assert ANSWER.counts(labels, 5) == {"answer": 4 * 3, "distillation": 4 * 2}
    # Rows begin after 1, 2, 1, 2 operations: 2, 1, 2, 1 pairs.
    assert WINDOW.counts(labels, 5) == {"answer": 4 * 3, "distillation": 6}
    assert PrefixDistillation(layout="prefix", teacher="ema").counts(labels, 5)["distillation"] == 4 * 3
    assert ANSWER.counts(labels[:, :2], 1) == {"answer": 4}  # one operation has no prefix
    first = words()
    single = replace(first, tokens=first.tokens[:, :2], labels=labels[:, :2], positions=first.positions[:, :2])
    assert list(ANSWER.run(given(Line(), single)).parts) == ["answer"]
    with pytest.raises(ValueError, match=r"at least as many applications as the word has operations \(3\). Got 2."):
        ANSWER.counts(labels, 2)


def test_the_answer_is_the_last_label_of_a_row():
    labels = torch.tensor([[-100, 2, 1, -100], [0, -100, -100, -100], [-100, -100, -100, -100]])
    assert answer_positions(labels).tolist() == [2, 0, -1]
    assert answer_positions(labels[..., None].repeat(1, 1, 2)).tolist() == [2, 0, -1]


def test_noise_moves_the_student_and_is_the_same_again():
    model, objective = Line(), replace(ANSWER, state_noise=0.1)
    totals = [objective.run(given(model, words(), step=step)).parts.total for step in (0, 0, 1)]
    assert totals[0] == totals[1] != totals[2] != ANSWER.run(given(model, words())).parts.total


def test_a_model_that_sees_both_directions_is_refused():
    config = tiny_core()
    both = replace(config, attention=replace(config.attention, causal=False))
    with pytest.raises(ValueError, match="PrefixDistillation needs a causal model.*'looped' is not causal"):
        PrefixDistillation().check(build(both, device="meta"))
    PrefixDistillation().check(build(config, device="meta"))
    assert TASK.causal


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"decay": 1.0}, "decay must be in"), ({"weight": -1.0}, "weight must"), ({"state_noise": -1.0}, "state_noise")],
)
def test_bad_fields_are_refused(fields, message):
    with pytest.raises(ValueError, match=f"PrefixDistillation.{message}"):
        PrefixDistillation(**fields)
