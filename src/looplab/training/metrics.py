"""The metrics file of a run: one JSON object per line, and a length to which it can be cut back.

A checkpoint stores the length at its step. A resumed run cuts the file there, a torn last line included, and writes on,
so the finished file is that of a run that was never interrupted (times and peak memory aside).
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from looplab.records import dump_json
from looplab.training.checkpoint import CheckpointError
from looplab.training.trackers import Trackers


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a finished part of a metrics file."""
    with path.open("rb") as file:
        yield from map(json.loads, file)


def peak_bytes(device: str) -> int | None:
    """Most memory that was in use so far: of the device, or of the process where the CPU computes.

    None where the system does not say.
    """
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


class MetricsFile:
    """Appends lines to a file that begins with the first `length` bytes of what was there, and tells trackers."""

    def __init__(self, path: Path, *, length: int = 0, trackers: Trackers | None = None):
        """Raises a CheckpointError where the file is shorter than `length`."""
        present = path.stat().st_size if path.exists() else 0
        if present < length:
            raise CheckpointError(
                f"{path} must have at least {length} bytes, as its checkpoint says. Got {present}. "
                "Start a new run in another folder."
            )
        self._file = path.open("ab")
        self._file.truncate(length)
        self._file.seek(length)
        self._trackers = trackers or Trackers()

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one object; numbers that are not finite become "nan", "inf", "-inf"."""
        self._file.write(dump_json(dict(record), indent=None).encode())
        self._file.flush()
        self._trackers.write(record)

    def flushed_length(self) -> int:
        """Bytes so far, all of them on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
        self._trackers.close()


class Unwritten(MetricsFile):
    """The metrics of a process that writes none, because another one does."""

    def __init__(self) -> None:
        pass

    def write(self, record: Mapping[str, Any]) -> None:
        """Nothing."""

    def flushed_length(self) -> int:
        """0."""
        return 0

    def close(self) -> None:
        """Nothing."""
