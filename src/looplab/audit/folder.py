"""The output folder of an audit: one audit per folder, one process at a time, never half a result.

    manifest.json    what this folder is an audit of; written first
    partial/         the finished parts of the work: a killed audit goes on from them, a larger one starts from them
    results.json     the numbers; written last, so a folder that has it is finished

An audit of more schedules or more domains than the folder holds may follow on it; nothing else may differ.

The lock is flock(2) on a hidden file, so a killed process leaves none behind.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from looplab.audit.result import RESULTS, AuditResult
from looplab.audit.tables import DOCUMENTS, PROBES, TOKENS
from looplab.journal import Journal
from looplab.records import dump_json, encode_json, write_atomic

MANIFEST, LEDGER, LOCK, PARTIAL = "manifest.json", "ledger.json", ".lock", "partial"
TRAINING = "run.json"
"""What a training run writes first."""
CARD = ("depth_card.md", "depth_card.json")
OWN = (RESULTS, LEDGER, TOKENS, DOCUMENTS, PROBES, *CARD, "report.html", "tables.tex", "figures", PARTIAL, MANIFEST)
"""Everything an audit writes; `fresh` removes these and nothing else."""
CHOICES = ("grid", "controls", "schedules", "extend", "permutations")
"""Settings that only say which schedules are run."""
MACHINE = ("looplab", "torch", "threads", "device")
"""What may change the last bits of a number: a finished audit is still the same, an unfinished one cannot go on."""


class FolderBusyError(ValueError):
    """Another process works in the folder, or it belongs to another run."""


class AuditFolder:
    """A locked output folder; use as a context."""

    def __init__(self, path: Path):
        self.path = path
        self._lock: IO[str] | None = None

    def __enter__(self) -> "AuditFolder":
        if self.path.exists() and not self.path.is_dir():
            raise FolderBusyError(f"{self.path} must be a folder. Got a file. Choose another --out.")
        if (self.path / TRAINING).exists():
            raise FolderBusyError(f"{self.path} holds another run (training). Use another --out.")
        self.path.mkdir(parents=True, exist_ok=True)
        lock = open(self.path / LOCK, "a+")  # held until __exit__
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            lock.close()
            raise FolderBusyError(f"{self.path} is in use by process {holder}. Wait or choose another --out.") from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        self._lock = lock
        return self

    def __exit__(self, *error: object) -> None:
        assert self._lock is not None
        self._lock.close()

    @property
    def journal(self) -> Journal:
        """The finished parts."""
        return Journal(self.path / PARTIAL)

    def claim(
        self,
        settings: Mapping[str, Any],
        scope: Mapping[str, Sequence[str]],
        facts: Mapping[str, Any],
        *,
        fresh: bool = False,
    ) -> AuditResult | None:
        """Makes the folder that of one audit, and returns its result if it is already there.

        Args:
            settings: Flat names and values that the numbers depend on; `data.<domain>` is the hash of a domain.
            scope: What is measured: "schedules" and "domains". An audit in the folder may have had fewer.
            facts: Further entries of the manifest.
            fresh: Remove what another audit left.

        Raises:
            FolderBusyError: The folder holds an audit with other settings, or another kind of run.
        """
        manifest = {"kind": "audit", "settings": dict(settings), "scope": encode_json(dict(scope)), **facts}
        known = None if fresh else self._manifest()
        if fresh:
            self._clear()
        elif known is not None:
            after = {name: json.loads(dump_json(value)) for name, value in settings.items()}
            if self._same(known, after, manifest["scope"]) and (self.path / RESULTS).exists():
                return AuditResult.load(self.path)
            (self.path / RESULTS).unlink(missing_ok=True)  # what follows is not finished
        write_atomic(self.path / MANIFEST, dump_json(manifest))
        self._sweep()
        return None

    def _same(self, known: dict[str, Any], after: dict[str, Any], scope: dict[str, list[str]]) -> bool:
        """Whether the folder's audit is this one; refuses one that this does not follow on."""
        if known.get("kind") != "audit":
            raise FolderBusyError(f"{self.path} holds another run ({known.get('kind')}). Use another --out.")
        before, had = known["settings"], known.get("scope", {})
        same = had == scope
        grows = all(set(had.get(kind, ())) <= set(names) for kind, names in scope.items())
        free = {*CHOICES, *(f"data.{name}" for name in set(scope["domains"]) - set(had.get("domains", ())))}
        finished = same and (self.path / RESULTS).exists()
        changed = [
            _change(name, before.get(name), after.get(name))
            for name in dict.fromkeys([*after, *before])
            if before.get(name) != after.get(name)
            and not (name in free and grows)
            and not (name in MACHINE and finished)
        ]
        if changed:
            threads = before.get("threads"), after.get("threads")
            hint = f"Set OMP_NUM_THREADS={threads[0]}, use" if changed == [_change("threads", *threads)] else "Use"
            raise FolderBusyError(
                f"{self.path} holds an audit with other settings ({', '.join(changed)}). "
                f"{hint} another --out or --fresh."
            )
        return same

    def _manifest(self) -> dict[str, Any] | None:
        try:
            return json.loads((self.path / MANIFEST).read_text())
        except FileNotFoundError:
            return None
        except ValueError:
            raise FolderBusyError(
                f"{self.path} holds a {MANIFEST} that is no JSON. Use another --out or --fresh."
            ) from None

    def _sweep(self) -> None:
        """Removes what a killed process was writing; whoever holds the lock is the only one at work."""
        for path in self.path.glob(".tables.*"):
            shutil.rmtree(path)
        for path in self.path.rglob(".*.partial"):
            path.unlink(missing_ok=True)

    def _clear(self) -> None:
        for name in OWN:
            path = self.path / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def _change(name: str, before: Any, after: Any) -> str:
    return f"{name.replace('_', ' ')} {_short(before)} -> {_short(after)}"


def _short(value: Any) -> str:
    """A value for one line: lists without brackets, hashes by their first 8 characters."""
    if isinstance(value, list):
        return ",".join(map(str, value)) or "none"
    text = str(value)
    return text[:8] if len(text) == 32 and set(text) <= set("0123456789abcdef") else text
