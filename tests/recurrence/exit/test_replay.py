import re

import pytest
import torch

from contract.zoo import tiny, tokens
from looplab.recurrence.exit import HazardExit, ReplayExit, forward_until
from tolerances import EXACT


def test_a_recorded_run_is_repeated():
    model = tiny("tiny-ouro")
    ids = tokens(model, 2, 8)
    first = forward_until(model, ids, HazardExit(threshold=0.5))
    assert len(first.steps.unique()) > 1
    again = forward_until(model, ids, ReplayExit(depths=first.steps))
    assert torch.equal(again.steps, first.steps)
    torch.testing.assert_close(again.logits, first.logits, **EXACT)


@pytest.mark.parametrize(
    "depths",
    [torch.tensor([1, 2]), torch.tensor([[1.0, 2.0]]), torch.tensor([[True, False]]), [[1, 2]], 3],
    ids=repr,
)
def test_depths_are_whole_numbers_per_token(unchecked, depths):
    with pytest.raises(ValueError, match=r"ReplayExit.depths must be Int\[batch, seq\]. Got"):
        ReplayExit(depths=depths)


def test_a_depth_of_zero_is_refused():
    with pytest.raises(ValueError, match=re.escape("ReplayExit.depths must be at least 1. Got 0 at row 1, token 0.")):
        ReplayExit(depths=torch.tensor([[1, 2], [0, 1]]))


def test_depths_of_another_shape_or_beyond_the_run_are_refused():
    model = tiny("tiny-ouro")
    ids = tokens(model, 2, 5)
    message = "ReplayExit.depths must have one entry per token of the call, (2, 5). Got (2, 4)."
    with pytest.raises(ValueError, match=re.escape(message)):
        forward_until(model, ids, ReplayExit(depths=torch.ones(2, 4, dtype=torch.long)))
    deep = torch.ones(2, 5, dtype=torch.long)
    deep[1, 3] = 5
    with pytest.raises(ValueError, match=re.escape("must be at most num_steps, 4. Got 5 at row 1, token 3.")):
        forward_until(model, ids, ReplayExit(depths=deep))
