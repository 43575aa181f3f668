"""The real trackio, on a database of its own."""

import importlib.util
import os
import tempfile

import pytest

from looplab.training.trackers import TRACKERS
from looplab.training.trackers.base import Tracked

pytestmark = pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="needs trackio")


@pytest.fixture(scope="module")
def storage():
    """The database; trackio reads where it lies when it is imported."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRACKIO_DIR"] = folder
        try:
            sqlite = pytest.importorskip("trackio.sqlite_storage")
            if str(sqlite.TRACKIO_DIR) != folder:
                pytest.skip("trackio was imported before, and keeps to its folder")
            yield sqlite.SQLiteStorage
        finally:
            del os.environ["TRACKIO_DIR"]


def test_a_resumed_run_is_one_run_of_trackio(storage, tmp_path, capsys):
    for begun, steps in ((0, (1, 2)), (2, (3,))):
        run = Tracked(tmp_path / "run", "0a1b", "tiny", {"steps": 3, "optimizer": {"kind": "AdamW"}}, begun)
        tracker = TRACKERS["trackio"](run)
        for step in steps:
            tracker.log({"train/loss": 1 / step, "train/grad_norm": float("nan")}, step)
        tracker.close()
    assert storage.get_runs("tiny") == ["run-0a1b"]
    lines = storage.get_logs("tiny", "run-0a1b")
    assert [(line["step"], line["train/loss"]) for line in lines] == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert capsys.readouterr().out == ""  # stdout is the run's result alone
