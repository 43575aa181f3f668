"""predictions.json: everything that decides the words, written and hashed before the first arm runs.

The text depends on the study, its version, the scale and the seeds; not on the time, the machine or the folder.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from looplab._config import config_hash, declared
from looplab.records import dump_json, encode_json, write_atomic
from looplab.studies import rules
from looplab.studies.base import Arm, Study
from looplab.training.config import RunConfig
from looplab.training.folder import FolderError

FILE = "predictions.json"
SHORT = ("study", "version", "scale", "seeds", "claims")
"""Parts of the file whose difference says more than those of others."""


def predictions_text(study: Study, scale: str, seeds: Sequence[int], arms: Sequence[Arm]) -> str:
    """The text of the file."""
    return dump_json(
        {
            "study": study.name,
            "version": study.version,
            "scale": scale,
            "seeds": list(seeds),
            "question": study.question,
            "level": rules.LEVEL,
            "equivalence_level": rules.EQUIVALENCE_LEVEL,
            "fewest_seeds": rules.MIN_SEEDS,
            "claims": [{**_claim(claim), "rule": claim.rule} for claim in study.claims],
            "arms": [_arm(arm) for arm in arms],
            "exclusions": "none: every arm, seed and claim is reported, and nothing is run again for its result",
        }
    )


def _claim(value: Any) -> Any:
    """JSON of a claim, without what came later and has its default: files that were hashed before keep their hash."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        said = [
            f for f in dataclasses.fields(value) if "later" not in f.metadata or getattr(value, f.name) != f.default
        ]
        return {f.name: _claim(getattr(value, f.name)) for f in said}
    return [_claim(item) for item in value] if isinstance(value, tuple) else encode_json(value)


def digest(text: str) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def register(folder: Path, text: str) -> bool:
    """Writes the file, or finds that the same one is there; whether it was written now.

    Raises:
        FolderError: The folder holds other predictions, or results without any.
    """
    path = folder / FILE
    if not path.exists():
        found = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
        if found:
            raise FolderError(f"{folder} must be empty or hold this study. Found: {', '.join(found[:5])}. Use --out.")
        write_atomic(path, text)
        return True
    known = path.read_text()
    if known != text:
        raise FolderError(
            f"{folder} holds other predictions ({_changed(known, text)}; SHA-256 {digest(known)[:12]} there, "
            f"{digest(text)[:12]} now). Use --out or --fresh."
        )
    return False


def _arm(arm: Arm) -> dict[str, Any]:
    source = arm.source
    made = isinstance(source, RunConfig)
    asked = {name: declared(given) for name in ("problems", "grid") if (given := getattr(arm, name)) is not None}
    return {
        "name": arm.name,
        "title": arm.title,
        "seed": arm.seed,
        "source": declared(source) if made else source,
        "source_hash": config_hash(source) if made else None,
        "control": arm.control,
        "audit": None if arm.audit is None else declared(arm.audit),
        **asked,
        **({"documents": list(arm.documents)} if arm.documents else {}),
        **({"earlier": [[step, declared(audit)] for step, audit in arm.earlier]} if arm.earlier else {}),
    }


def _changed(known: str, text: str) -> str:
    try:
        return next(_differences(json.loads(known), json.loads(text), ""), "formatting")
    except ValueError:
        return "the file is no JSON"


def _differences(old: Any, new: Any, path: str) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted({*old, *new}, key=lambda name: (name not in SHORT, name)):
            yield from _differences(old.get(name), new.get(name), f"{path} {name}".strip())
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for place, pair in enumerate(zip(old, new, strict=True), 1):
            yield from _differences(*pair, f"{path} {place}")
    elif old != new:
        yield f"{path} {_short(old)} -> {_short(new)}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:37]}..."
