import pytest
import torch

from looplab.diagnostics.lens import Lens, lens
from looplab.models.base import PRESETS, build
from looplab.recipes.layer_vs_model_loop import SMOKE, Cell, layer_vs_model_loop
from looplab.recurrence.loop import forward, run_plan


def of(*answers):
    """A lens of one token with these answers."""
    top = torch.tensor(answers)[:, None, None]
    return Lens(top, torch.zeros(1, 1, 9), torch.zeros(len(answers)), torch.zeros(len(answers)))


@pytest.mark.parametrize(
    ("answers", "settled", "decided", "first", "flips"),
    [
        ((3, 3, 3, 3), True, True, 1, 0),
        ((3, 5, 3, 3), True, False, 3, 2),
        ((1, 2, 2, 3), False, False, 4, 2),
        ((1, 3, 3, 3), False, False, 2, 1),
        ((7,), True, True, 1, 0),
    ],
)
def test_when_an_answer_settles(answers, settled, decided, first, flips):
    found = of(*answers)
    assert bool(found.settled_at_first) is settled
    assert bool(found.decided) is decided
    assert int(found.first_stay) == first
    assert int(found.flips) == flips


def model(order):
    return build(layer_vs_model_loop(Cell("chase", order, "plain", "fixed"), SMOKE).model, seed=1)


TOKENS = torch.arange(12).view(2, 6) % 11


@pytest.mark.parametrize("order", ["layer", "model"])
def test_the_last_readout_is_that_of_a_forward_pass(order):
    looped = model(order)
    found = lens(looped, TOKENS, 4)
    assert found.top.shape == (4, 2, 6)
    assert torch.equal(found.logits, forward(looped, TOKENS, num_steps=4).logits)


def test_a_layer_loop_is_read_after_every_application_of_its_last_layer():
    looped = model("layer")
    found = lens(looped, TOKENS, 3)
    with torch.no_grad():
        context = looped.encode(TOKENS)
        state = run_plan(looped, looped.spec.plan(3)[:6], context, looped.init_state(context, None))
    for t, application in enumerate(looped.spec.plan(3)[6:]):
        index = torch.full((2,), application.iteration)
        with torch.no_grad():
            new = looped.step(state, context, 2, index)
        assert torch.equal(found.top[t], looped.head(looped.coda(new, context)).argmax(-1))
        assert float(found.rms[t]) == pytest.approx(float(new.square().mean().sqrt()))
        moved = ((new - state).norm(dim=-1) / state.norm(dim=-1)).mean()
        assert float(found.update[t]) == pytest.approx(float(moved))
        state = new


def test_no_application_has_no_readout():
    with pytest.raises(ValueError, match=r"lens: num_steps must be at least 1. Got 0"):
        lens(model("model"), TOKENS, 0)


def test_a_start_from_noise_is_refused():
    with pytest.raises(ValueError, match=r"lens: model must start without noise. 'looped' draws some"):
        lens(build(PRESETS["tiny-huginn"](), seed=0), TOKENS, 2)
