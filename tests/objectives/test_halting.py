import math
from dataclasses import replace

import pytest
import torch

from linear_core import TASK, Line, given, words
from looplab.models.base import build
from looplab.objectives.halting import DONE, Halting, advanced
from looplab.objectives.progress_aligned import STATES
from looplab.recipes.par import par
from looplab.recurrence.halting import HazardGate, QHead
from looplab.tasks.state_tracking import StateTracking
from looplab.training.config import RunConfig
from reference import objectives as reference
from tolerances import TWIN


@pytest.mark.parametrize("depth", [2, 4])
def test_a_position_is_done_after_as_many_iterations_as_it_has_operations(depth):
    model = Line(halt="q_halt")
    parts = Halting(iterations=2).run(given(model, words(), depth)).parts
    states = reference.trace(model.a.item(), model.b.item(), model.table[words().tokens].tolist(), depth)
    gate = (model.gate.weight.tolist()[0], model.gate.bias.item())
    wanted = reference.halting(states, gate, depth - 2, False)
    assert parts.means()["halting"] == pytest.approx(wanted, rel=TWIN["rtol"])
    done = torch.arange(4).expand(2, 4) <= 0
    for k in range(1, 5):
        done = advanced(done)
        assert done.tolist() == [[k >= j for j in range(4)]] * 2


def test_hazard_terms_of_a_word_sum_to_its_log_probability():
    model = Line(halt="hazard")
    parts = Halting(iterations=4, hazard=True).run(given(model, words(), 4)).parts
    states = reference.trace(model.a.item(), model.b.item(), model.table[words().tokens].tolist(), 4)
    gate = (model.gate.weight.tolist()[0], model.gate.bias.item())
    total = 0.0
    for r in range(4):
        for j in range(1, 4):  # position j stops at its iteration j; the law has one step more, which is never last
            total -= math.log(reference.exit_law([*reference.hazards(states, gate, r, j), 1.0])[j - 1])
    assert float(parts["halting"].sum.detach()) == pytest.approx(total, rel=1e-12)


def test_marks_travel_with_replayed_states():
    model = Line(halt="q_halt")
    objective = Halting(iterations=2, replay=1.0, replay_start=0.0)
    kept = torch.randn(4, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    marks = torch.tensor([[1, 0, 1, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]], dtype=torch.uint8)
    carry = {STATES: kept, "labels": torch.zeros(4, 4, dtype=torch.long), DONE: marks}
    outcome = objective.run(given(model, words(), step=1, steps=10, carry=carry))
    of_state = {tuple(s.tolist()): int(m) for s, m in zip(kept.flatten(0, 1), marks.flatten(), strict=True)}
    done = [[bool(of_state[tuple(s.tolist())]) for s in row] for row in outcome.first]
    context, state, terms = given(model, words()).encode(), outcome.first, []
    for k in range(2):
        state = model.step(state, context, 0, torch.full((4,), k))
        done = [[True, *row[:-1]] for row in done]
        for r in range(4):
            for j in range(4):
                chance = reference.sigmoid(float(model.halt(state)[r, j].detach()))
                terms.append(reference.bce(chance, float(done[r][j])))
    assert outcome.parts.means()["halting"] == pytest.approx(sum(terms) / len(terms), rel=1e-10)
    reset = (outcome.carry[STATES] == 0).all(-1)
    assert bool(reset.any()) and not bool(outcome.carry[DONE][reset].any())
    kept_marks = outcome.carry[DONE][~reset].tolist()
    assert kept_marks == [int(done[r][j]) for r in range(4) for j in range(4) if not reset[r, j]]


def run_config(**changes):
    config = par("test", StateTracking(group="z3", train_length=4), halt=QHead())
    fields = {"objective": Halting(state_noise=0.15, replay=0.5), "steps": 100}
    return replace(config, **{**fields, **changes})


@pytest.mark.slow
def test_a_short_training_stops_words_at_their_length():
    config = run_config()
    model, optimizer = config.build_model(), None
    optimizer = config.optimizer.build(model)
    loader, carry = config.data.load(seed=0, vocab_size=4), {}
    for step in range(config.steps):
        batch = loader.batch(step)
        plan = model.spec.plan(4 + step % 5)
        one = given(model, batch, len(plan), step=step, steps=config.steps, carry=carry)
        outcome = config.objective.run(one)
        carry = {name: tensor.detach() for name, tensor in outcome.carry.items()}
        optimizer.zero_grad()
        outcome.parts.share(config.objective.counts(batch.labels, len(outcome.plan))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    tokens = loader.batch(1000).tokens
    with torch.no_grad():
        context = model.encode(tokens)
        state, stops = model.init_state(context, None), []
        for k in range(6):
            state = model.step(state, context, 0, torch.full((len(tokens),), k))
            stops.append(model.halt(state)[:, -1] > 0)
    first = torch.stack(stops).long().argmax(0) + 1
    assert float((first == 4).double().mean()) > 0.95


def test_the_plain_form_needs_a_score_of_being_done_and_the_other_a_hazard():
    Halting().check(Line(halt="q_halt"))
    Halting(hazard=True).check(Line(halt="hazard"))
    with pytest.raises(ValueError, match=r"needs a score per token that says whether it is done.*hazard per token"):
        Halting().check(Line(halt="hazard"))
    with pytest.raises(ValueError, match=r"needs a gate whose score is a hazard"):
        Halting(hazard=True).check(Line(halt="q_halt"))
    assert isinstance(run_config(), RunConfig)
    with pytest.raises(ValueError, match=r"Halting: model 'looped' has no halt\(\)"):
        replace(run_config(), model=par("test", TASK).model)
    with pytest.raises(ValueError, match=r"halt=QHead\(\), or set hazard=True"):
        replace(run_config(), model=par("test", TASK, halt=HazardGate()).model)
    assert build(run_config().model, device="meta").spec.halt.layout == "q_halt"


def test_bad_fields_are_refused():
    with pytest.raises(ValueError, match="Halting.weight must be at least 0. Got -1.0."):
        Halting(weight=-1.0)
    with pytest.raises(ValueError, match="iterations must be at least 1"):
        Halting(iterations=0)
