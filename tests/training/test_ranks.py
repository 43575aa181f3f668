"""What the processes of a run say to each other."""

import json

import pytest
import torch

from looplab.training.ranks import LeaderFailed, Ranks, of_torchrun
from training.forked import forked


def test_one_process_has_nobody_to_ask():
    ranks = Ranks()
    assert ranks.leads
    assert ranks.total([0.1, 0.2]) == [0.1, 0.2]
    assert ranks.first(None) is None
    assert ranks.led(lambda: "x") == "x"


def test_what_torchrun_sets_is_recognised():
    given = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"), "0")
    assert of_torchrun(given)
    assert not of_torchrun({"RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_two_processes_agree(tmp_path):
    def body(ranks):
        found = {"rank": ranks.rank, "size": ranks.size, "leads": ranks.leads}
        found["total"] = ranks.total([0.1, float(ranks.rank)])
        found["counts"] = ranks.total_counts([2**53 + ranks.rank])
        found["first"] = [ranks.first(text) for text in ("ab"[ranks.rank], None, "é" if ranks.rank else None)]
        found["led"] = ranks.led(lambda: f"from {ranks.rank}")
        try:
            ranks.led(lambda: str(1 // ranks.rank))
        except (ZeroDivisionError, LeaderFailed) as error:
            found["error"] = type(error).__name__
        (tmp_path / str(ranks.rank)).write_text(json.dumps(found))

    assert all(forked(body))
    one, two = (json.loads((tmp_path / str(rank)).read_text()) for rank in range(2))
    assert (one.pop("rank"), two.pop("rank")) == (0, 1)
    assert (one.pop("leads"), two.pop("leads")) == (True, False)
    assert (one.pop("error"), two.pop("error")) == ("ZeroDivisionError", "LeaderFailed")
    assert one == two
    assert one == {
        "size": 2,
        "total": [0.2, 1.0],
        "counts": [2**54 + 1],
        "first": ["a", None, "é"],
        "led": "from 0",
    }
    assert not torch.distributed.is_initialized()
