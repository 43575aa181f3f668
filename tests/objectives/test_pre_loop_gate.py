import pytest
import torch
from torch.testing import assert_close

from linear_core import Line, given, words
from looplab.models.base import build
from looplab.models.ouro import tiny_ouro
from looplab.objectives.expected_exit import log_exit_law
from looplab.objectives.pre_loop_gate import PreLoopGateLoss

OBJECTIVE = PreLoopGateLoss()


def law_of(model, steps=4):
    with torch.no_grad():
        context = model.encode(words().tokens)
        state, scores = model.init_state(context, None), []
        for k in range(steps):
            state = model.step(state, context, 0, torch.full((4,), k))
            scores.append(model.halt(state))
    return log_exit_law(torch.stack(scores)).exp().movedim(0, -1)


def test_it_has_one_logit_per_step_and_starts_undecided():
    model = build(tiny_ouro(), dtype=torch.float64)
    gate = OBJECTIVE.beside(model)
    assert gate.weight.shape == (4, model.config.dim) and gate.weight.dtype == torch.float64
    embeds = torch.randn(2, 3, model.config.dim, dtype=torch.float64)
    assert_close(gate(embeds).softmax(-1), torch.full((2, 3, 4), 0.25, dtype=torch.float64))


def test_it_learns_the_exit_law_where_the_context_decides_it():
    """Hazards that do not depend on the state have one law: a bias is enough."""
    model = Line(halt="hazard")
    with torch.no_grad():
        model.gate.weight.zero_()
    gate = OBJECTIVE.beside(model)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    optimizer = torch.optim.Adam(gate.parameters(), lr=0.05)
    for step in range(120):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / 120)
        optimizer.zero_grad()
        parts = OBJECTIVE.run(given(model, words(), beside=gate)).parts
        parts.share(OBJECTIVE.counts(words().labels, 4)).backward()
        optimizer.step()
    with torch.no_grad():
        assert_close(gate(model.encode(words().tokens).embeds).softmax(-1), law_of(model), rtol=0, atol=5e-3)
    assert parts.means()["kl"] < 1e-3 and parts.means()["cdf"] < 1e-2
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


def test_a_gate_that_has_the_law_loses_nothing():
    model = Line(halt="hazard")
    with torch.no_grad():
        model.gate.weight.zero_()
    gate = OBJECTIVE.beside(model)
    with torch.no_grad():
        gate.bias.copy_(law_of(model)[0, 0].log())
    assert OBJECTIVE.run(given(model, words(), beside=gate)).parts.total == pytest.approx(0.0, abs=1e-12)


def test_another_number_of_steps_than_the_gate_has_is_refused():
    model = Line(halt="hazard")
    with pytest.raises(ValueError, match="the gate chooses among 4 steps, but 5 were run. Train it at the model's own"):
        OBJECTIVE.run(given(model, words(), 5, beside=OBJECTIVE.beside(model)))
    with pytest.raises(ValueError, match="PreLoopGateLoss needs at least 2 applications.* Got 1"):
        OBJECTIVE.counts(words().labels, 1)
    with pytest.raises(ValueError, match=r"PreLoopGateLoss: model 'tiny' has no halt\(\)"):
        OBJECTIVE.check(Line())
