"""What runs write and reports read: findings, run records, and JSON that round-trips exactly.

A finding is a value: a kind, a level, a number, a threshold and a reference. It is returned, never printed where it
arises.
"""

import dataclasses
import enum
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

SCHEMA_VERSION = 1


class Level(enum.StrEnum):
    """How serious a finding is. UNIDENTIFIED: the quantity cannot be known here, with the reason in the message."""

    INFO = "info"
    WARNING = "warning"
    FAILURE = "failure"
    UNIDENTIFIED = "unidentified"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One observation with its evidence.

    `kind` is `<part>.<name>`, such as `audit.index_inert`. `low` and `high` bound the value's interval.
    """

    kind: str
    level: Level
    message: str
    remedy: str = ""
    value: float | None = None
    low: float | None = None
    high: float | None = None
    threshold: float | None = None
    reference: str = ""
    where: dict[str, str | int] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        text = f"[{self.level}] {self.kind}: {self.message}"
        return f"{text} {self.remedy}" if self.remedy else text

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; the level is its word."""
        return encode_json(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Finding":
        """The finding that `to_dict` or a JSON file holds."""
        return cls(**{**_numbers(data, "value", "low", "high", "threshold"), "level": Level(data["level"])})


def _numbers(data: dict[str, Any], *names: str) -> dict[str, Any]:
    """`data` with the words "nan", "inf" and "-inf" under `names` turned back into numbers."""
    return {**data, **{name: float(data[name]) for name in names if isinstance(data.get(name), str)}}


def encode_json(value: Any) -> Any:
    """Plain JSON values: non-finite numbers become the strings "nan", "inf", "-inf"; dataclasses become dicts.

    Raises:
        TypeError: A value or a mapping's key that JSON cannot hold.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        if len({str(key) for key in value}) < len(value):
            raise TypeError(f"records: keys of a mapping must differ as text. Got {list(value)!r}.")
        return {str(key): encode_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode_json(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else ("nan" if math.isnan(value) else "inf" if value > 0 else "-inf")
    if isinstance(value, (np.generic, np.ndarray)):
        return encode_json(value.tolist())
    raise TypeError(f"records: a value must be a number, string, list, mapping, array or dataclass. Got {value!r}.")


def dump_json(value: Any, *, indent: int | None = 1) -> str:
    """Deterministic JSON text: sorted keys, shortest float forms, a final newline."""
    return json.dumps(encode_json(value), sort_keys=True, indent=indent, ensure_ascii=False, allow_nan=False) + "\n"


def write_atomic(path: str | os.PathLike[str], data: str | bytes) -> None:
    """Writes to a temporary name beside `path`, flushes to disk, renames: a reader sees the old file or the new one."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(temporary, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One finished training run, as scaling laws and studies read it."""

    run_id: str
    config_hash: str
    version: str
    status: str
    """finished, diverged or stopped."""
    seed: int
    num_steps: float
    """Mean iterations (or applications under PrefixDepth) drawn in training."""
    window: float
    """Mean trailing applications that carried gradient."""
    depth_law: str
    """JSON of the law, or "fixed"."""
    n_once: int
    n_rec: int
    width: int
    layers_once: int
    layers_core: int
    seq_len: int
    vocab_size: int
    tokens: int
    unique_tokens: int
    train_flops: int
    flops_pairs: str
    loss: float
    """Held-out nats per token at `eval_steps`."""
    loss_split: str
    tokenizer: str
    eval_steps: float
    seconds: float
    hardware: str
    schema: int = SCHEMA_VERSION

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "RunRecord":
        """The record that a JSON line holds.

        Raises:
            ValueError: A schema that this version does not know.
            TypeError: Unknown or missing keys.
        """
        if data.get("schema", SCHEMA_VERSION) != SCHEMA_VERSION:
            got = data["schema"]
            raise ValueError(
                f"RunRecord.schema must be {SCHEMA_VERSION}. Got {got}. Read it with the version that wrote it."
            )
        return cls(**_numbers(data, "num_steps", "window", "loss", "eval_steps", "seconds"))
