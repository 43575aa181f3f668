"""P3: constructed tracker, its closed forms, and broken audits."""

import math

import pytest
import torch

from looplab.audit import decompose
from looplab.audit.positive_controls.letters import Letters
from looplab.audit.positive_controls.swaps import ELEMENTS, SIZE, swap_documents
from looplab.audit.positive_controls.tracker import SWAPS, ConstructedTracker, Tracker
from looplab.audit.probes import temperature
from looplab.recurrence.loop import forward
from looplab.recurrence.plan import Plan


def fails(outcome):
    return [
        e.partition(":")[0]
        for e, f in zip(outcome.expected.splitlines(), outcome.found.splitlines(), strict=True)
        if f.endswith("<- fails")
    ]


def ending(swaps, indices):
    """The product of the swaps that a schedule applies, in order."""
    state = tuple(range(5))
    for index in indices:
        state = tuple(state[ELEMENTS[swaps[index]][x]] for x in range(5))
    return ELEMENTS.index(state)


@pytest.mark.parametrize("indices", [[0], [0] * 8, list(range(8)), [0, 1, 2, 2, 2, 2], [7, 0, 7, 3]])
def test_a_schedule_ends_in_the_product_of_the_swaps_it_applies(indices):
    model = Tracker().eval()
    rows = [Letters(SIZE).encode(d.prompt) for d in swap_documents(0, count=6, swaps=SWAPS).documents]
    output = forward(model, torch.tensor(rows), plan=Plan.of((0, t) for t in indices))
    expected = [ending(row, indices) for row in rows]
    assert output.logits[:, -1].argmax(dim=1).tolist() == expected
    assert output.logits[:, -1].sort(dim=1).values[:, -2:].tolist() == [[0.0, 8.0]] * 6


def test_a_token_knows_no_swap_that_comes_after_it():
    model = Tracker().eval()
    (row,) = [Letters(SIZE).encode(d.prompt) for d in swap_documents(0, count=1, swaps=SWAPS).documents]
    output = forward(model, torch.tensor([row]), plan=Plan.of((0, t) for t in range(8)))
    seen = output.logits[0].argmax(dim=1).tolist()
    assert seen == [ending(row, range(min(position + 1, 8))) for position in range(9)]


@pytest.mark.parametrize("seed", [0, 1])
def test_p3_distinct_iterations_are_found_as_the_closed_form_says(seed):
    outcome = ConstructedTracker().run(seed)
    assert outcome.passed, outcome
    assert "D = 98.23 % within 3 sigma" in outcome.expected
    assert "D = 99.92 % within 3 sigma" in outcome.expected


def test_p3_shows_the_trap_of_a_sure_and_wrong_readout():
    trap = next(line for line in ConstructedTracker().run(0).found.splitlines() if "flattening" in line)
    assert trap.startswith("40.2 %")
    assert 1 - math.log(120) / 8 == pytest.approx(0.402, abs=5e-4)


def test_p3_catches_a_distinct_term_that_compares_other_schedules(monkeypatch):
    split = decompose._decomposition

    def broken(losses, readout, terms, *rest):
        return split(losses, readout, {**terms, "distinct": terms["application"]}, *rest)

    monkeypatch.setattr(decompose, "_decomposition", broken)
    assert fails(ConstructedTracker().run(0))[:2] == ["D >= 95 %, raw", "closed form, raw"]


def test_p3_catches_a_fit_that_always_says_one(monkeypatch):
    monkeypatch.setattr(temperature._Search, "check_boundaries", lambda self, *_: None)
    monkeypatch.setattr(temperature._Search, "_narrow", lambda self, *_: setattr(self, "status", "converged"))
    found = fails(ConstructedTracker().run(0))
    assert "closed form, temperature" in found
    assert "trap, no fault of calibration" in found


def test_p3_catches_a_distinct_term_that_is_never_zero(monkeypatch):
    difference = decompose.difference
    monkeypatch.setattr(
        decompose,
        "difference",
        lambda readout, plus, minus: difference(readout, "prefix(1)" if plus == "repeat(1)" else plus, minus),
    )
    assert "twin, eight times one swap" in fails(ConstructedTracker().run(0))
