"""Tensors in pieces: the whole is the whole, in memory and in files, for any number of processes."""

import pytest
import torch

from looplab.training.spread import (
    as_placed,
    in_pieces,
    in_turns,
    is_spread,
    norm,
    own_piece,
    read_pieces,
    save_pieces,
    whole,
)
from training.forked import forked


def full():
    """A matrix whose rows no two processes share evenly, a vector shorter than two, and a counter."""
    made = torch.Generator().manual_seed(0)
    return {
        "a/m": torch.randn(5, 3, generator=made),
        "b/m": torch.randn(1, generator=made),
        "a/step": torch.tensor(3.0),
    }


def test_on_one_process_tensors_are_what_they_are():
    tensors = full()
    assert not is_spread(tensors)
    assert whole(tensors) == tensors
    assert own_piece(tensors["a/m"]) is tensors["a/m"]
    assert as_placed(tensors["a/m"], torch.zeros(5, 3)) is tensors["a/m"]
    assert [float(t) for t in in_turns([torch.ones(()), torch.ones(())], lambda number, t: t + number)] == [1.0, 2.0]
    assert norm([torch.tensor([3.0]), torch.tensor([[4.0]])]) == 5.0


def spread(mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

    tensors = full()
    return tensors | {
        name: distribute_tensor(tensors[name], mesh, [Shard(0)], src_data_rank=None) for name in ("a/m", "b/m")
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_pieces_come_together_again(tmp_path):
    (tmp_path / "two").mkdir()

    def two(ranks):
        from torch.distributed.device_mesh import init_device_mesh

        mine, expected = spread(init_device_mesh("cpu", (2,))), full()
        assert is_spread(mine)
        assert len(own_piece(mine["a/m"])) == 3 - ranks.rank
        assert norm([mine["a/m"], mine["b/m"]]) == pytest.approx(norm([expected["a/m"], expected["b/m"]]), rel=1e-6)
        together = whole(mine)
        assert all(torch.equal(together[name], expected[name]) for name in expected)
        assert whole(mine, keep=False) == {}
        placed = as_placed(expected["a/m"], mine["a/m"])
        assert in_pieces(placed)
        assert torch.equal(own_piece(placed), own_piece(mine["a/m"]))
        assert as_placed(placed, mine["a/m"]) is placed
        turns = []
        changed = in_turns(iter([mine["a/m"], mine["b/m"], mine["a/m"]]), lambda n, t: turns.append(n) or t * (n + 1))
        for number, (name, tensor) in enumerate(zip(("a/m", "b/m", "a/m"), changed, strict=True), 1):
            assert torch.equal(own_piece(tensor), own_piece(mine[name]) * number)
        assert turns == ([1] if ranks.rank else [0, 2])
        save_pieces(tmp_path / "two", mine)
        again = read_pieces(tmp_path / "two", lambda name: mine[name])
        assert all(torch.equal(own_piece(again[name]), own_piece(mine[name])) for name in mine)

    assert all(forked(two))
    assert len(list((tmp_path / "two").glob("*.safetensors"))) == 2
    assert all(path.suffix == ".safetensors" for path in (tmp_path / "two").iterdir())
    alone = read_pieces(tmp_path / "two", lambda name: torch.zeros(5, 3))
    assert alone.keys() == full().keys()
    assert all(torch.equal(alone[name], tensor) for name, tensor in full().items())
