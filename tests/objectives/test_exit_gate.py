import math

import pytest
import torch
from torch.testing import assert_close

from linear_core import Line, share, words
from looplab.models.base import build
from looplab.models.looped import tiny_core
from looplab.models.ouro import tiny_ouro
from looplab.objectives.exit_gate import ExitGate, wanted
from looplab.recurrence.exit import HazardExit
from looplab.recurrence.exit.base import Seen


def test_without_a_gain_going_on_is_wanted_with_probability_438():
    w = wanted(torch.tensor([2.0, 2.0, 3.0, 2.995, 2.0], dtype=torch.float64))
    assert float(w[0]) == float(w[1]) == pytest.approx(1 / (1 + math.exp(0.25)), abs=1e-12)
    assert float(w[0]) == pytest.approx(0.438, abs=5e-4)
    assert float(w[2]) == pytest.approx(0.5, abs=1e-9)
    assert float(w[3]) == pytest.approx(1.0, abs=1e-9)


def fitted(losses):
    """The best hazards of iterations 2 .. T for losses that are planted."""
    w = wanted(torch.tensor(losses, dtype=torch.float64))
    gate = torch.zeros(len(w), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [gate], max_iter=100, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure():
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(-gate, w, reduction="sum")
        loss.backward()
        return loss.detach()

    optimizer.step(closure)
    return gate.detach(), w


def test_the_fixed_point_of_the_gate_is_one_minus_the_wanted_probability():
    gate, w = fitted([3.0, 2.0, 1.9, 1.9, 1.899])
    assert_close(torch.sigmoid(gate), 1 - w, rtol=1e-6, atol=1e-8)
    assert float(torch.sigmoid(gate).max()) <= 0.5622


def test_losses_that_stop_improving_after_the_third_stop_at_the_fourth():
    gate, _ = fitted([3.0, 2.0, 1.0, 1.0, 1.0, 1.0])
    rule, state = HazardExit(threshold=0.5), torch.zeros(1, 1, 1, dtype=torch.float64)
    memory = rule.start(Line(halt="hazard").spec, state)
    stopped = []
    for k, score in enumerate([-50.0, *gate.tolist()], 1):  # the first hazard is not trained here
        seen = Seen(torch.tensor([k]), state, torch.tensor([[score]], dtype=torch.float64))
        stop, memory = rule.stops(memory, seen, 6)
        stopped.append(bool(stop))
    assert stopped.index(True) + 1 == 4


def test_average_says_what_the_sum_is_divided_by():
    model = Line(halt="hazard")
    all_of, later = (share(ExitGate(average=a), model, words())[1].parts.total for a in ("T", "T-1"))
    assert later == pytest.approx(all_of * 4 / 3, rel=1e-12)


def test_a_gate_that_is_trained_says_what_was_wanted():
    """A gate that sees a constant can only learn the mean: 1 - E[w]."""
    model = Line(halt="hazard")
    with torch.no_grad():
        model.gate.weight.zero_()
    optimizer = torch.optim.LBFGS([model.gate.bias], max_iter=15, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = share(ExitGate(), model, words())[0]
        loss.backward()
        return loss.detach()

    optimizer.step(closure)
    with torch.no_grad():
        context = model.encode(words().tokens)
        state, losses = model.init_state(context, None), []
        for k in range(4):
            state = model.step(state, context, 0, torch.full((4,), k))
            losses.append(torch.nn.functional.cross_entropy(model.head(state).mT, words().labels, reduction="none"))
        mean = wanted(torch.stack(losses)).mean()
    assert torch.sigmoid(model.gate.bias).item() == pytest.approx(1 - float(mean), abs=1e-5)


def frozen(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("gate"))
    return model


def test_everything_but_the_gate_must_be_frozen():
    ExitGate().check(frozen(build(tiny_ouro(), device="meta")))
    model = build(tiny_ouro(), device="meta")
    count = len(list(model.parameters())) - 2
    with pytest.raises(ValueError, match="ExitGate") as caught:
        ExitGate().check(model)
    assert str(caught.value) == (
        f'ExitGate expects a frozen language model; {count} tensors require grad. Set train_only=("gate",).'
    )


def test_a_model_without_a_gate_is_refused():
    with pytest.raises(ValueError, match="ExitGate") as caught:
        ExitGate().check(build(tiny_core(), device="meta"))
    assert str(caught.value) == "ExitGate: model 'looped' has no halt(). Models with one: ouro, trm, hrm."


def test_a_single_iteration_has_brought_no_gain():
    with pytest.raises(ValueError, match="needs 2 applications at least. Got 1. Raise the least depth"):
        ExitGate().counts(words().labels, 1)


def test_bad_fields_are_refused():
    with pytest.raises(ValueError, match="ExitGate.chunk must be at least 1 token, or None. Got 0."):
        ExitGate(chunk=0)
