"""Updates measured during the shared walk equal those of every schedule run alone, without a further application."""

import weakref
from typing import NamedTuple

import numpy as np
import pytest
import torch

import reference.updates as slow
import tolerances
from looplab.audit import updates as module
from looplab.audit.documents import pad, prepare
from looplab.audit.schedules import FullPlan, full_plan, prefix, repeat, suffix, trie
from looplab.audit.updates import UpdateMeter, token_components, updates
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.loop import walk
from looplab.recurrence.plan import Plan, PlanNode
from looplab.recurrence.spec import StateField
from tiny import LetterTokenizer, Mixing, letters

MEASURED = ("full", "repeat(1)", "repeat(4)")


@pytest.fixture(scope="module")
def batch():
    split = prepare("text", letters(60, length=20), LetterTokenizer()).evaluation
    return max(split.batches(120), key=lambda b: len(b.documents))


class Pair(NamedTuple):
    answer: torch.Tensor
    score: torch.Tensor
    memory: torch.Tensor


class Paired(Mixing):
    """Mixing that starts away from zero, with a second component that only block 1 writes, and a score per row."""

    def init_state(self, context, noise):
        start = torch.linspace(-1, 1, context.embeds.numel(), dtype=context.embeds.dtype).view_as(context.embeds)
        return Pair(start, torch.zeros(len(start)), torch.zeros_like(start[..., :3]))

    def step(self, state, context, block, iteration, cache=None, *, record=None):
        answer = super().step(state.answer, context, block, iteration)
        return Pair(answer, state.score + 1, state.memory + answer[..., :3] * (block == 1))


def run(model, batch, components, schedules=MEASURED, ledger=None):
    """Tables of one walk over several schedules, and their plans."""
    full: FullPlan = full_plan(model.spec)
    asked = [repeat(1), repeat(2), repeat(4), prefix(1), prefix(5), suffix(3), repeat(8)]
    plans = {("full" if str(s) == "repeat(8)" else str(s)): s.plan(full) for s in asked}
    root = trie({name: (plan, full.word(plan)) for name, plan in plans.items()})
    context = model.encode(batch.tokens, valid=batch.valid)
    state = model.init_state(context, None)
    meter = UpdateMeter(root, schedules, components, batch.read, len(batch.documents))
    walk(model, context, state, root, lambda node, state: None, on_step=meter, ledger=ledger)
    return meter, plans, root, context, state


def alone(model, plan, context, state, component):
    """States of a component after 0, 1, .. applications of a plan run by itself, as nested lists."""
    states = [state]
    with torch.no_grad():
        for block, iteration in plan:
            index = torch.full((len(context.embeds),), iteration)
            states.append(model.step(states[-1], context, block, index))
    return [(s if component is None else getattr(s, component)).tolist() for s in states]


def by_document(states, batch):
    """document -> scored token -> states."""
    documents = [[] for _ in batch.documents]
    for row, position in zip(*(index.tolist() for index in batch.read), strict=True):
        documents[row].append([s[row][position] for s in states])
    return documents


