"""The page of a fitted scaling law: estimates with intervals, the comparison of laws, findings and cells."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looplab.records import encode_json
from looplab.report.sheet import write_sheet
from looplab.report.tables import Cell, Table, signed, words
from looplab.scaling.compare import Comparison
from looplab.scaling.fit import Fit


@dataclass(frozen=True, kw_only=True)
class FitRecord:
    """What the page embeds."""

    fit: dict[str, Any]
    comparison: dict[str, Any] | None
    command: str


def write_fit(fit: Fit, comparison: Comparison | None, folder: str | os.PathLike[str], *, command: str) -> Path:
    """Writes report.html and tables.tex and returns the path of the page; equal fits give equal bytes."""
    record = FitRecord(
        fit=fit.to_dict(), comparison=None if comparison is None else encode_json(comparison), command=command
    )
    tables = [estimates(fit), *([] if comparison is None else [laws(comparison)]), findings(fit), cells(fit)]
    return write_sheet(
        record,
        folder,
        title="Scaling law",
        subject=f"{fit.law.title}, {fit.runs} runs",
        sentences=sentences(fit, comparison),
        tables=tables,
    )


def sentences(fit: Fit, comparison: Comparison | None) -> list[str]:
    """How the fit went, in a few lines."""
    noise = "unknown" if fit.sigma is None else f"{fit.sigma:.4f} nats"
    said = [
        f"{fit.law.title} ({fit.law.reference}) on {fit.runs} runs in {fit.cells} cells; losses on {fit.split or '-'}.",
        f"{fit.start_share:.0%} of {fit.starts} starts reached the least objective. Residuals {fit.residual:.4f} nats; "
        f"noise between seeds {noise}.",
    ]
    if fit.replicates:
        said.append(f"{fit.converged} of {len(fit.replicates)} bootstrap replicates converged, {fit.redrawn} redrawn.")
    if "synthetic" in fit.split:
        said.insert(0, "These runs are synthetic: nobody trained them.")
    if comparison is not None:
        said.append(f"Among the laws compared: {comparison.verdict}.")
    return said


def estimates(fit: Fit) -> Table:
    """Parameters with their intervals."""
    rows = []
    for (name, value, ends), error in zip(fit.rows(), fit.predicted, strict=True):
        shown = [Cell(f"{_figure(low)} .. {_figure(high)}") for low, high in ends]
        rows.append((words(name), Cell(_figure(value), order=value), *shown, Cell(_figure(error), order=error)))
    columns = ("parameter", "estimate", *(f"95 %, {method}" for method in fit.intervals), "predicted error")
    note = "The predicted error is that of independent noise; of an amplitude, of its logarithm."
    return Table("estimates", "Estimates", columns, tuple(rows), note)


def laws(comparison: Comparison) -> Table:
    """The laws side by side."""
    rows = [
        (
            words(row.name),
            Cell(str(row.parameters)),
            Cell(signed(row.delta, 1), order=row.delta),
            *(
                Cell("-" if error is None else f"{error:.5f}", order=error)
                for error in (row.residual, row.held_budget, row.held_top, row.held_cell)
            ),
            Cell(f"{row.correlation:.2f}"),
            words(row.word),
        )
        for row in comparison.rows
    ]
    rows += [(words(name), *[Cell("-")] * 7, words("refused")) for name in comparison.refused]
    columns = ("law", "parameters", "AICc above best", "residual", "budget out", "top budget out", "cell out")
    note = "Errors in nats. Correlation: of residuals within a cell; above 0.1 the error with a cell out decides."
    return Table("laws", "Laws compared", (*columns, "correlation", "verdict"), tuple(rows), note, (0, 8))


def findings(fit: Fit) -> Table:
    """What was found on the way."""
    rows = tuple((words(f.kind), words(str(f.level)), words(f"{f.message} {f.remedy}".strip())) for f in fit.findings)
    return Table("findings", "Findings", ("kind", "level", "message"), rows, text_columns=(0, 1, 2))


def cells(fit: Fit) -> Table:
    """Runs by budget and pair."""
    rows = tuple((*map(words, cell), Cell(str(count))) for *cell, count in fit.cell_table)
    columns = ("budget", "family", "(num_steps, window)", "runs")
    return Table("cells", "Cells", columns, rows, text_columns=(0, 1, 2))


def _figure(value: float) -> str:
    return f"{value:.4g}".replace("-", "−")
