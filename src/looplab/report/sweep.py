"""The page of a sweep: which setting has the least loss, loss against every varied field, then every run.

It depends on the `SweepTable` alone, which is embedded in the page; numbers of a run know their path in results.json.
"""

import json
import os
from pathlib import Path

from markupsafe import Markup

from looplab.records import dump_json, write_atomic
from looplab.report.figures.base import pdf
from looplab.report.figures.sweep_losses import drawable, finding, sweep_losses
from looplab.report.keyed import Keyed
from looplab.report.latex import render
from looplab.report.page import _asset, _environment
from looplab.report.plates import Plate
from looplab.report.tables import NONE, Cell, Table, amount, count, signed, words
from looplab.training.sweep.points import short_names, text_of
from looplab.training.sweep.table import SEED, SweepTable

PAGE, TABLES, FIGURES = "report.html", "tables.tex", "figures"
DIGITS = 4
NOT_COMPARABLE = "The losses are of different held-out data or tokenizers and do not compare."


def write_sweep(table: SweepTable, folder: str | os.PathLike[str]) -> Path:
    """Writes report.html, tables.tex and figures/ and returns the path of the page; equal tables give equal bytes."""
    folder = Path(folder)
    (folder / FIGURES).mkdir(parents=True, exist_ok=True)
    drawn = plates(table)
    for plate in drawn:
        write_atomic(folder / FIGURES / f"{plate.name}.svg", plate.svg)
        write_atomic(folder / FIGURES / f"{plate.name}.pdf", pdf(plate.figure))
    write_atomic(folder / TABLES, sweep_tex(table))
    write_atomic(folder / PAGE, sweep_page(table, drawn))
    return folder / PAGE


def plates(table: SweepTable) -> list[Plate]:
    """One figure for every varied field but the seed."""
    return [Plate(f"loss-{path}", f"{finding(table, path)}.", sweep_losses(table, path)) for path in drawable(table)]


def sweep_page(table: SweepTable, drawn: list[Plate]) -> str:
    """The HTML of a sweep with its figures."""
    keyed = Keyed(table)
    best = table.best()
    context = {
        "table": table,
        "best": "" if best is None else f"{best.mean:.{DIGITS}f} at {_at(table, best.values)}",
        "note": "" if table.comparable else NOT_COMPARABLE,
        "settings": settings_table(table),
        "runs": runs_table(keyed),
        "lost": [row for row in table.rows if row.record is None],
        "plates": drawn,
        "record": _embedded(table),
        "css": _asset("audit.css"),
        "js": _asset("audit.js"),
    }
    return _environment().get_template("sweep.html.jinja").render(context)


def sweep_tex(table: SweepTable) -> str:
    """The text of tables.tex: one row per setting."""
    head = f"% Sweep of {table.recipe}, {len(table.rows)} runs. Needs \\usepackage{{booktabs}}.\n"
    return head + render(settings_table(table))


def settings_table(table: SweepTable) -> Table:
    """One row per setting: runs that differ in their seed alone."""
    paths = [path for path in table.varied if path != SEED]
    names, rows = short_names(table.varied), []
    for setting in table.settings():
        losses, number = setting.losses, len(setting.rows)
        figures = (sum(losses) / len(losses), min(losses), max(losses)) if losses else (None,) * 3
        whole = len(losses) == number
        runs = Cell(
            f"{number}" if whole else f"{len(losses)} of {number}",
            order=float(len(losses)),
            tone="" if whole else "warning",
        )
        rows.append((*(_value(setting.values[path]) for path in paths), runs, *(_figure(figure) for figure in figures)))
    columns = (*(names[path] for path in paths), "runs", "loss", "least", "largest")
    note = "Loss: held-out nats per token, the mean over seeds; least and largest of the seeds."
    return Table("settings", "Settings", columns, tuple(rows), note, ())


def runs_table(keyed: Keyed) -> Table:
    """One row per run."""
    names, rows = short_names(keyed.held.varied), []
    for row in keyed.rows:
        held, dash = row.held, Cell(NONE, tone="muted")
        numbers = [dash] * 5
        if held.record is not None:
            record = row.record
            numbers = [
                amount(record.loss, DIGITS), count(record.tokens), amount(record.num_steps, 2),
                Cell(f"{held.record.train_flops:.3g}", record.train_flops.path, order=float(held.record.train_flops)),
                amount(record.seconds, 1),
            ]  # fmt: skip
        status = words(held.status, "" if held.record else "warning")
        values = [_value(held.values[path]) for path in keyed.held.varied]
        rows.append((*values, status, *numbers, words(held.run, "code")))
    columns = (*names.values(), "status", "loss", "tokens", "mean depth", "training FLOPs", "seconds", "folder in runs")
    return Table("runs", "Runs", columns, tuple(rows), "", (len(names), len(names) + 6))


def _value(value: object) -> Cell:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return Cell(text_of(value), order=float(value) if number else None)  # type: ignore[arg-type]


def _figure(figure: float | None) -> Cell:
    return Cell(NONE, tone="muted") if figure is None else Cell(signed(figure, DIGITS), order=figure)


def _at(table: SweepTable, values: object) -> str:
    names = short_names(table.varied)
    return " ".join(f"{names[path]}={text_of(value)}" for path, value in dict(values).items())  # type: ignore[call-overload]


def _embedded(table: SweepTable) -> Markup:
    text = json.dumps(json.loads(dump_json(table)), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return Markup(text.replace("<", r"\u003c"))
