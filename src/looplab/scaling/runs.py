"""The table of runs that laws are fitted to, and the checks that it must pass first.

One row per finished run: records that `looplab train` and `looplab sweep` write, or anybody's JSONL, CSV or parquet.
Every failed check is a finding: a FAILURE refuses the table, others drop rows with a count, or warn.
"""

import dataclasses
import difflib
import glob
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from looplab.records import Finding, Level
from looplab.scaling.examples import EXAMPLES
from looplab.scaling.laws.points import Array, Points
from looplab.scaling.run_checks import LIMIT, check_rows, listed

REQUIRED = ("run_id", "num_steps", "window", "n_once", "n_rec", "tokens", "loss")
INTEGERS = (
    *("n_once", "n_rec", "n_rec_active", "width", "layers_once", "layers_core", "seq_len", "vocab_size", "tokens"),
    *("unique_tokens", "train_flops", "seed"),
)
NUMBERS = ("num_steps", "window", "loss", "loss_se", "eval_steps")
WORDS = (
    *("run_id", "family", "depth_law", "flops_pairs", "budget", "loss_split", "tokenizer", "config_hash", "version"),
    "status",
)
KNOWN = (*INTEGERS, *NUMBERS, *WORDS)
DEFAULTS: dict[str, Any] = {"family": "free", "depth_law": "fixed", "status": "finished", "seed": 0}
UNITS = ("nats", "bits", "ppl")


