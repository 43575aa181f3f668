"""What an audit leaves for people in one folder: report.html, tables.tex, the depth card, figures as SVG and PDF."""

import os
from collections.abc import Sequence
from pathlib import Path

from looplab.audit.result import AuditResult
from looplab.records import write_atomic
from looplab.report.depth_card import write_depth_card
from looplab.report.figures.base import pdf
from looplab.report.latex import tables_tex
from looplab.report.page import audit_page
from looplab.report.plates import plates

PAGE, TABLES, FIGURES = "report.html", "tables.tex", "figures"


def write_report(result: AuditResult, folder: str | os.PathLike[str], beside: Sequence[AuditResult] = ()) -> Path:
    """Writes the report of `result` and returns the path of its page; equal results give equal bytes.

    Args:
        folder: Made if missing. Each file is replaced whole, the page last.
        beside: Other audits that the page compares with this one.
    """
    folder = Path(folder)
    (folder / FIGURES).mkdir(parents=True, exist_ok=True)
    drawn = plates(result)
    for name, plate in drawn.items():
        write_atomic(folder / FIGURES / f"{name}.svg", plate.svg)
        write_atomic(folder / FIGURES / f"{name}.pdf", pdf(plate.figure))
    write_atomic(folder / TABLES, tables_tex(result))
    write_depth_card(result, folder)
    write_atomic(folder / PAGE, audit_page(result, beside, drawn=drawn))
    return folder / PAGE
