import math
from dataclasses import replace

import pytest
import torch

from linear_core import Line, share, words
from looplab.objectives.terminal_fixed_point import TerminalFixedPoint, rms
from looplab.recurrence.loop import forward


def largest_exponent(weight):
    """log |a| of the linear core, its largest Lyapunov exponent, after training from a core that runs away.

    The labels are what the core says anyway, so the loss alone wants larger states.
    """
    model = Line(a=1.15, b=0.4)
    with torch.no_grad():
        labels = forward(model, words().tokens, num_steps=6).logits.argmax(-1)
    batch = replace(words(), labels=labels)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(80):
        optimizer.zero_grad()
        share(TerminalFixedPoint(weight=weight), model, batch, depth=6)[0].backward()
        optimizer.step()
    return math.log(abs(model.a.item()))


@pytest.mark.filterwarnings("ignore:num_steps=6 is beyond:UserWarning")
def test_it_makes_the_core_contract_and_weight_0_does_not():
    assert largest_exponent(0.2) < -0.05 < largest_exponent(0.0)


def test_the_gradient_goes_through_both_states_and_is_0_at_a_fixed_point():
    x = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    rms(x).sum().backward()
    assert torch.equal(x.grad, torch.zeros(2, 3, dtype=torch.float64))
    assert float(rms(torch.full((4,), -2.0))) == 2.0
    model = Line(a=0.0, b=0.0)
    loss, outcome = share(TerminalFixedPoint(), model, words())
    loss.backward()
    assert outcome.parts.means()["fixed_point"] == 0.0 and torch.isfinite(model.a.grad)


@pytest.mark.parametrize(("fields", "message"), [({"weight": -1.0}, "weight must be"), ({"chunk": 0}, "chunk must be")])
def test_bad_fields_are_refused(fields, message):
    with pytest.raises(ValueError, match=f"TerminalFixedPoint.{message}"):
        TerminalFixedPoint(**fields)