class RunsError(ValueError):
    """A table that cannot be read at all."""


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs that passed the checks as far as `findings` say; sorted by run_id, whatever the order of the files."""

    rows: tuple[dict[str, Any], ...]
    findings: tuple[Finding, ...]
    dropped: dict[str, int]
    """Reason -> rows."""
    sigma: float | None
    """Deviation of the loss between seeds of one configuration, in nats; None: no replicates, noise unknown."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def refused(self) -> list[Finding]:
        """What forbids a fit."""
        return [finding for finding in self.findings if finding.level is Level.FAILURE]

    def column(self, name: str) -> list[Any]:
        """Values of one column."""
        return [row.get(name) for row in self.rows]

    @property
    def cells(self) -> list[tuple[str, str, str]]:
        """(budget, family, pair) of every run; a sampled depth is a pair of its own."""
        return [(row["budget"], row["family"], pair_name(row)) for row in self.rows]

    @property
    def cell_index(self) -> NDArray[np.int64]:
        """Place of every run's cell among the sorted ones."""
        cells = self.cells
        place = {cell: i for i, cell in enumerate(sorted(set(cells)))}
        return np.array([place[cell] for cell in cells], dtype=np.int64)

    @property
    def data_hash(self) -> str:
        """SHA-256 of the rows, the same for CSV, JSONL and parquet of one table."""
        text = json.dumps(self.rows, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def points(self) -> Points:
        """The arrays that laws read."""
        names = ("n_once", "n_rec", "tokens", "loss", "num_steps", "window", "eval_steps")
        return Points.make(**{name: self.column(name) for name in names}, laws=[depth_pmf(row) for row in self.rows])

    def design(self) -> str:
        """Runs, cells, widths per cell, budgets and pairs in one line."""
        cells = self.cells
        widths = [len({self.rows[i]["n_rec"] for i, c in enumerate(cells) if c == cell}) for cell in set(cells)]
        pairs = sorted({pair_name(row) for row in self.rows})
        sigma = "unknown" if self.sigma is None else f"{self.sigma:.4f} nats"
        return (
            f"{len(self)} runs, {len(set(cells))} cells ({min(widths, default=0)} to {max(widths, default=0)} widths "
            f"each), {len({row['budget'] for row in self.rows})} budgets, {len(pairs)} pairs "
            f"({listed(pairs, 12)}), sigma {sigma}"
        )

    def __str__(self) -> str:
        gone = [f"dropped {count}: {reason}" for reason, count in self.dropped.items()]
        return "\n".join([self.design(), *gone, *map(str, self.findings)])


def pair_name(row: Mapping[str, Any]) -> str:
    """`(4,2)`, or the means and the word sampled."""
    text = f"({row['num_steps']:.4g},{row['window']:.4g})"
    return text if row["depth_law"] == "fixed" else f"{text} sampled"


def depth_pmf(row: Mapping[str, Any]) -> list[tuple[float, float, float]] | None:
    """(num_steps, window, mass) of a sampled depth, where `depth_law` lists them; None: at the means."""
    if not row["depth_law"].startswith("["):
        return None
    return [(float(f), float(b), float(mass)) for f, b, mass in json.loads(row["depth_law"])]


def read_runs(
    *sources: str | os.PathLike[str] | Sequence[Mapping[str, Any]],
    columns: Mapping[str, str] | None = None,
    only: Mapping[str, str] | None = None,
    loss_unit: str = "nats",
    test_time: bool = False,
) -> Runs:
    """Reads and checks runs.

    Args:
        sources: Files (.jsonl, .json, .csv, .parquet), globs, names of `EXAMPLES`, or rows. The order is irrelevant.
        columns: Other people's name of a column -> ours.
        only: Column -> the value that rows must have to be read.
        loss_unit: Of `loss`: nats, bits or ppl; converted.
        test_time: Keep rows that were evaluated at another depth than num_steps.

    Raises:
        RunsError: No such file, an unknown suffix, no rows, or a missing column.
    """
    if loss_unit not in UNITS:
        raise RunsError(f"loss_unit must be one of {', '.join(UNITS)}. Got {loss_unit!r}.")
    rename = dict(columns or {})
    found = [{rename.get(key, key): value for key, value in row.items()} for row in _rows(sources)]
    if not found:
        raise RunsError("runs: the files must hold rows. Got none. Name files with finished runs.")
    _check_columns(found)
    rows = [_typed(row, index) for index, row in enumerate(found)]
    for name, value in (only or {}).items():
        rows = [row for row in rows if str(row.get(name)) == value]
    if not rows:
        raise RunsError(f"runs: only={dict(only or {})} leaves no row. Choose a value that occurs.")
    for row in rows:
        row["loss"] = {"nats": lambda x: x, "bits": lambda x: x * math.log(2), "ppl": _log}[loss_unit](row["loss"])
    checked = check_rows(rows, test_time=test_time)
    kept = sorted(checked.rows, key=lambda row: row["run_id"])
    _name_budgets(kept)
    return Runs(tuple(kept), tuple(checked.findings), checked.dropped, checked.sigma)


def _log(value: float) -> float:
    return math.log(value) if value > 0 else math.nan


def _rows(sources: Sequence[Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for source in sources:
        if not isinstance(source, (str, os.PathLike)):
            rows += [dict(row) for row in source]
        elif str(source) in EXAMPLES:
            rows += EXAMPLES[str(source)]()
        else:
            paths = sorted(glob.glob(os.fspath(source)))
            if not paths:
                raise RunsError(
                    f"runs: {os.fspath(source)} must be a file, a glob, or one of {', '.join(EXAMPLES)}. No such file."
                )
            for path in paths:
                rows += _file(Path(path))
    return rows


def _file(path: Path) -> list[dict[str, Any]]:
    try:
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        if path.suffix == ".json":
            return [json.loads(path.read_text(encoding="utf-8"))]
    except json.JSONDecodeError as error:
        raise RunsError(f"runs: {path} must hold JSON. {error}. Repair or remove the line.") from error
    if path.suffix == ".csv":
        import csv

        with path.open(newline="", encoding="utf-8") as file:
            return [{k: v for k, v in row.items() if v not in ("", None)} for row in csv.DictReader(file)]
    if path.suffix == ".parquet":
        import pyarrow.parquet as parquet

        return [{k: v for k, v in row.items() if v is not None} for row in parquet.read_table(path).to_pylist()]
    raise RunsError(f"runs: a file must end in .jsonl, .json, .csv or .parquet. Got {path.name}. Convert it.")


def _check_columns(rows: Sequence[Mapping[str, Any]]) -> None:
    seen = {name for row in rows for name in row}
    for name in REQUIRED:
        missing = [i for i, row in enumerate(rows) if row.get(name) is None]
        if not missing:
            continue
        if name in seen:
            raise RunsError(f"Column {name!r} is empty in {len(missing)} rows, first row {missing[0]}. Fill it.")
        near = difflib.get_close_matches(name, [other for other in seen if other not in KNOWN], n=1)
        hint = f"No column {near[0]!r} is known. Did you mean {name!r}?" if near else f"No column {name!r}."
        raise RunsError(f"{hint} Map names with columns={{...}}.")
    if not {"budget", "train_flops"} & seen:
        raise RunsError("No column 'budget' or 'train_flops'. One of them must say which runs cost the same.")


def _typed(row: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The known columns of a row, each in its type; numbers may be written as text."""
    typed: dict[str, Any] = {}
    for name in KNOWN:
        value = row.get(name, DEFAULTS.get(name))
        if value is None:
            continue
        try:
            if name in INTEGERS:
                typed[name] = _whole(value)
            elif name in NUMBERS:
                typed[name] = float(value)
            else:
                typed[name] = value if isinstance(value, str) else json.dumps(value)
        except (TypeError, ValueError) as error:
            raise RunsError(f"row {index}: {name} must be a number. Got {value!r}. Correct it.") from error
    typed.setdefault("unique_tokens", typed["tokens"])
    typed.setdefault("eval_steps", typed["num_steps"])
    return typed


def _whole(value: Any) -> int | float:
    """An int without loss of digits, as FLOPs need more than a float or 64 bits hold; else the number as it is."""
    if isinstance(value, str) and value.strip().lstrip("-").isdigit():
        return int(value)
    if isinstance(value, int):
        return value
    number = float(value)
    return int(number) if math.isfinite(number) and number == int(number) else number


def _name_budgets(rows: Sequence[dict[str, Any]]) -> None:
    """Budgets by label, or runs within 2 % of the least FLOPs of their group together."""
    first: float | None = None
    label = ""
    for row in sorted((row for row in rows if "budget" not in row), key=lambda row: row["train_flops"]):
        if first is None or row["train_flops"] > first * (1 + LIMIT):
            first, label = row["train_flops"], f"{row['train_flops']:.4g}"
        row["budget"] = label


def subset(runs: Runs, keep: NDArray[np.bool_]) -> Runs:
    """Some of the runs, with the same findings."""
    return dataclasses.replace(runs, rows=tuple(row for row, k in zip(runs.rows, keep, strict=True) if k))


def losses(runs: Runs) -> Array:
    """Nats per token, [n]."""
    return np.array(runs.column("loss"), dtype=np.float64)
