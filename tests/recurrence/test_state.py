import hashlib
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from looplab.recurrence import state as states
from tolerances import EXACT


class Pair(NamedTuple):
    first: Tensor
    second: Tensor | None
    tag: str


class Outer(NamedTuple):
    pair: Pair
    plain: tuple


def numbers(rows, shift=0.0):
    return torch.arange(rows * 2.0).reshape(rows, 2) + shift


def outer(rows=3, shift=0.0):
    return Outer(Pair(numbers(rows, shift), None, "kept"), (numbers(rows, shift + 10)[:, 0],))


def test_a_map_keeps_structure_none_and_plain_values():
    doubled = states.map(lambda x: 2 * x, outer())
    assert isinstance(doubled, Outer)
    assert isinstance(doubled.pair, Pair)
    assert doubled.pair.second is None
    assert doubled.pair.tag == "kept"
    assert torch.equal(doubled.pair.first, 2 * numbers(3))
    assert torch.equal(doubled.plain[0], 2 * numbers(3, 10)[:, 0])


def test_leaves_come_in_field_order():
    first, second = states.leaves(outer())
    assert torch.equal(first, numbers(3))
    assert torch.equal(second, numbers(3, 10)[:, 0])
    assert len(states.leaves(numbers(1))) == 1


@pytest.mark.parametrize(
    "rows", [[2, 0], slice(1, 3), torch.tensor([True, False, True])], ids=["list", "slice", "mask"]
)
def test_rows_are_picked_from_every_tensor(rows):
    picked = states.select(outer(), rows)
    assert torch.equal(picked.pair.first, numbers(3)[rows])
    assert torch.equal(picked.plain[0], numbers(3, 10)[rows, 0])


def test_where_takes_each_row_from_one_side():
    mixed = states.where(torch.tensor([True, False, True]), outer(shift=100.0), outer())
    assert torch.equal(mixed.pair.first, torch.stack([numbers(3, 100)[0], numbers(3)[1], numbers(3, 100)[2]]))
    assert torch.equal(mixed.plain[0], torch.tensor([110.0, 12.0, 114.0]))


def test_a_stack_undoes_a_selection():
    whole = outer()
    parts = [states.select(whole, slice(i, i + 1)) for i in range(3)]
    for one, other in zip(states.leaves(states.stack(parts)), states.leaves(whole), strict=True):
        assert torch.equal(one, other)


def test_detached_states_have_no_graph_and_the_same_numbers():
    state = Pair(numbers(2).requires_grad_() * 1, None, "")
    detached = states.detach(state)
    assert state.first.requires_grad
    assert not detached.first.requires_grad
    assert torch.equal(detached.first, numbers(2))


def test_bytes_are_counted_over_all_tensors():
    assert states.nbytes(Pair(numbers(3), numbers(3).double(), "")) == 6 * 4 + 6 * 8


def test_a_component_is_found_by_name():
    pair = Pair(numbers(1), None, "")
    assert states.component(pair, "first") is pair.first
    assert states.component(pair.first, "state") is pair.first


def test_an_item_is_the_start_of_a_hash():
    assert states.item_of("key", 3) == int.from_bytes(hashlib.sha256(b"key:3").digest()[:8], "big")
    assert states.item_of(b"key", "3") == states.item_of("key", 3) != states.item_of("key", 4)


def test_noise_is_standard_normal():
    noise = states.standard_noise(3, range(40), torch.arange(100).expand(40, -1), 50).double()
    assert noise.shape == (40, 100, 50)
    assert abs(noise.std() - 1) < 0.01
    assert abs(noise.mean()) < 0.01
    assert abs((noise**3).mean()) < 0.03
    assert abs((noise**4).mean() - 3) < 0.06
    assert stats.kstest(noise.flatten()[:20_000].numpy(), "norm").pvalue > 1e-4
    channels = torch.corrcoef(noise.flatten(0, 1).T) - torch.eye(50)
    assert channels.abs().max() < 0.08  # 4000 draws: 5 standard errors


@given(
    seed=st.integers(0, 2**64 - 1),
    items=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=3),
    start=st.integers(0, 2**31),
    width=st.integers(1, 9),
)
def test_noise_of_a_token_depends_on_seed_item_position_and_channel_alone(seed, items, start, width):
    positions = (start + torch.arange(5)).expand(len(items), -1)
    whole = states.standard_noise(seed, items, positions, width)
    chunks = [states.standard_noise(seed, items, positions[:, a:b], width) for a, b in ((0, 2), (2, 5))]
    torch.testing.assert_close(torch.cat(chunks, 1), whole, **EXACT)
    alone = states.standard_noise(seed, items[-1:], positions[-1:], width)
    torch.testing.assert_close(alone, whole[-1:], **EXACT)
    wider = states.standard_noise(seed, items, positions, width + 3)
    torch.testing.assert_close(wider[..., :width], whole, **EXACT)
    swapped = states.standard_noise(seed, items[::-1], positions, width)
    torch.testing.assert_close(swapped.flip(0), whole, **EXACT)


def test_everything_the_noise_depends_on_changes_it():
    at = torch.tensor([[5]])
    base = states.standard_noise(1, [2], at, 4)
    others = [
        states.standard_noise(2, [2], at, 4),
        states.standard_noise(1 + 2**32, [2], at, 4),
        states.standard_noise(1, [3], at, 4),
        states.standard_noise(1, [2 + 2**32], at, 4),
        states.standard_noise(1, [2], at + 1, 4),
    ]
    assert all(not (other == base).any() for other in others)
    assert len(base.unique()) == 4


def test_noise_needs_one_item_per_row():
    with pytest.raises(ValueError, match=r"items must have one entry per row \(2\)\. Got 3"):
        states.standard_noise(0, [1, 2, 3], torch.zeros(2, 1, dtype=torch.long), 4)
