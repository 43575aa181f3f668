import pytest
import torch

from contract.zoo import tiny, tokens
from looplab.recurrence.exit import HazardExit, Seen, forward_until
from looplab.recurrence.plan import ModelLoop
from tiny import tiny_spec

BY_HAND = [
    # chances to stop at steps 1, 2, 3 -> summed: .25, .25 + .75 * .5 = .625, .625 + .375 * .8 = .925
    (0.2, 1),
    (0.25, 1),
    (0.3, 2),
    (0.625, 2),
    (0.63, 3),
    (0.925, 3),
    (0.93, 4),
    (1.0, 4),
]


@pytest.mark.parametrize(("threshold", "step"), BY_HAND)
def test_the_steps_of_a_table_worked_out_by_hand(threshold, step):
    rule, state = HazardExit(threshold=threshold), torch.zeros(1, 1, 2, dtype=torch.float64)
    memory = rule.start(tiny_spec(ModelLoop(num_steps=4), 1, 2), state)
    for t, chance in enumerate((0.25, 0.5, 0.8, 0.1), 1):
        # A little more than the chance, so that a sum that ought to reach the threshold does in floating point.
        score = torch.logit(torch.tensor([[chance]], dtype=torch.float64)) + 1e-12
        stop, memory = rule.stops(memory, Seen(torch.tensor([t]), state, score), 4)
        if bool(stop):
            break
    assert t == step


def test_a_threshold_of_one_is_full_depth_though_the_gate_is_sure():
    """The summed probability is 1 after the first step; the original's default of 1.0 would then stop."""
    model = tiny("tiny-ouro", dtype=torch.float32)
    torch.nn.init.constant_(model.gate.bias, 100.0)
    ids = tokens(model, 2, 5)
    with torch.no_grad():
        assert (torch.sigmoid(model.halt(forward_until(model, ids, HazardExit(threshold=1.0)).state)) == 1).all()
        assert forward_until(model, ids, HazardExit(threshold=1.0)).steps.unique().tolist() == [4]
        assert forward_until(model, ids, HazardExit(threshold=0.999)).steps.unique().tolist() == [1]
