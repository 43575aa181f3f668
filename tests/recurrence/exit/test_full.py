import torch

from contract.zoo import tiny, tokens
from looplab.recurrence.exit import FixedExit, FullExit, forward_until
from looplab.recurrence.loop import forward
from tolerances import EXACT


def test_full_is_the_plain_forward():
    model = tiny("tiny-ouro")
    ids = tokens(model, 2, 5)
    found, plain = forward_until(model, ids, FullExit()), forward(model, ids)
    assert found.steps.tolist() == [[4] * 5] * 2 and found.plan == plain.plan
    torch.testing.assert_close(found.logits, plain.logits, **EXACT)
    torch.testing.assert_close(found.state, plain.state, **EXACT)


def test_fixed_is_the_shorter_run():
    model = tiny("tiny-ouro")
    ids = tokens(model, 2, 5)
    found, plain = forward_until(model, ids, FixedExit(num_steps=2)), forward(model, ids, num_steps=2)
    assert found.steps.tolist() == [[2] * 5] * 2 and found.plan == plain.plan
    torch.testing.assert_close(found.logits, plain.logits, **EXACT)
