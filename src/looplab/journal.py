"""The finished parts of a long run, on disk: a part is there whole or not at all, so a killed run loses little.

    <root>/<a>/<b>/<c>.safetensors     one part, named by a key (a, b, c): arrays, and facts that JSON can hold

A part is written under a temporary name, flushed, and renamed. Whoever resumes asks which keys are there and does the
rest. What belongs to which run is the caller's business (a manifest beside `root`).
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from looplab.records import encode_json, write_atomic

Key = tuple[str, ...]
ENDING = ".safetensors"
_LONGEST = 120


@dataclass(frozen=True, eq=False)
class Part:
    """One finished piece of work."""

    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    """What JSON holds; numbers that may be infinite belong in arrays."""


class Journal:
    """Parts below one folder. Any text may be a piece of a key."""

    def __init__(self, root: Path):
        self.root = root

    def __contains__(self, key: Key) -> bool:
        return self._path(key).exists()

    def put(self, key: Key, part: Part) -> None:
        """Writes a part; it replaces one of the same key."""
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays = {name: np.ascontiguousarray(array) for name, array in part.arrays.items()}
        facts = json.dumps(encode_json(part.facts), sort_keys=True, allow_nan=False)
        write_atomic(path, save(arrays, metadata={"facts": facts}))

    def get(self, key: Key, *, arrays: bool = True) -> Part:
        """Reads a part, or only its facts; KeyError if it is not there."""
        try:
            with safe_open(self._path(key), framework="np") as file:
                facts = json.loads(file.metadata()["facts"])
                return Part({name: file.get_tensor(name) for name in file.keys()} if arrays else {}, facts)  # noqa: SIM118
        except FileNotFoundError:
            raise KeyError(key) from None

    def drop(self, key: Key) -> None:
        """Removes a part, and all parts whose keys begin with `key`."""
        self._path(key).unlink(missing_ok=True)
        folder = self._folder(key)
        if folder.exists():
            shutil.rmtree(folder)

    def files(self) -> Iterator[Path]:
        """The files of all parts."""
        return self.root.rglob(f"*{ENDING}")

    def _folder(self, key: Key) -> Path:
        return self.root.joinpath(*map(_file_name, key))

    def _path(self, key: Key) -> Path:
        folder = self._folder(key)
        return folder.with_name(folder.name + ENDING)


def _file_name(piece: str) -> str:
    """A file name for any text, different for different texts also where a file system ignores case."""
    name = quote(piece, safe="()[], +=@")
    if name.startswith("."):
        name = "%2E" + name[1:]
    lost = len(name) > _LONGEST or name != name.lower()
    return f"{name[:_LONGEST]}~{hashlib.sha256(piece.encode()).hexdigest()[:16]}" if lost else name
