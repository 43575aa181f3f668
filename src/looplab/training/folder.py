"""The folder of a run: who may write into it, and whether it is finished.

run.json         the resolved configuration, its hash, versions
metrics.jsonl    one object per step, and one per evaluation
step_<n>/        checkpoints;  latest names the newest
model/           the trained model, a folder that opens by itself
record.json      the run as scaling laws and studies read it; written last, so it marks a finished run
lock             held while a process writes
"""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import looplab
from looplab._config import config_hash, to_dict
from looplab.records import RunRecord, dump_json, write_atomic
from looplab.training.config import RunConfig, differences

CONFIG, METRICS, RECORD, MODEL, LOCK = "run.json", "metrics.jsonl", "record.json", "model", "lock"


class FolderError(ValueError):
    """The folder of a run is in use, or belongs to something else."""


class FolderInUse(FolderError):
    """Another process works in the folder."""


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Holds the folder (made if missing). The lock ends with the process, however that ends.

    Raises:
        FolderInUse: Another process holds it.
        FolderError: It is a file.
    """
    new = not run.exists()
    try:
        run.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise FolderError(f"{run} must be a folder. Got a file. Choose another folder.") from None
    # Opened before the check for strange files, so that a refused folder may gain this one empty file at most.
    fresh = not (run / LOCK).exists()
    with (run / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderInUse(f"{run} is in use by another process. Wait for it, or choose another folder.") from None
        try:
            yield
        except Exception as error:
            if fresh and (isinstance(error, FolderError) or not (run / CONFIG).exists()):
                (run / LOCK).unlink()
                if new:
                    run.rmdir()
            raise


@contextmanager
def claimed(run: Path, config: RunConfig) -> Iterator[None]:
    """Makes the folder that of this run, and lets go of a new one if the run cannot even begin (as for bad data)."""
    new = not (run / CONFIG).exists()
    claim(run, config)
    try:
        yield
    except Exception:
        if new:
            (run / CONFIG).unlink()
        raise


def claim(run: Path, config: RunConfig) -> None:
    """Makes the folder that of this run, or finds that it already is.

    Raises:
        FolderError: It holds a run with another configuration, or something else.
    """
    path = run / CONFIG
    if path.is_file():
        old = RunConfig.read(json.loads(path.read_bytes())["config"])
        changed = "; ".join(differences(old, config))
        if changed:
            raise FolderError(f"Cannot resume {run.name}: {changed}. Start a new run or restore the value.")
    else:
        found = sorted(entry.name for entry in run.iterdir() if entry.name != LOCK)
        if found:
            raise FolderError(
                f"{run} must be empty or hold a run. Found: {', '.join(found[:5])}. Choose another folder."
            )
    versions = {"looplab": looplab.__version__, "torch": torch.__version__}
    facts = {"config": to_dict(config), "config_hash": config_hash(config), "versions": versions}
    write_atomic(path, dump_json(facts))


def finished(run: Path, config: RunConfig) -> RunRecord | None:
    """The record of a run that ended with exactly this configuration."""
    if not (run / RECORD).is_file():
        return None
    record = RunRecord.from_dict(json.loads((run / RECORD).read_bytes()))
    return record if record.config_hash == config_hash(config) else None
