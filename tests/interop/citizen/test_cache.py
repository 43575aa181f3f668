"""The cache that `generate` hands around: slots, growth, and what decoding strategies ask of it."""

import pytest
import torch
from transformers import DynamicCache

from looplab.interop import LoopCache, LooplabForCausalLM
from looplab.interop.citizen.cache import ROOM, own_cache
from looplab.models.base import PRESETS, build
from tolerances import CACHED, EXACT


def wrapped(preset="tiny-core"):
    return LooplabForCausalLM.wrap(build(PRESETS[preset](), seed=1, dtype=torch.float64))


def tokens(rows=2, length=6, seed=0):
    return torch.randint(0, 63, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def filled(model, ids):
    cache = LoopCache()
    model(ids, cache=cache)
    return cache


def test_every_layer_of_it_is_one_slot():
    model, ids = wrapped(), tokens()
    cache = filled(model, ids)
    assert len(cache) == len(cache.layers) == model.config.total_num_hidden_layers
    assert all(layer.keys.shape == layer.values.shape == (2, 2, 6, 16) for layer in cache.layers)
    slots = [(layer.block, layer.slot, layer.layer) for layer in cache.layers]
    assert slots[:4] == [(-1, 0, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0)] and slots[-1] == (-2, 0, 0)
    keys = torch.stack([layer.keys for layer in cache.layers])
    assert len({float(k.sum()) for k in keys}) == len(cache)  # no two slots hold the same
    assert cache.layers[3].get_seq_length() == 6 and cache.layers[3].get_mask_sizes(2) == (8, 0)


def test_what_the_library_asks_before_anything_ran():
    cache = LoopCache()
    assert (cache.get_seq_length(), len(cache), cache.batch_size, cache.is_initialized) == (0, 0, -1, False)
    assert cache.get_mask_sizes(4, 0) == (4, 0) and cache.get_max_length() == -1 and not cache.is_compileable
    assert repr(cache) == "LoopCache(empty)"
    cache.crop(-2)
    cache.reorder_cache(torch.tensor([0]))
    assert cache.core is None


def test_it_says_what_it_holds():
    model = wrapped()
    cache = filled(model, tokens())
    assert cache.get_seq_length() == cache.get_query_offset() == 6 and cache.get_mask_sizes(3, 0) == (9, 0)
    assert (cache.batch_size, cache.is_croppable, cache.is_initialized) == (2, True, True)
    assert repr(cache) == f"LoopCache({cache.core.rule}, 10 slots, 6 tokens)"
    cache.reset()
    assert (cache.core, cache.items, len(cache)) == (None, None, 0)


@torch.no_grad()
def test_room_grows_and_nothing_is_lost():
    model, ids = wrapped(), tokens(2, ROOM + 9)
    cache = filled(model, ids[:, :2])
    assert cache.core.capacity == 2 + ROOM
    rest = model(ids[:, 2:-1], cache=cache).logits
    assert cache.core.capacity == 2 * (2 + ROOM)
    last = model(ids[:, -1:], cache=cache).logits
    whole = model(ids, item_ids=cache.items).logits
    torch.testing.assert_close(torch.cat([rest, last], dim=1), whole[:, 2:], **CACHED)


@torch.no_grad()
@pytest.mark.parametrize("keep", [-2, 4], ids=["tokens to remove", "length to keep"])
def test_what_is_cropped_can_be_decoded_again(keep):
    model, ids = wrapped(), tokens()
    cache = filled(model, ids)
    cache.crop(0)
    assert cache.get_seq_length() == 6
    cache.crop(keep)
    assert cache.get_seq_length() == 4
    other = tokens(2, 2, seed=5)
    again = model(other, cache=cache).logits
    whole = model(torch.cat([ids[:, :4], other], dim=1), item_ids=cache.items).logits
    torch.testing.assert_close(again, whole[:, 4:], **CACHED)


@torch.no_grad()
def test_rows_move_with_their_noise():
    model, ids, new = wrapped(), tokens(3), tokens(3, 1, seed=7)
    straight = model(new, cache=filled(model, ids)).logits
    for change, rows in (
        (lambda c: c.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda c: c.batch_select_indices(torch.tensor([2, 1])), [2, 1]),
        (lambda c: c.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
    ):
        cache = filled(model, ids)
        before = list(cache.items)
        change(cache)
        assert cache.items == [before[row] for row in rows]
        torch.testing.assert_close(model(new[rows], cache=cache).logits, straight[rows], **CACHED)


def test_a_slot_is_not_written_from_outside():
    cache = filled(wrapped(), tokens())
    with pytest.raises(ValueError, match="a slot is written by its model only"):
        cache.update(torch.zeros(2, 2, 1, 16), torch.zeros(2, 2, 1, 16), 0)


def test_calls_that_do_not_fit_are_refused():
    model, cache = wrapped("tiny-no-envelope"), LoopCache()
    with torch.no_grad():
        model(tokens(), cache=cache, num_steps=2)
        with pytest.raises(ValueError, match=r"cache has 2 rows, tokens have 3. Use cache.select\(rows\)"):
            model(tokens(3, 1), cache=cache, num_steps=2)
        with pytest.raises(ValueError, match="cache holds 2 iterations of block 0, the plan runs 3"):
            model(tokens(2, 1), cache=cache, num_steps=3)
    with pytest.raises(ValueError, match="keys must not carry a gradient"):
        model(tokens(), use_cache=True)


def test_a_cache_is_taken_as_it_is_or_replaced():
    cache = LoopCache()
    assert own_cache(cache) is cache
    assert own_cache(None).core is None and own_cache(DynamicCache()).core is None
    with pytest.raises(ValueError, match="Got DynamicCache. Leave cache_implementation out"):
        own_cache(DynamicCache(offloading=True))


def test_beams_are_sorted_in_the_cache_that_is_returned():
    model, ids = wrapped("tiny-no-envelope"), tokens()
    out = model.generate(
        ids, num_beams=2, max_new_tokens=3, do_sample=False, pad_token_id=63, return_dict_in_generate=True
    )
    held = out.get("cache", out.get("past_key_values"))
    assert isinstance(held, LoopCache) and held.batch_size == 4
    torch.testing.assert_close(held.layers[0].keys[0, :, :6], held.layers[0].keys[1, :, :6], **EXACT)
