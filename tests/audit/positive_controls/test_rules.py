"""Rules that move a known state."""

import numpy as np
import torch

import tolerances
from looplab.audit.positive_controls.known import Known
from looplab.audit.positive_controls.letters import Chain
from looplab.audit.positive_controls.rules import Maps, Towards, Writes, quarters, stationary_start

STATE, TRUTH = torch.randn(2, 2, 3, 8, generator=torch.Generator().manual_seed(0))
ROWS = torch.tensor([0, 1])


def test_maps_forget_the_state():
    gain, shift = torch.tensor([[2.0], [1.0]]), torch.tensor([[0.0], [0.5]])
    moved = Maps(gain, shift)(STATE, TRUTH, 0, ROWS)
    torch.testing.assert_close(moved, torch.stack([2 * TRUTH[0], TRUTH[1] + 0.5]), **tolerances.EXACT)
    torch.testing.assert_close(Maps(gain, shift)(0 * STATE, TRUTH, 0, ROWS), moved, **tolerances.EXACT)


def test_towards_goes_part_of_the_way_by_block_and_iteration():
    rule = Towards([[0.0, 1.0], [0.5, 0.25]])
    torch.testing.assert_close(rule(STATE, TRUTH, 0, ROWS), torch.stack([STATE[0], TRUTH[1]]), **tolerances.EXACT)
    moved = torch.stack([(STATE[0] + TRUTH[0]) / 2, STATE[1] + (TRUTH[1] - STATE[1]) / 4])
    torch.testing.assert_close(rule(STATE, TRUTH, 1, ROWS), moved)


def test_a_shift_of_zeros_changes_no_bit_and_another_shift_is_added_by_row():
    plain = Towards([[0.3, 0.3]])(STATE, TRUTH, 0, ROWS)
    inert = Towards([[0.3, 0.3]], torch.zeros(1, 2, 8))(STATE, TRUTH, 0, ROWS)
    torch.testing.assert_close(inert, plain, **tolerances.EXACT)
    shift = torch.arange(16.0).view(1, 2, 8)
    shifted = Towards([[0.3, 0.3]], shift)(STATE, TRUTH, 0, ROWS)
    torch.testing.assert_close(shifted, plain + shift[0][:, None], **tolerances.EXACT)


def test_writing_is_idempotent_and_leaves_other_features():
    rule = Writes(quarters(8)[None], torch.full((1, 4), 0.7))
    once = rule(STATE, TRUTH, 0, ROWS)
    torch.testing.assert_close(rule(once, TRUTH, 0, ROWS), once, **tolerances.EXACT)
    torch.testing.assert_close(once[1, :, 2:4], 0.7 * TRUTH[1, :, 2:4], **tolerances.EXACT)
    torch.testing.assert_close(once[1, :, 4:], STATE[1, :, 4:], **tolerances.EXACT)


def test_quarters_share_out_every_feature_once():
    assert quarters(8).sum(dim=0).tolist() == [1] * 8
    assert quarters(12).sum(dim=1).tolist() == [3] * 4


def test_a_stationary_start_reads_as_the_stationary_law():
    chain = Chain.drawn(0)
    model = Known(chain, stationary_start(chain), steps=2)
    state = model.rule(model.truth[None], model.truth[None], 0, torch.tensor([0]))
    law = torch.softmax(model.head(state), dim=-1)[0].detach().numpy()
    np.testing.assert_allclose(law, np.broadcast_to(chain.stationary, law.shape), atol=1e-6)
    full = model.rule(state, model.truth[None], 0, torch.tensor([1]))
    torch.testing.assert_close(full[0], model.truth, **tolerances.EXACT)
