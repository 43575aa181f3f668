"""What an audit leaves besides its result: per-token and per-document tables, and the fitted probes.

    tokens.parquet             one row per scored token, schedule and noise seed
    documents.parquet          one row per document and schedule: sums of every loss, and of its derivatives in beta;
                               of problems of a task also their right cells
    probes/<domain>.safetensors   <schedule>.beta, .gain, .shift, .scale, .full_rank.{matrix,shift,scale}

Everything is written into a hidden folder beside its place and moved there at the end; each file is replaced whole.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from safetensors.numpy import save_file

from looplab.audit.case import EVALUATION, MODEL
from looplab.audit.collect import Collected
from looplab.audit.measure import Fits
from looplab.journal import Journal

TOKENS, DOCUMENTS, PROBES = "tokens.parquet", "documents.parquet", "probes"
_TOKEN = "token."

Rows = tuple[str, str, Mapping[str, Any]]
"""Domain, schedule, columns of equal length."""


def write_tables(folder: Path, journal: Journal, collected: Mapping[str, Collected], *, keep_tokens: bool) -> None:
    """Writes the tables of all domains of the model.

    Args:
        collected: By domain.
        keep_tokens: Write `tokens.parquet`; the journal then has the columns.
    """
    hidden = folder / f".tables.{os.getpid()}"
    hidden.mkdir(parents=True)
    try:
        _write(hidden / DOCUMENTS, _documents(collected))
        if keep_tokens:
            _write(hidden / TOKENS, _tokens(journal, collected))
        (hidden / PROBES).mkdir()
        for domain, part in collected.items():
            arrays = {key: array for name, fit in part.fits.items() for key, array in _probes(name, fit)}
            save_file(arrays, hidden / PROBES / f"{domain}.safetensors")
        (folder / PROBES).mkdir(exist_ok=True)
        for path in sorted(hidden.rglob("*")):
            if path.is_file():
                os.replace(path, folder / path.relative_to(hidden))
    finally:
        shutil.rmtree(hidden)


def _documents(collected: Mapping[str, Collected]) -> Iterator[Rows]:
    for domain, part in collected.items():
        split = part.case.split(EVALUATION)
        for schedule, kept in part.scores.items():
            sums = {readout: losses.sum(axis=0) for readout, losses in kept.losses.items()}
            columns = {
                "document": [document.content_key for document in split.documents],
                "tokens": split.counts,
                "bytes": split.text_bytes,
                **{f"nll_{readout}": values for readout, values in sums.items()},
                **dict(zip(("first", "second", "third"), kept.derivatives, strict=True)),
                **{f"right_{readout}": cells.sum(axis=0) for readout, cells in kept.right.items()},
            }
            yield domain, schedule, columns


def _tokens(journal: Journal, collected: Mapping[str, Collected]) -> Iterator[Rows]:
    for domain, part in collected.items():
        for schedule in part.scores:
            for shard in part.case.shards(EVALUATION):
                arrays = journal.get((MODEL, domain, EVALUATION, shard, schedule)).arrays
                columns = {name.removeprefix(_TOKEN): a for name, a in arrays.items() if name.startswith(_TOKEN)}
                yield domain, schedule, dict(sorted(columns.items(), key=lambda column: _order(column[0])))


def _order(column: str) -> tuple[int, str]:
    """Identifiers first, then measurements by name."""
    identifiers = ("document", "window", "position", "token", "noise_seed", "correct")
    return (identifiers.index(column) if column in identifiers else len(identifiers)), column


def _probes(schedule: str, fit: Fits) -> Iterator[tuple[str, np.ndarray]]:
    if fit.temperature is not None:
        yield f"{schedule}.beta", np.array([fit.temperature.beta])
    if fit.affine is not None:
        yield f"{schedule}.gain", np.ascontiguousarray(fit.affine.gain)
        yield f"{schedule}.shift", np.ascontiguousarray(fit.affine.shift)
        yield f"{schedule}.scale", np.array([fit.affine.scale])
    if fit.full_rank is not None:
        yield f"{schedule}.full_rank.matrix", np.ascontiguousarray(fit.full_rank.matrix)
        yield f"{schedule}.full_rank.shift", np.ascontiguousarray(fit.full_rank.shift)
        yield f"{schedule}.full_rank.scale", np.array([fit.full_rank.scale])


def _write(path: Path, rows: Iterator[Rows]) -> None:
    writer = None
    try:
        for domain, schedule, columns in rows:
            size = len(next(iter(columns.values())))
            constant = {
                key: pa.array(np.full(size, value)).dictionary_encode()
                for key, value in (("domain", domain), ("split", EVALUATION), ("schedule", schedule))
            }
            table = pa.table({**constant, **{key: pa.array(values) for key, values in columns.items()}})
            if writer is None:
                writer = pa.parquet.ParquetWriter(path, table.schema, compression="zstd")
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()
