"""P3b: state tracking as a task, its closed forms, and broken audits."""

import pytest
import torch

from looplab.audit import assemble, measure, protocol
from looplab.audit.positive_controls import progress
from looplab.audit.positive_controls.progress import SLOTS, SWAPS, TASK, Follower, ProgressTracker, fixed_points
from looplab.audit.positive_controls.swaps import return_probability
from looplab.recurrence.loop import forward
from looplab.recurrence.plan import Plan
from looplab.tasks.state_tracking import Word


def fails(outcome):
    return [
        e.partition(":")[0]
        for e, f in zip(outcome.expected.splitlines(), outcome.found.splitlines(), strict=True)
        if f.endswith("<- fails")
    ]


def answers(model, words, indices):
    """Items by slot at every position after the iterations of the one block."""
    rows = [TASK.example(word).tokens.tolist() for word in words]
    output = forward(model.eval(), torch.tensor(rows), plan=Plan.of((0, t) for t in indices))
    return output.logits.unflatten(-1, (SLOTS, SLOTS)).argmax(dim=-1).tolist()


WORDS = [TASK.sample(SWAPS, 0, index) for index in range(4)]


@pytest.mark.parametrize("indices", [[0], [0] * 8, list(range(8)), [0, 1, 2, 2, 2, 2], [7, 0, 7, 3]])
def test_a_schedule_ends_in_the_product_of_the_operations_it_applies(indices):
    found = answers(Follower(), WORDS, indices)
    for word, positions in zip(WORDS, found, strict=True):
        for position, state in enumerate(positions):
            applied = tuple(word.operations[t] for t in indices if t < position)
            assert tuple(state) == TASK.reference(Word(applied)).answer


@pytest.mark.parametrize("count", [1, 3, 8])
def test_the_twin_applies_the_last_operations_whatever_the_index(count):
    for indices in ([0] * count, list(range(count))):
        for word, positions in zip(WORDS, answers(Follower(indexed=False), WORDS, indices), strict=True):
            for position, state in enumerate(positions):
                applied = word.operations[max(0, position - count) : position]
                assert tuple(state) == TASK.reference(Word(applied)).answer


def test_fixed_points_of_swaps_are_those_of_all_words():
    for swaps in (1, 2):
        words = [(a, *rest) for a in range(10) for rest in ([()] if swaps == 1 else [(b,) for b in range(10)])]
        ends = [TASK.reference(Word(word)).answer for word in words]
        mean = sum(sum(item == slot for slot, item in enumerate(end)) for end in ends) / len(ends)
        assert fixed_points(swaps) == pytest.approx(mean)


def test_p3b_distinct_iterations_and_exact_matches_are_found_as_the_closed_form_says():
    outcome = ProgressTracker().run(1)
    assert outcome.passed, outcome
    assert "D = 100.39 % within 3 sigma" in outcome.expected
    assert f"exact match at repeat(1): {100 * return_probability(8):.2f} %" in outcome.expected


@pytest.fixture
def small(monkeypatch):
    """Fewer problems: what is broken fails whatever the sampling error."""
    audit = progress._audit
    monkeypatch.setattr(progress, "_audit", lambda seed, count, **more: audit(seed, 60, **more))


def test_p3b_catches_answers_that_count_a_single_cell(small, monkeypatch):
    by_document = measure._by_document
    monkeypatch.setattr(
        measure,
        "_by_document",
        lambda owners, values, rows: by_document(
            owners, values if values.dtype.kind == "f" else 5 * (values > 0), rows
        ),
    )
    assert "exact match at repeat(1)" in fails(ProgressTracker().run(0))


def test_p3b_catches_answers_of_another_schedule(small, monkeypatch):
    matches = assemble.exact_matches

    def broken(part, draws):
        found = matches(part, draws)
        return {key: found[key[0], "full"] for key in found}

    monkeypatch.setattr(protocol, "exact_matches", broken)
    assert "exact match at prefix(1)" in fails(ProgressTracker().run(0))


def test_p3b_catches_a_twin_that_needs_its_index(small, monkeypatch):
    monkeypatch.setattr(progress, "Follower", lambda indexed=True: Follower())
    assert "twin, a rule that needs no index" in fails(ProgressTracker().run(0))
