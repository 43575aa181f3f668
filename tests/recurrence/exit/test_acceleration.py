import torch

from looplab.recurrence.exit import AccelerationExit, Seen
from looplab.recurrence.plan import ModelLoop
from tiny import tiny_spec

SPEC = tiny_spec(ModelLoop(num_steps=9), 1, 3)


def step(places):
    """The step at which one token stops whose state is `places[t]` in every channel."""
    rule = AccelerationExit(threshold=0.1)
    memory = rule.start(SPEC, torch.full((1, 1, 3), places[0]))
    for t, place in enumerate(places[1:], 1):
        stop, memory = rule.stops(memory, Seen(torch.tensor([t]), torch.full((1, 1, 3), place)), 9)
        if bool(stop):
            return t
    return None


def test_steady_motion_stops_at_the_fourth_step_and_no_earlier():
    assert step([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == 4


def test_the_initial_state_takes_no_part():
    assert step([-50.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == 4


def test_one_small_acceleration_is_not_enough():
    """Accelerations at 3, 4, ..: small, large, small, small."""
    assert step([0.0, 1.0, 2.0, 3.0, 8.0, 13.0, 18.0]) == 6
