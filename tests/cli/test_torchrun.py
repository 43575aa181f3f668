"""`looplab train` under torchrun: one voice, one run, and a killed process is made good."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from looplab._config import to_dict
from looplab.cli import exit_codes, main, torchrun
from looplab.records import dump_json
from looplab.recurrence.gradient import TruncatedBPTT
from looplab.training.distributed import Replicated, Sharded
from looplab.training.ranks import LeaderFailed
from looplab.training.trainer import train
from training.forked import free_port
from training.tiny_run import core, metrics, tiny_run


def of_rank(monkeypatch, rank):
    """As torchrun would start this process."""
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setattr(torchrun, "PATIENCE", 0.0)


def test_parallel_outside_torchrun_is_refused(tmp_path, capsys):
    assert main(["train", "text-core", "--out", str(tmp_path / "run"), "--parallel", "fsdp"]) == exit_codes.USAGE
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith(
        "train: --parallel is for runs under torchrun. Got 'fsdp' in one process. Start them with"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("kind", "expected"), [(None, Replicated), ("ddp", Replicated), ("fsdp", Sharded)])
def test_torchrun_decides_that_there_are_several(monkeypatch, kind, expected):
    of_rank(monkeypatch, 0)
    with torchrun.processes(kind, "cpu") as parallel:
        assert type(parallel) is expected
        assert (parallel.ranks.rank, parallel.ranks.size, parallel.ranks.device) == (0, 1, "cpu")


def refuse():
    raise exit_codes.UserError("no", exit_codes.DATA)


def lose():
    raise LeaderFailed("rank 0 failed")


def test_only_the_first_process_speaks(monkeypatch, capsys):
    of_rank(monkeypatch, 1)
    assert torchrun.silent()
    with torchrun.hushed():
        print("twice")
    assert torchrun.once(refuse) == exit_codes.DATA
    assert torchrun.once(lose) == exit_codes.UNEXPECTED
    assert torchrun.once(lambda: sys.exit(exit_codes.USAGE)) == exit_codes.USAGE
    assert main(["train", "no-such-recipe", "--out", "x"]) == exit_codes.USAGE
    assert capsys.readouterr() == ("", "")
    of_rank(monkeypatch, 0)
    with pytest.raises(exit_codes.UserError):
        torchrun.once(refuse)
    with pytest.raises(ZeroDivisionError):
        torchrun.once(lambda: 1 // 0)


def started(arguments, folder):
    """torchrun with two processes, which may be started once more."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    command += ["--master-port", str(free_port()), "-m", "looplab.cli", "train", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.parametrize(
    "kills", [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.nightly)]
)
def test_torchrun_trains_the_run_of_one_process(tmp_path, kills):
    """Also where one of its two processes is killed: then it starts both again."""
    config = tiny_run(tmp_path, model=core(), gradient=TruncatedBPTT(window=2), steps=12, save_every=5)
    train(config, tmp_path / "one")
    (tmp_path / "recipe.json").write_text(dump_json(to_dict(config)))
    folder = tmp_path / "two"
    run = started([tmp_path / "recipe.json", "--out", folder, "--parallel", "fsdp"], tmp_path)
    try:
        if kills:
            kill_one(run, once=folder / "step_5")
        out, err = run.communicate(timeout=250)
    finally:
        run.kill()
    assert run.returncode == 0, err
    assert err.count("Resuming ") == kills
    assert out.count("Held-out loss") == 1
    one, two = (metrics(home, "train") for home in (tmp_path / "one", folder))
    assert [line["step"] for line in two] == list(range(1, 13))
    assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], rel=1e-5)
    assert (folder / "step_12" / "optimizer").is_dir()


def kill_one(run, *, once):
    """Kills one of the processes as soon as a checkpoint is there."""
    while not once.exists():
        assert run.poll() is None, run.communicate()
        time.sleep(0.02)
    workers = psutil.Process(run.pid).children()
    assert len(workers) == 2
    workers[-1].send_signal(signal.SIGKILL)
