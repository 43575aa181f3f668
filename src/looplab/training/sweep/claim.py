"""The claim on a run: a file beside its folder that says who works on it, on whichever machine.

    runs/<hash>.claim      {"host", "pid", "sweep", "since", "heartbeat", "step", "steps", "loss"}

It is created with O_EXCL, so of several sweeps in one folder one gets the run. Its holder writes the heartbeat into the
open file; whoever finds the path leading to another file has lost the claim. A claim ends with its holder, and may be
taken over when the holder is known to be dead: its process is gone (on the same system), or its bytes have not changed
for a while by the clock of the observer (clocks of machines differ).

The lock inside the folder (`training.folder.locked`) stays what keeps two processes out of one folder; it sees `looplab
train` and studies too, but not every shared file system has such locks, and none says who holds it or how far he is.
"""

import json
import os
import socket
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from looplab.records import dump_json


@dataclass(frozen=True)
class Seen:
    """A claim as it was read."""

    raw: bytes
    facts: dict[str, Any]
    """Empty where the file was read while it was written."""

    @property
    def holder(self) -> str:
        """`process 312 on alpha`."""
        return f"process {self.facts.get('pid', '?')} on {self.facts.get('host', '?')}"

    @property
    def identity(self) -> tuple[Any, ...]:
        """What two readings of one claim share."""
        return tuple(self.facts.get(name) for name in ("token", "system", "pid"))

    @property
    def dead(self) -> bool:
        """Its process ran on this system and is gone."""
        return self.facts.get("system") == system() and not _alive(self.facts["pid"])


class Claim:
    """A claim that this process holds."""

    def __init__(self, path: Path, descriptor: int, facts: dict[str, Any]):
        self.path, self._descriptor, self._facts = path, descriptor, facts

    def beat(self, **facts: Any) -> None:
        """Writes the time, and how far the run is."""
        self._facts |= {"heartbeat": _now(), **facts}
        data = dump_json(self._facts, indent=None).encode()
        os.pwrite(self._descriptor, data, 0)
        os.ftruncate(self._descriptor, len(data))

    @property
    def held(self) -> bool:
        """Whether nobody has taken it over."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self.path))
        except OSError:
            return False

    def release(self) -> None:
        """Gives the run up, or says that it is finished."""
        if self.held:
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)


def claim_path(run: Path) -> Path:
    """Beside the folder of a run, which holds nothing but the run."""
    return run.with_name(f"{run.name}.claim")


def take(path: Path, sweep: str, *, silent: Seen | None = None) -> Claim | None:
    """The claim, or None where somebody else holds it.

    Args:
        path: `claim_path` of the run; its folder is made.
        sweep: Whose claim it is (`drop`).
        silent: A claim that was found silent for too long, and may be taken over.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(2):
        with suppress(FileExistsError):
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
            facts = {"host": socket.gethostname(), "system": system(), "pid": os.getpid()}
            facts |= {"sweep": sweep, "token": uuid.uuid4().hex, "since": _now()}
            claim = Claim(path, descriptor, facts)
            claim.beat()
            return claim
        found = look(path)
        if found is not None and not found.dead and (silent is None or found.identity != silent.identity):
            return None
        if found is not None and not _remove(path, found):
            return None
    return None


def look(path: Path) -> Seen | None:
    """The claim as it stands; None if there is none."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        facts = json.loads(raw)
    except ValueError:
        facts = {}
    return Seen(raw, facts if isinstance(facts, dict) else {})


def drop(path: Path, sweep: str) -> None:
    """Removes a claim of this sweep whose worker is dead."""
    found = look(path)
    if found is not None and found.facts.get("sweep") == sweep:
        _remove(path, found)


class Watch:
    """How long claims have been silent, by the clock of whoever looks."""

    def __init__(self) -> None:
        self._since: dict[Path, tuple[bytes, float]] = {}

    def silence(self, path: Path, seen: Seen) -> float:
        """Seconds since the claim was first seen as it is."""
        before, now = self._since.get(path), time.monotonic()
        if before is None or before[0] != seen.raw:
            before = self._since[path] = (seen.raw, now)
        return now - before[1]


def system() -> str:
    """The same for processes that see each other's process ids: one boot of one kernel, one space of ids."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _remove(path: Path, found: Seen) -> bool:
    """Takes a claim away, if it still is the one that was read: of two who try, at most one succeeds."""
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return True
    moved = look(aside)
    right = moved is not None and moved.identity == found.identity
    if not right:  # a new claim, which goes back unless a newer one stands there
        with suppress(FileExistsError):
            os.link(aside, path)
    aside.unlink()
    return right


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
