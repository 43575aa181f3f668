import math

import pytest
import torch

from looplab.recurrence.exit import ArgmaxExit, EntropyExit, KLExit, Seen
from looplab.recurrence.exit.readout import divergence, entropy
from looplab.recurrence.plan import ModelLoop
from tiny import tiny_spec
from tolerances import TWIN

SPEC = tiny_spec(ModelLoop(num_steps=9), 1, 3, vocab=(2, 2))
STATE = torch.zeros(1, 1, 3)


def step(rule, laws):
    """The step at which one token stops whose next-token law is `laws[t - 1]`."""
    memory = rule.start(SPEC, STATE)
    for t, law in enumerate(laws, 1):
        logits = torch.tensor(law).log().view(1, 1, 1, 2)
        stop, memory = rule.stops(memory, Seen(torch.tensor([t]), STATE, None, logits), 9)
        if bool(stop):
            return t
    return None


@pytest.mark.parametrize("rule", [KLExit(threshold=0.01), EntropyExit(threshold=0.01)], ids=str)
def test_a_uniform_first_readout_is_not_taken_for_a_settled_one(rule):
    assert step(rule, [[0.5, 0.5], [0.9, 0.1], [0.9, 0.1]]) == 3
    assert step(rule, [[0.5, 0.5], [0.5, 0.5]]) == 2


def test_kl_is_from_the_earlier_law_to_the_later_one():
    before, now = torch.tensor([[0.5, 0.5], [0.9, 0.1]], dtype=torch.float64).log().split(1)
    want = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    torch.testing.assert_close(divergence(before, now), torch.tensor(want, dtype=torch.float64), **TWIN)


def test_symbols_without_probability_count_nothing_and_a_nan_stays_one():
    before, now = torch.tensor([[1.0, 0.0]]).log(), torch.tensor([[0.5, 0.5]]).log()
    assert math.isclose(float(divergence(before, now)), math.log(2), rel_tol=1e-6)
    assert float(divergence(now, before)) == math.inf
    assert float(entropy(before)) == 0.0
    broken = torch.tensor([[float("nan"), 0.0]])
    assert math.isnan(divergence(before, broken)) and math.isnan(entropy(broken))


def test_readouts_that_are_not_numbers_never_look_settled():
    nan = [float("nan"), 0.5]
    assert step(KLExit(threshold=10.0), [nan] * 4) is None
    assert step(EntropyExit(threshold=10.0), [nan] * 4) is None


def test_opposite_laws_have_equal_entropy_but_not_kl():
    laws = [[0.9, 0.1], [0.1, 0.9], [0.1, 0.9]]
    assert step(EntropyExit(threshold=0.01), laws) == 2
    assert step(KLExit(threshold=0.01), laws) == 3


def test_argmax_counts_the_steps_with_one_top_token():
    up, down = [0.9, 0.1], [0.2, 0.8]
    assert step(ArgmaxExit(times=2), [up, down, up, up]) == 4
    assert step(ArgmaxExit(times=3), [up, up, down, down, down]) == 5
    assert step(ArgmaxExit(times=2), [[0.5, 0.5], up]) == 2, "the lowest id wins a tie"
