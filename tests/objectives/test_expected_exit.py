import pytest
import torch
from torch.testing import assert_close

from linear_core import Line, share, words
from looplab.models.base import build
from looplab.models.looped import tiny_core
from looplab.models.ouro import tiny_ouro
from looplab.objectives.expected_exit import ExpectedExit, log_exit_law
from reference.objectives import exit_law, sigmoid
from tolerances import TWIN


def test_the_law_sums_to_one_however_sure_the_gate_is():
    for scale in (0.1, 3.0, 300.0):
        gate = scale * torch.randn(6, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        law = log_exit_law(gate).exp()
        assert_close(law.sum(0), torch.ones(50, dtype=torch.float64), rtol=0, atol=1e-12)
    assert torch.isfinite(log_exit_law(gate)).all()  # log p, of probabilities that are 0 in floating point


def test_the_law_is_that_of_the_definition_and_its_last_hazard_is_not_used():
    gate = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    law = log_exit_law(gate).exp()
    for token in range(3):
        wanted = exit_law([sigmoid(float(x)) for x in gate[:, token]])
        assert_close(law[:, token], torch.tensor(wanted, dtype=torch.float64), **TWIN)
    gate[-1] += 9
    assert torch.equal(log_exit_law(gate).exp(), law)


@pytest.mark.parametrize("beta", [0.1, 0.5, 1e6])
def test_with_fixed_losses_the_best_law_is_the_softmax_of_their_negatives(beta):
    losses = torch.tensor([2.0, 1.2, 1.5, 1.1], dtype=torch.float64)
    gate = torch.zeros(4, 1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [gate], max_iter=300, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure():
        optimizer.zero_grad()
        log_p = log_exit_law(gate)[:, 0]
        loss = ((log_p.exp() * losses).sum() + beta * (log_p.exp() * log_p).sum()) / beta
        loss.backward()
        return loss.detach()

    optimizer.step(closure)
    law = log_exit_law(gate.detach())[:, 0].exp()
    assert_close(law, (-losses / beta).softmax(0), rtol=1e-5, atol=1e-6)
    if beta == 1e6:
        assert_close(law, torch.full((4,), 0.25, dtype=torch.float64), rtol=1e-5, atol=0)


def test_a_gate_learns_to_stop_where_the_loss_is_least():
    """The whole objective, not the formula: only the gate is trained, on a core that gets worse after one step."""
    model = Line(a=1.6, b=0.5, halt="hazard")
    optimizer = torch.optim.Adam(model.gate.parameters(), lr=0.1)
    before = share(ExpectedExit(beta=0.02), model, words())[1].parts.means()
    for _ in range(80):
        optimizer.zero_grad()
        share(ExpectedExit(beta=0.02), model, words())[0].backward()
        optimizer.step()
    after = share(ExpectedExit(beta=0.02), model, words())[1].parts.means()
    assert after["expected_ce"] < before["expected_ce"] - 0.1
    assert after["entropy"] < before["entropy"]


def test_one_iteration_has_no_entropy():
    parts = share(ExpectedExit(), Line(halt="hazard"), words(), depth=1)[1].parts
    assert parts.means()["entropy"] == 0.0


def test_the_entropy_has_a_negative_weight():
    parts = share(ExpectedExit(beta=0.25), Line(halt="hazard"), words())[1].parts
    assert (parts["expected_ce"].weight, parts["entropy"].weight) == (1.0, -0.25)


def test_a_model_needs_a_hazard_gate():
    ExpectedExit().check(build(tiny_ouro(), device="meta"))
    with pytest.raises(ValueError, match="ExpectedExit") as caught:
        ExpectedExit().check(build(tiny_core(), device="meta"))
    assert str(caught.value) == "ExpectedExit: model 'looped' has no halt(). Models with one: ouro, trm, hrm."
    with pytest.raises(ValueError, match="needs a gate whose score is a hazard per token.*q_halt per token"):
        ExpectedExit().check(Line(halt="q_halt"))


@pytest.mark.parametrize(("fields", "message"), [({"beta": -1.0}, "beta must be"), ({"chunk": 0}, "chunk must be")])
def test_bad_fields_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ExpectedExit(**fields)
