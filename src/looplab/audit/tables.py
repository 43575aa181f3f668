"""What an audit leaves besides its result: per-token and per-document tables, and the fitted probes.

    tokens.parquet             one row per scored token, schedule and noise seed
    documents.parquet          one row per document and schedule: sums of every loss, and of its derivatives in beta
    probes/<domain>.safetensors   <schedule>.beta, .gain, .shift, .scale

Everything is written into a hidden folder beside its place and moved there by `finish`.
"""

import contextlib
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from safetensors.numpy import save_file

from looplab.audit.measure import Fits

TOKENS, DOCUMENTS, PROBES = "tokens.parquet", "documents.parquet", "probes"


class Tables(ABC):
    """Receives tables while an audit runs."""

    keeps_tokens: bool
    """Whether `tokens` is to be called."""

    @abstractmethod
    def tokens(self, domain: str, schedule: str, columns: Mapping[str, np.ndarray]) -> None:
        """One batch: one entry per scored token in every column."""

    @abstractmethod
    def documents(self, domain: str, schedule: str, columns: Mapping[str, Any]) -> None:
        """One entry per evaluation document in every column."""

    @abstractmethod
    def probes(self, domain: str, schedule: str, fit: Fits) -> None:
        """The fitted probes of one schedule."""


class NoTables(Tables):
    """Keeps nothing."""

    keeps_tokens = False

    def tokens(self, domain: str, schedule: str, columns: Mapping[str, np.ndarray]) -> None:
        pass

    def documents(self, domain: str, schedule: str, columns: Mapping[str, Any]) -> None:
        pass

    def probes(self, domain: str, schedule: str, fit: Fits) -> None:
        pass


class FolderTables(Tables):
    """Writes into a folder; use as a context, and call `finish` at the end. Without it nothing stays."""

    def __init__(self, folder: Path, *, keep_tokens: bool = True):
        self.keeps_tokens = keep_tokens
        self._folder = folder
        self._hidden = folder / f".tables.{os.getpid()}"
        self._writers: dict[str, pa.parquet.ParquetWriter] = {}
        self._probes: dict[str, dict[str, np.ndarray]] = {}

    def __enter__(self) -> "FolderTables":
        self._hidden.mkdir(parents=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._close()
        shutil.rmtree(self._hidden)

    def tokens(self, domain: str, schedule: str, columns: Mapping[str, np.ndarray]) -> None:
        self._write(TOKENS, domain, schedule, columns)

    def documents(self, domain: str, schedule: str, columns: Mapping[str, Any]) -> None:
        self._write(DOCUMENTS, domain, schedule, columns)

    def probes(self, domain: str, schedule: str, fit: Fits) -> None:
        kept = self._probes.setdefault(domain, {})
        if fit.temperature is not None:
            kept[f"{schedule}.beta"] = np.array([fit.temperature.beta])
        if fit.affine is not None:
            kept[f"{schedule}.gain"] = np.ascontiguousarray(fit.affine.gain)
            kept[f"{schedule}.shift"] = np.ascontiguousarray(fit.affine.shift)
            kept[f"{schedule}.scale"] = np.array([fit.affine.scale])

    def finish(self) -> None:
        """Moves everything to its place; each file is replaced whole."""
        self._close()
        (self._hidden / PROBES).mkdir()
        for domain, arrays in self._probes.items():
            save_file(arrays, self._hidden / PROBES / f"{domain}.safetensors")
        (self._folder / PROBES).mkdir(exist_ok=True)
        for path in sorted(self._hidden.rglob("*")):
            if path.is_file():
                os.replace(path, self._folder / path.relative_to(self._hidden))

    def _write(self, name: str, domain: str, schedule: str, columns: Mapping[str, Any]) -> None:
        size = len(next(iter(columns.values())))
        constant = {
            key: pa.array(np.full(size, value)).dictionary_encode()
            for key, value in (("domain", domain), ("split", "evaluation"), ("schedule", schedule))
        }
        table = pa.table({**constant, **{key: pa.array(values) for key, values in columns.items()}})
        if name not in self._writers:
            self._writers[name] = pa.parquet.ParquetWriter(self._hidden / name, table.schema, compression="zstd")
        self._writers[name].write_table(table)

    def _close(self) -> None:
        for writer in self._writers.values():
            with contextlib.suppress(OSError):
                writer.close()
        self._writers.clear()
