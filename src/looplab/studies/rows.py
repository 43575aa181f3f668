"""Finished arms of a study on disk, one file each: what an arm came to, under which predictions, by which code.

    rows/<arm>.json      {schema, predictions, code, sha256, arm, rows}; sha256 is of everything else in it

A file of other code is measured again, from the run, audit and grid that are kept; one that was edited is refused.
"""

import dataclasses
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import looplab
from looplab._config import from_dict
from looplab.records import SCHEMA_VERSION, StudyArm, StudyRow, dump_json, encode_json, write_atomic

ROWS = "rows"
APART = ("cli", "report", "server", "engine")
"""Packages that no number of a study comes from."""


class RowsError(ValueError):
    """A file of rows that cannot be used."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Stored:
    arm: StudyArm
    rows: tuple[StudyRow, ...]


def write_rows(folder: Path, name: str, predictions: str, arm: StudyArm, rows: tuple[StudyRow, ...]) -> None:
    """Stores what an arm came to."""
    body = {
        "schema": SCHEMA_VERSION,
        "predictions": predictions,
        "code": code_hash(),
        **encode_json(_Stored(arm=arm, rows=rows)),
    }
    (folder / ROWS).mkdir(exist_ok=True)
    write_atomic(folder / ROWS / f"{name}.json", dump_json({**body, "sha256": _digest(body)}))


def read_rows(folder: Path, name: str, predictions: str) -> tuple[StudyArm, tuple[StudyRow, ...]] | None:
    """What was stored of an arm; None if nothing was, or under other predictions or by other code.

    Raises:
        RowsError: Another schema, or a file that was edited.
    """
    path = folder / ROWS / f"{name}.json"
    if not path.exists():
        return None
    try:
        body = json.loads(path.read_text())
        stored = body.pop("sha256")
    except (ValueError, KeyError, AttributeError, TypeError):
        raise RowsError(f"{path} must hold rows of a study. Got something else. Remove it, or use --fresh.") from None
    if body.get("schema") != SCHEMA_VERSION:
        raise RowsError(f"{path} must have schema {SCHEMA_VERSION}. Got {body.get('schema')!r}. Use --fresh.")
    if stored != _digest(body):
        raise RowsError(
            f"{path} was edited: SHA-256 {stored[:12]} in it, {_digest(body)[:12]} of it. Remove it to measure again."
        )
    if (body["predictions"], body["code"]) != (predictions, code_hash()):
        return None
    found = from_dict(_Stored, {"arm": body["arm"], "rows": body["rows"]})
    return found.arm, found.rows


@functools.cache
def code_hash() -> str:
    """Hash of the package's source, as far as numbers come from it."""
    root = Path(looplab.__file__).parent
    found = hashlib.blake2b(digest_size=8)
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if inside.parts[0] not in APART:
            found.update(f"{inside.as_posix()}\0".encode() + path.read_bytes())
    return found.hexdigest()


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(dump_json(body).encode()).hexdigest()
