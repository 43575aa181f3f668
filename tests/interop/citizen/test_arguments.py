"""What the arguments of the wrapper's forward mean, each on its own."""

import pytest
import torch

from looplab.interop.citizen.arguments import exit_of, items_of, positions_of, prompt_items, refuse, valid_of
from looplab.recurrence.exit import FixedExit, FullExit, LatentExit
from looplab.recurrence.kv import DepthIndexed
from looplab.recurrence.state import item_of

TOKENS = torch.tensor([[5, 6, 7], [8, 9, 10]])


def test_an_item_is_the_hash_of_a_row_without_its_padding():
    assert prompt_items(TOKENS, None) == [item_of(5, 6, 7), item_of(8, 9, 10)]
    mask = torch.tensor([[False, True, True], [True, True, True]])
    assert prompt_items(TOKENS, mask) == [item_of(6, 7), item_of(8, 9, 10)]


def test_items_may_be_a_tensor_or_a_list():
    assert items_of(torch.tensor([3, -1]), 2) == items_of((3, -1), 2) == [3, -1]
    with pytest.raises(ValueError, match=r"item_ids must have one number per row \(3\)\. Got 2"):
        items_of([1, 2], 3)


def test_exits_are_a_rule_a_name_with_its_number_or_a_step():
    assert exit_of(None, None, None, False) is None and exit_of(None, None, None, True) is None
    assert exit_of("latent", 0.5, None, False) == exit_of(LatentExit(threshold=0.5), None, None, False)
    assert exit_of("full", None, None, False) == FullExit()
    assert exit_of(None, None, 2, False) == FixedExit(num_steps=2)
    with pytest.raises(ValueError, match="Got exit_rule and weighted_exit. Leave all but one out"):
        exit_of("full", None, None, True)
    with pytest.raises(ValueError, match="exit_threshold needs the name of an exit_rule. Got 0.5"):
        exit_of(FullExit(), 0.5, None, False)


def test_of_a_mask_only_the_columns_of_this_call_count():
    assert valid_of(None, TOKENS) is None
    mask = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]])
    assert valid_of(mask, TOKENS).tolist() == [[False, True, True], [True, True, True]]
    for wrong in (mask[:, :2], mask[:1], mask[0]):
        with pytest.raises(ValueError, match="attention_mask must be .* with batch 2 and at least 3 columns"):
            valid_of(wrong, TOKENS)


def test_positions_count_the_valid_tokens_before():
    assert positions_of(torch.arange(5)[None], TOKENS, None, None).tolist() == [[2, 3, 4], [2, 3, 4]]
    assert positions_of(None, TOKENS, None, None).tolist() == [[0, 1, 2], [0, 1, 2]]
    valid = torch.tensor([[False, True, True], [True, True, True]])
    assert positions_of(None, TOKENS, valid, None).tolist() == [[0, 0, 1], [0, 1, 2]]
    core = DepthIndexed().cache(rows=2, capacity=9, iterations={0: 1})
    core.stage(positions_of(None, TOKENS, valid, core), valid)
    core.advance(3, {0: torch.ones(2, 3, dtype=torch.long)})
    assert positions_of(None, TOKENS, None, core).tolist() == [[2, 3, 4], [3, 4, 5]]


def test_what_cannot_be_answered_is_named():
    refuse(one=None, other=False)
    with pytest.raises(ValueError, match="other must be left out: .* Got True"):
        refuse(one=None, other=True)
