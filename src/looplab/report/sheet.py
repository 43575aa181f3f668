"""A page of sentences and tables about one record: what gates and the reuse audit came to."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from looplab.intervals import Interval
from looplab.records import dump_json, write_atomic
from looplab.report.escape import NONE
from looplab.report.keyed import Keyed
from looplab.report.latex import render
from looplab.report.page import _asset, _environment
from looplab.report.tables import Cell, Table, signed, unbroken

PAGE, TABLES = "report.html", "tables.tex"


def write_sheet(
    record: Any, folder: str | os.PathLike[str], *, title: str, subject: str, sentences: Sequence[str],
    tables: Sequence[Table],
) -> Path:  # fmt: skip
    """Writes report.html and tables.tex and returns the path of the page; equal records give equal bytes.

    Args:
        record: A dataclass, embedded in the page.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shown = [table for table in tables if table.rows]
    head = f"% {title} of {' '.join(subject.split())}. Needs \\usepackage{{booktabs}}.\n"
    write_atomic(folder / TABLES, head + "\n".join(render(table) for table in shown))
    text = json.dumps(json.loads(dump_json(record)), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    context = {
        "title": title,
        "subject": subject,
        "sentences": sentences,
        "tables": shown,
        "embedded": Markup(text.replace("<", r"\u003c")),
        "css": _asset("audit.css"),
        "js": _asset("audit.js"),
    }
    write_atomic(folder / PAGE, _environment().get_template("sheet.html.jinja").render(context))
    return folder / PAGE


def measured(part: Keyed, digits: int = 3, *, percent: bool = False) -> Cell:
    """An interval: its estimate, and the ends in small type; a dash for None."""
    interval: Interval | None = part.held
    if interval is None:
        return Cell(NONE, tone="muted")
    low, value, high = (
        unbroken(f"{signed(100 * x, 1)} %") if percent else signed(x, digits)
        for x in (interval.low, interval.estimate, interval.high)
    )
    return Cell(value, f"{part.path}.estimate", part.home, interval.estimate).over(f"{low} .. {high}")
