"""The table of a sweep: one row per run, what was varied as columns, then what its RunRecord says.

    table.csv, table.parquet     the rows
    results.json                 the same as a `SweepTable`, which prints itself

Losses are compared only where the held-out data and the tokenizer are the same in all runs.
"""

import csv
import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from looplab.records import RunRecord, dump_json, write_atomic
from looplab.training.config import RunConfig
from looplab.training.sweep.points import label, short_names, text_of, value_at, varied
from looplab.training.sweep.run import SweptRun

CSV, PARQUET, JSON = "table.csv", "table.parquet", "results.json"
SEED = "seed"
RECORD = tuple(field.name for field in dataclasses.fields(RunRecord) if field.name != "status")


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """One run."""

    run: str
    """Name of its folder: the hash of its configuration."""
    label: str
    values: Mapping[str, Any]
    """Path of a varied field -> its JSON value."""
    status: str
    """finished, diverged or failed."""
    message: str = ""
    record: RunRecord | None = None


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Runs that differ in their seed alone."""

    values: Mapping[str, Any]
    rows: tuple[SweepRow, ...]

    @property
    def losses(self) -> tuple[float, ...]:
        """Of the finished runs."""
        return tuple(row.record.loss for row in self.rows if row.record is not None)

    @property
    def mean(self) -> float | None:
        """Mean loss over the seeds; None where a run is missing."""
        return sum(self.losses) / len(self.losses) if len(self.losses) == len(self.rows) else None


@dataclass(frozen=True, kw_only=True)
class SweepTable:
    """What came out of a sweep."""

    recipe: str
    varied: tuple[str, ...]
    """Paths of the fields that differ, or that were to be varied."""
    rows: tuple[SweepRow, ...]
    command: str = ""

    @property
    def comparable(self) -> bool:
        """Whether all losses are of the same held-out data in the same tokens."""
        return len({(row.record.loss_split, row.record.tokenizer) for row in self.rows if row.record}) < 2

    def settings(self) -> list[Setting]:
        """The runs, those of equal values but for the seed together."""
        found: dict[str, list[SweepRow]] = {}
        for row in self.rows:
            found.setdefault(json.dumps({k: v for k, v in row.values.items() if k != SEED}), []).append(row)
        return [Setting(values=json.loads(key), rows=tuple(rows)) for key, rows in found.items()]

    def best(self) -> Setting | None:
        """The setting with the least mean loss; None where losses cannot be compared, or there is only one."""
        whole = [setting for setting in self.settings() if setting.mean is not None]
        if not self.comparable or len(whole) < 2:
            return None
        return min(whole, key=lambda setting: setting.mean or 0.0)

    def columns(self) -> dict[str, list[Any]]:
        """Column -> values, None where a run has no record."""
        columns: dict[str, list[Any]] = {path: [row.values[path] for row in self.rows] for path in self.varied}
        columns |= {"run": [row.run for row in self.rows], "status": [row.status for row in self.rows]}
        for name in RECORD:
            if name not in columns:
                columns[name] = [None if row.record is None else getattr(row.record, name) for row in self.rows]
        columns["message"] = [row.message for row in self.rows]
        return columns

    def write(self, folder: Path) -> None:
        """Writes table.csv, table.parquet and results.json."""
        folder.mkdir(parents=True, exist_ok=True)
        columns = {name: _alike(values) for name, values in self.columns().items()}
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
        write_atomic(folder / CSV, text.getvalue())
        packed = io.BytesIO()
        pa.parquet.write_table(pa.table({name: pa.array(values) for name, values in columns.items()}), packed)
        write_atomic(folder / PARQUET, packed.getvalue())
        write_atomic(folder / JSON, dump_json(self))

    def __str__(self) -> str:
        settings, paths = self.settings(), [path for path in self.varied if path != SEED]
        names = short_names(self.varied)
        lines = [[*(names[path] for path in paths), "runs", "loss", "least", "largest", "seconds"]]
        for setting in settings:
            losses, done = setting.losses, [row.record for row in setting.rows if row.record]
            number = f"{len(losses)}" if len(losses) == len(setting.rows) else f"{len(losses)} of {len(setting.rows)}"
            figures = [sum(losses) / len(losses), min(losses), max(losses)] if losses else []
            shown = [f"{figure:.4f}" for figure in figures] or ["-"] * 3
            seconds = f"{sum(record.seconds for record in done):.0f}"
            lines.append([*(text_of(setting.values[path]) for path in paths), number, *shown, seconds])
        wide = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        text = ["  ".join(cell.rjust(width) for cell, width in zip(line, wide, strict=True)) for line in lines]
        if (best := self.best()) is not None:
            shown = [f"{names[path]}={text_of(value)}" for path, value in best.values.items()]
            text += ["", f"Least loss: {best.mean:.4f} at {' '.join(shown)}"]
        if not self.comparable:
            text += ["", "The losses are of different held-out data or tokenizers and do not compare."]
        lost = [row for row in self.rows if row.record is None]
        text += [line for row in lost for line in ("", f"{row.status}: {row.run} ({row.label}): {row.message}")]
        return "\n".join(text)

    @classmethod
    def from_json(cls, text: str) -> "SweepTable":
        """The table that results.json holds."""
        data = json.loads(text)
        rows = [
            SweepRow(**{**row, "record": RunRecord.from_dict(row["record"]) if row["record"] else None})
            for row in data["rows"]
        ]
        return cls(**{**data, "varied": tuple(data["varied"]), "rows": tuple(rows)})


def sweep_table(runs: Sequence[SweptRun], *, asked: Sequence[str] = (), command: str = "") -> SweepTable:
    """The table of finished runs.

    Args:
        runs: At least one, in the order of the rows.
        asked: Paths that were to be varied, also where they have one value; columns in this order, others after them.
        command: What repeats the sweep.
    """
    configs = [run.config for run in runs]
    paths = table_paths(configs, asked)
    rows = [
        SweepRow(
            run=run.folder.name,
            label=label(run.config, paths),
            values={path: value_at(run.config, path) for path in paths},
            status=run.status,
            message=run.message,
            record=run.record,
        )
        for run in runs
    ]
    return SweepTable(recipe=configs[0].recipe, varied=paths, rows=tuple(rows), command=command)


def table_paths(configs: Sequence[RunConfig], asked: Sequence[str] = ()) -> tuple[str, ...]:
    """The fields that are columns: those asked for, as far as all runs have them, then all others that differ."""
    return tuple(dict.fromkeys([*(path for path in asked if _in_all(configs, path)), *varied(configs)]))


def _in_all(configs: Sequence[RunConfig], path: str) -> bool:
    """Whether every configuration has this field; a choice that some of them made has fields of its own."""
    try:
        for config in configs:
            value_at(config, path)
    except (KeyError, TypeError):
        return False
    return True


def _alike(values: Sequence[Any]) -> list[Any]:
    """Values of one type: numbers and words as they are, anything mixed or nested as text."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float} or (len(kinds) == 1 and kinds <= {bool, str}):
        return [float(v) if float in kinds and v is not None else v for v in values]
    return [None if value is None else text_of(value) for value in values]
