import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from linear_core import Line, given, share, words
from looplab.objectives import NextToken
from looplab.objectives.progressive import Progressive
from looplab.recurrence.ledger import Ledger


def applications(objective, step=0):
    ledger = Ledger()
    model = Line()
    one = given(model, words(), 6, ledger=ledger, step=step)
    outcome = objective.run(one)
    return ledger.applications.get(0, 0) // 4, objective.stretch(one), outcome


@pytest.mark.parametrize("step", range(4))
def test_alpha_0_and_1_run_one_pass_only(step):
    full, _, outcome = applications(Progressive(alpha=0.0), step)
    assert full == 6 and list(outcome.parts) == ["full"]
    ran, (n, k), outcome = applications(Progressive(alpha=1.0), step)
    assert ran == n + k and list(outcome.parts) == ["progressive"] and len(outcome.plan) == n + k
    ran, (n, k), outcome = applications(Progressive(alpha=0.5), step)
    assert ran == 6 + n + k and len(outcome.plan) == 6


def test_n_and_k_have_their_law():
    depth, draws = 4, 4000
    model = Line()
    batch = words(rows=1)
    counts = np.zeros((depth, depth + 1))
    for step in range(draws):
        n, k = Progressive(alpha=0.5).stretch(given(model, batch, depth, step=step))
        assert 0 <= n < depth and 1 <= k <= depth - n
        counts[n, k] += 1
    cells = [(n, k) for n in range(depth) for k in range(1, depth - n + 1)]
    wanted = [draws / depth / (depth - n) for n, _ in cells]
    assert chisquare([counts[cell] for cell in cells], wanted).pvalue > 1e-4


def test_alpha_0_is_next_token():
    model = Line()
    found, wanted = (share(o, model, words())[1].parts.total for o in (Progressive(alpha=0.0), NextToken()))
    assert found == pytest.approx(wanted, rel=1e-14)


def test_the_stretch_before_carries_no_gradient():
    model = Line()
    objective, step = Progressive(alpha=1.0), 0
    while objective.stretch(given(model, words(), step=step))[0] != 2:
        step += 1
    n, k = objective.stretch(given(model, words(), step=step))
    share(objective, model, words(), step=step)[0].backward()
    found = float(model.a.grad)
    model.zero_grad()
    context = given(model, words()).encode()
    state = model.init_state(context, None)
    for number in range(n + k):
        state = model.step(state.detach() if number <= n else state, context, 0, torch.full((4,), number))
    torch.nn.functional.cross_entropy(model.head(state).flatten(0, 1), words().labels.flatten()).backward()
    assert found == pytest.approx(float(model.a.grad), rel=1e-12)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"alpha": 1.5}, "Progressive.alpha must be from 0 to 1. Got 1.5."), ({"alpha": 0.5, "chunk": 0}, "chunk")],
)
def test_bad_fields_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Progressive(**fields)
