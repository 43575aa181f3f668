"""A sweep on a Ray cluster of two nodes, one of which is lost in the middle: every run ends, once, to the same bits."""

import dataclasses
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from looplab._config import config_hash
from looplab.executors import RayPool
from looplab.training.sweep.claim import claim_path, look
from looplab.training.sweep.points import Axis, configurations, grid_points
from looplab.training.sweep.run import Watcher, log_path, run_all
from looplab.training.trainer import train
from ray_cluster import two_nodes
from training.tiny_run import core, tiny_run

PATIENCE = 120


class Told(Watcher):
    def __init__(self):
        self.ends, self.deaths = [], []

    def ended(self, index, run, *, earlier):
        self.ends.append((index, run.status))

    def died(self, index, how, *, again):
        self.deaths.append((index, how, again))


@pytest.mark.nightly
def test_a_lost_node_loses_no_run_and_changes_no_number(tmp_path):
    base = tiny_run(tmp_path, model=core(), steps=60, save_every=5, log_every=60)
    base = dataclasses.replace(base, evaluation=dataclasses.replace(base.evaluation, every=60))
    configs = configurations(base, grid_points([Axis.parse("seed=0..2")]))
    runs, told, lost = tmp_path / "runs", Told(), []

    def at_work():
        """Pids of workers that are in the middle of a run."""
        folders = [run for run in map(runs.joinpath, map(config_hash, configs)) if (run / "latest").exists()]
        seen = [look(claim_path(run)) for run in folders if not (run / "record.json").exists()]
        return {each.facts["pid"] for each in seen if each and each.facts}

    def lose_a_node():
        """As soon as both nodes are in the middle of a run, which is held up meanwhile, since it would soon be over.

        A worker goes with its machine; here it would outlive the node for long enough to end its run.
        """
        end = time.monotonic() + PATIENCE
        while len(pids := at_work()) < 2 and time.monotonic() < end:
            time.sleep(0.02)
        lost.extend(pids)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
        for pid in pids:
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                at_home = "raylet" in psutil.Process(psutil.Process(pid).ppid()).name()
                os.kill(pid, signal.SIGCONT if at_home else signal.SIGKILL)

    def warm(folder, place):
        """Workers take seconds to load; here both have, so that they begin at the same moment."""
        import looplab.training.sweep  # noqa: F401

        Path(folder, str(place)).touch()
        end = time.monotonic() + PATIENCE
        while not all(Path(folder, str(each)).exists() for each in (0, 1)) and time.monotonic() < end:
            time.sleep(0.02)

    with two_nodes() as cluster, RayPool(address=cluster.address) as pool:
        assert len(list(pool.run(warm, [0, 1], shared=str(tmp_path)))) == 2
        thread = threading.Thread(target=lose_a_node)
        thread.start()
        found = run_all(configs, runs, pool, watcher=told)
        thread.join()
    assert len(lost) == 2, "the runs were over before both nodes were in the middle of one"
    assert sorted(told.ends) == [(index, "finished") for index in range(3)]
    ((index, _, again),) = told.deaths
    assert again
    logs = [log_path(run.folder).read_text() for run in found]
    assert [log.count(" process ") for log in logs] == [1 + (place == index) for place in range(3)]
    assert "Resuming" in logs[index] and all(log.count("step 60/60") == 1 for log in logs)
    assert not list(runs.glob("*.claim"))
    alone = train(configs[index], tmp_path / "alone")
    assert [dataclasses.replace(r, run_id="", seconds=0.0) for r in (alone, found[index].record)] == [
        dataclasses.replace(alone, run_id="", seconds=0.0)
    ] * 2
