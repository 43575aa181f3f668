"""The spool gives back what was put, in memory and in files, and leaves nothing behind."""

import re
import shutil
from collections import namedtuple

import pytest
import torch

from looplab.audit.spool import Spool
from looplab.data.documents import DataError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("budget", [10**9, 0], ids=["memory", "files"])
def test_rows_come_back_at_their_places_bit_for_bit(tmp_path, budget, dtype):
    full, prefix = torch.randn(10, 6).to(dtype), torch.randn(10, 6).to(dtype)
    with Spool(10, 2, budget=budget, folder=tmp_path) as spool:
        for place in (torch.tensor([3, 1, 8, 0]), torch.tensor([2, 4, 5, 6, 7, 9])):
            spool.put("full", place, full[place])
            spool.put("prefix(1)", place, prefix[place])
        assert torch.equal(spool.get("full"), full)
        assert torch.equal(spool.get("prefix(1)"), prefix)
        assert bool(list(tmp_path.iterdir())) == (budget == 0)
    assert not list(tmp_path.iterdir())


def test_a_dropped_schedule_is_gone(tmp_path):
    with Spool(2, 1, budget=10**9) as spool:
        spool.put("full", torch.arange(2), torch.ones(2, 3))
        spool.drop("full")
        with pytest.raises(KeyError):
            spool.get("full")


def test_files_are_removed_after_an_error(tmp_path):
    def fails():
        with Spool(2, 1, budget=0, folder=tmp_path) as spool:
            spool.put("full", torch.arange(2), torch.ones(2, 3))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")(0, 0, 4_000_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    message = f"the spool needs 9.2 GB, 4.0 free in {tmp_path}."
    spool = Spool(115_000_000, 5, budget=0, folder=tmp_path)
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        spool.put("full", torch.arange(1), torch.ones(1, 4))
    assert not list(tmp_path.iterdir())
