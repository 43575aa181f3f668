"""The metrics file of a run: one JSON object per line, and a length to which it can be cut back.

A checkpoint stores the length at its step. A resumed run cuts the file there, a torn last line included, and writes on,
so the finished file is that of a run that was never interrupted (times aside).
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from looplab.records import dump_json
from looplab.training.checkpoint import CheckpointError


class MetricsFile:
    """Appends lines to a file that begins with the first `length` bytes of what was there."""

    def __init__(self, path: Path, *, length: int = 0):
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

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one object; numbers that are not finite become "nan", "inf", "-inf"."""
        self._file.write(dump_json(dict(record), indent=None).encode())
        self._file.flush()

    def flushed_length(self) -> int:
        """Bytes so far, all of them on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