@pytest.mark.parametrize("chunk", [module.CHUNK, 40])
@pytest.mark.parametrize(
    ("kind", "components"), [(Mixing, ("state",)), (Paired, ("answer", "memory"))], ids=["tensor", "tuple"]
)
def test_updates_of_the_shared_walk_are_those_of_every_schedule_alone(batch, kind, components, chunk, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", chunk)
    model = kind(dtype=torch.float64)
    meter, plans, root, context, state = run(model, batch, components, ledger=(ledger := Ledger()))
    assert ledger.launches == root.size()  # no application is made for the updates
    assert list(meter.tables) == list(MEASURED)
    for name in MEASURED:
        found = updates(meter.tables[name], plans[name], components)
        assert len(found) == 8 * len(components)
        for c, part in enumerate(components):
            tokens = by_document(alone(model, plans[name], context, state, part if kind is Paired else None), batch)
            for j in range(8):
                update = found[j * len(components) + c]
                block, iteration = plans[name][j]
                assert (update.application, update.component) == (j, part)
                assert (update.block, update.iteration) == (block, iteration)
                compare(update, slow.document_means(tokens, j))


def compare(update, means):
    expected = [float(np.mean(values)) if values else None for values in means]
    quartiles = np.quantile(means[0], [0.25, 0.75]).tolist() if means[0] else [None, None]
    found = [update.relative, update.state_cosine, update.update_cosine, update.low, update.high]
    for number, other in zip(found, expected + quartiles, strict=True):
        if other is None:
            assert number is None
        else:
            torch.testing.assert_close(number, other, **tolerances.GEOMETRY)


def test_a_start_from_zeros_has_no_relative_update_and_a_component_that_rests_has_no_update_cosine(batch):
    model = Paired(dtype=torch.float64)
    meter, plans, *_ = run(model, batch, ("memory",))
    found = updates(meter.tables["full"], plans["full"], ("memory",))  # block 1, from application 4 on, writes it
    assert [u.relative is None for u in found] == [True] * 5 + [False] * 3
    assert [u.update_cosine is None for u in found] == [True] * 5 + [False] * 3
    assert [u.state_cosine is None for u in found] == [True] * 5 + [False] * 3
    assert meter.tables["full"][..., 1][:, :4].sum() == 0
    rests = updates(meter.tables["repeat(1)"], plans["repeat(1)"], ("memory",))
    assert all(u.relative is u.low is u.high is u.state_cosine is u.update_cosine is None for u in rests)


def test_small_states_keep_their_cosines():
    x = torch.tensor([[1.0, 1.0]], dtype=torch.float64) * 1e-8
    y = torch.tensor([[1.0, 0.0]], dtype=torch.float64) * 1e-8
    assert module._cosine(x, y)[0].item() == pytest.approx(0.5**0.5)


def test_a_cosine_needs_two_directions():
    x = torch.tensor([[1.0, 1.0], [0.0, 0.0], [2.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    y = torch.tensor([[0.0, 2.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    cosines, counted = module._cosine(x, y)
    assert counted.tolist() == [True, False, False, False]
    assert cosines.tolist() == [pytest.approx(0.5**0.5), 0, 0, 0]


def test_half_precision_states_are_measured_in_double_precision(batch):
    model = Mixing(dtype=torch.bfloat16)
    meter, plans, _, context, state = run(model, batch, ("state",))
    tokens = by_document(alone(model, plans["full"], context, state, None), batch)
    found = updates(meter.tables["full"], plans["full"], ("state",))
    for j in range(8):
        compare(found[j], slow.document_means(tokens, j))


def test_every_scored_token_is_counted_once_and_padding_never(batch):
    model = Mixing()
    meter, *_ = run(model, batch, ("state",))
    scored = [document.scored for document in batch.documents]
    assert (meter.tables["full"][:, 3, 0, :, 1] == np.array(scored)[:, None]).all()
    wide, valid = pad(batch.documents, extra=9)
    meter_wide, *_ = run(model, type(batch)(batch.documents, wide, valid, batch.read, batch.place), ("state",))
    for name in MEASURED:
        np.testing.assert_allclose(meter_wide.tables[name], meter.tables[name], rtol=1e-4, atol=1e-4)


def test_tables_of_noise_seeds_add_and_documents_keep_their_places():
    random = np.random.default_rng(0)
    counts = random.integers(1, 9, size=(2, 5, 3, 1, 3))
    values = random.uniform(0.1, 1, size=counts.shape)
    seeds = np.stack([values * counts, counts], axis=-1)
    (first, *_) = updates(seeds.sum(axis=0), Plan.parse("[0.0 0.1 1.0]"), ("state",))
    together = (values * counts)[:, :, 0, 0, 0].sum(axis=0) / counts[:, :, 0, 0, 0].sum(axis=0)
    assert first.relative == pytest.approx(together.mean())
    assert (first.low, first.high) == pytest.approx(tuple(np.quantile(together, [0.25, 0.75])))


def test_a_table_of_another_plan_is_refused():
    with pytest.raises(ValueError, match="updates: table must have 2 applications and 1 components. Got 3 and 1."):
        updates(np.zeros((4, 3, 1, 3, 2)), Plan.parse("[0.0 0.1]"), ("state",))


def test_a_schedule_that_is_not_walked_is_refused(batch):
    with pytest.raises(KeyError, match=r"UpdateMeter: schedules must be run by the walk. Got 'repeat\(9\)'"):
        UpdateMeter(PlanNode(None), ("repeat(9)",), ("state",), batch.read, 2)


def test_components_with_one_value_per_row_are_not_measured():
    fields = {"answer": StateField(width=3), "score": StateField(width=1, per="row"), "memory": StateField(width=4)}
    assert token_components(fields) == ("answer", "memory")


def test_the_walk_tells_of_every_application_and_holds_no_state_for_it(batch):
    model = Mixing(steps=8, blocks=1)
    context = model.encode(batch.tokens, valid=batch.valid)
    alive, most, told = weakref.WeakSet(), 0, []
    original = model.step

    def step(state, *args):
        nonlocal most
        new = original(state, *args)
        alive.add(new)
        most = max(most, len(alive))
        return new

    def on_step(node, before, after):
        told.append(node.application)
        assert before is not after

    model.step = step
    full = full_plan(model.spec)
    plan = full.plan
    root = trie({"all": (plan, full.word(plan))})
    seen = []
    visit = lambda node, state: seen.append((len(told), len(alive)))  # noqa: E731
    assert walk(model, context, model.init_state(context, None), root, visit, on_step=on_step) == 1
    assert told == list(plan)
    assert most == 2  # what goes in and what comes out, as without it
    assert seen == [(8, 1)]  # told before the visit; the state before is gone by then


def test_the_meter_keeps_a_state_for_the_next_application_and_one_where_a_path_waits(batch, monkeypatch):
    held, original = [], UpdateMeter.__call__

    def call(self, *args):
        original(self, *args)
        held.append(len(self._kept))

    monkeypatch.setattr(UpdateMeter, "__call__", call)
    meter, *_ = run(Mixing(), batch, ("state",))
    assert max(held) == 2
    assert meter._kept == {}
