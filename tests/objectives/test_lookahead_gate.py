from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from linear_core import Line, given, words
from looplab.models.base import build
from looplab.models.ouro import tiny_ouro
from looplab.objectives.lookahead_gate import LookaheadGateLoss, exit_cdf
from looplab.objectives.same_step_gate import SameStepGateLoss
from looplab.recurrence.gradient import FullBPTT
from looplab.training.step import TrainingStep

OBJECTIVE = LookaheadGateLoss()


def run(model, beside, objective=OBJECTIVE, depth=5):
    return objective.run(given(model, words(), depth, beside=beside)).parts


def test_where_hazards_are_constant_a_copy_of_the_gate_has_the_same_law():
    model = Line(halt="hazard")
    with torch.no_grad():
        model.gate.weight.zero_()
    never = Line(halt="hazard")
    with torch.no_grad():
        never.gate.weight.zero_()
        never.gate.bias.fill_(-40.0)  # nothing stops before the end
    assert run(never, OBJECTIVE.beside(never)).means()["cdf"] == pytest.approx(0.0, abs=1e-12)
    assert run(model, SameStepGateLoss().beside(model), SameStepGateLoss()).means()["cdf"] == 0.0
    # The mass of the first step is folded into the second: with one hazard l the teacher has stopped by step 2 with
    # probability 1 - (1-l)^2, the student with l.
    chance = torch.sigmoid(model.gate.bias).item()
    own, teacher, apart, left = 1.0, 1.0 - chance, [], 4
    for _ in range(left - 1):
        own, teacher = own * (1 - chance), teacher * (1 - chance)
        apart.append(own - teacher)
    assert run(model, OBJECTIVE.beside(model)).means()["cdf"] == pytest.approx(sum(apart) / left, rel=1e-10)


def test_laws_end_at_one():
    hazards = torch.randn(4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cdf = exit_cdf(hazards)
    assert cdf.shape == (5, 7)
    assert_close(cdf[-1], torch.ones(7, dtype=torch.float64), rtol=0, atol=1e-12)
    assert bool((cdf.diff(dim=0) >= 0).all())


def test_it_starts_as_the_models_gate_and_leaves_the_model_alone():
    model = Line(halt="hazard")
    gate = OBJECTIVE.beside(model)
    assert_close(dict(gate.named_parameters()), dict(model.gate.named_parameters()))
    assert gate.weight.data_ptr() != model.gate.weight.data_ptr()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    step = TrainingStep(build(tiny_ouro()), OBJECTIVE, FullBPTT())
    assert {name for name, _ in step.named_parameters() if name.startswith("beside")} == {
        "beside.weight",
        "beside.bias",
    }
    parts = run(model, gate)
    parts.share({name: part.count for name, part in parts.items()}).backward()
    assert all(p.grad is None for p in model.parameters()) and gate.weight.grad is not None
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


def test_a_planted_gate_is_recovered_by_training():
    """With one token, h_{k+1} = a h_k + b at position 0, so the next hazard is a linear map of the state."""
    model = Line(a=0.8, b=0.5, halt="hazard")
    with torch.no_grad():
        model.table.copy_(torch.ones_like(model.table))
        model.gate.weight.copy_(torch.tensor([[2.0, 1.0, 1.0]]))
        model.gate.bias.fill_(-8.0)  # hardly any mass at step 1, which the student cannot choose
    labels = torch.full_like(words().labels, -100)
    labels[:, 0] = 0
    batch, gate, counts = replace(words(), labels=labels), OBJECTIVE.beside(model), OBJECTIVE.counts(labels, 6)
    states = torch.tensor([0.9, 1.2], dtype=torch.float64)[:, None, None].expand(2, 1, 3)
    wanted = 4 * (0.8 * states[:, :, 0] + 0.5) - 8.0
    assert (gate(states) - wanted).abs().max().item() > 1.0
    optimizer = torch.optim.LBFGS(gate.parameters(), max_iter=60, tolerance_change=0, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        part = OBJECTIVE.run(given(model, batch, 6, beside=gate)).parts["hazard"]  # smooth, unlike the other
        loss = part.sum / counts["hazard"]
        loss.backward()
        return loss.detach()

    optimizer.step(closure)
    assert_close(gate(states).detach(), wanted, rtol=0, atol=0.05)
    assert OBJECTIVE.run(given(model, batch, 6, beside=gate)).parts.means()["cdf"] < 0.005


def test_two_applications_leave_no_choice():
    with pytest.raises(ValueError, match="LookaheadGateLoss needs at least 3 applications.* Got 2. Raise the model's"):
        OBJECTIVE.counts(words().labels, 2)
    with pytest.raises(ValueError, match="SameStepGateLoss needs at least 2 applications.* Got 1"):
        SameStepGateLoss().counts(words().labels, 1)


def test_a_model_needs_a_gate_and_its_module():
    with pytest.raises(ValueError, match=r"LookaheadGateLoss: model 'tiny' has no halt\(\)"):
        OBJECTIVE.check(Line())
    with pytest.raises(ValueError, match="starts from the module `gate` of a model. 'tiny' has NoneType"):
        OBJECTIVE.beside(Line())
