"""The page of several audits side by side: their answers, what differs between them, and how far each share spreads."""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from looplab.audit.compare import SHARE, ComparedDomain, Comparison, Quantity
from looplab.audit.result import RESULTS, AuditResult
from looplab.records import dump_json, encode_json, write_atomic
from looplab.report import beside
from looplab.report.figures.base import pdf
from looplab.report.figures.spread import shown, spread
from looplab.report.keyed import Keyed
from looplab.report.latex import render
from looplab.report.page import _asset, _environment
from looplab.report.plates import Plate
from looplab.report.tables import NONE, Cell, Table, nats, percent, signed, unknown, words

PAGE, TABLES, FIGURES = "report.html", "tables.tex", "figures"
PLAIN = ("loss at full depth", "gap")
"""Quantities that are no shares."""
NO_BREAK_HYPHEN = "\N{NON-BREAKING HYPHEN}"


def write_comparison(comparison: Comparison, results: Sequence[AuditResult], folder: str | os.PathLike[str]) -> Path:
    """Writes report.html, tables.tex, figures and, last, results.json; returns the path of the page.

    Args:
        results: The audits, in the order of `comparison.models`; each lies in the folder of its name.
    """
    folder = Path(folder)
    (folder / FIGURES).mkdir(parents=True, exist_ok=True)
    drawn = _plates(comparison)
    for plate in drawn:
        write_atomic(folder / FIGURES / f"{plate.name}.svg", plate.svg)
        write_atomic(folder / FIGURES / f"{plate.name}.pdf", pdf(plate.figure))
    tables = [quantities(Keyed(comparison), domain) for domain in Keyed(comparison).domains]
    head = f"% {len(results)} audits, settings {comparison.config_hash}. Needs \\usepackage{{booktabs}}.\n"
    write_atomic(folder / TABLES, head + "\n".join(map(render, tables)))
    write_atomic(folder / PAGE, comparison_page(comparison, results, drawn=drawn))
    write_atomic(folder / RESULTS, dump_json(comparison))
    return folder / PAGE


def comparison_page(
    comparison: Comparison, results: Sequence[AuditResult], *, drawn: Sequence[Plate] | None = None
) -> str:
    """The HTML of a comparison."""
    keyed = Keyed(comparison)
    named = [_renamed(result, name) for result, name in zip(results, comparison.models, strict=True)]
    context: dict[str, Any] = {
        "comparison": comparison,
        "answers": _unlinked(beside.comparison(named[0], named[1:])),
        "waterfalls": beside.waterfalls(named[0], named[1:]),
        "domains": [quantities(keyed, domain) for domain in keyed.domains],
        "plates": _plates(comparison) if drawn is None else drawn,
        "same_tokens": all(domain.same_tokens for domain in comparison.domains),
        "record": _embedded(comparison),
        "css": _asset("audit.css"),
        "js": _asset("audit.js"),
    }
    return _environment().get_template("comparison.html.jinja").render(context)


def quantities(comparison: Keyed, domain: Keyed) -> Table:
    """One row per quantity and model: the value, its difference from the first model that has it, and the spread."""
    rows = []
    for quantity in domain.quantities:
        held = quantity.held
        if held not in shown(domain.held):  # parts in nats are in results.json; here their shares say it
            continue
        show, digits, sign = (percent, 1, " %") if held.unit == SHARE else (nats, 3, "")
        scale = 100.0 if held.unit == SHARE else 1.0
        for i, model in enumerate(comparison.held.models):
            value = show(quantity.values[model]) if model in held.values else unknown(held.missing[model])
            difference = show(quantity.differences[model]) if model in held.differences else Cell(NONE, tone="muted")
            ends, deviation = _spread(held, scale, digits, sign) if i == 0 else ("", "")
            name = f"{held.name} ({held.unit})" if held.name in PLAIN else held.name
            shown_model = model.replace("-", NO_BREAK_HYPHEN)
            rows.append((words(name), words(shown_model), value, difference, words(ends), words(deviation)))
    baseline = comparison.held.models[0]
    columns = ("quantity", "model", "value", f"minus {baseline}", "smallest to largest", "standard deviation")
    note = (
        f"Differences are paired by document, against {baseline} or the first model that has the number. "
        "Shares are those of each model's own gap. Intervals cover documents, not training runs."
    )
    caption = f"{domain.held.name}: {domain.held.documents} documents, the same for all models"
    return Table(f"compared-{domain.held.name}", caption, columns, tuple(rows), note, (0, 1))


def _spread(quantity: Quantity, scale: float, digits: int, sign: str) -> tuple[str, str]:
    """Smallest to largest, and the standard deviation over models."""
    if quantity.smallest is None or quantity.largest is None or quantity.deviation is None:
        return "", ""
    low, high, deviation = (
        signed(scale * x, digits) for x in (quantity.smallest, quantity.largest, quantity.deviation)
    )
    return f"{low} to {high}{sign}", f"{deviation}{sign}"


def _plates(comparison: Comparison) -> list[Plate]:
    return [_plate(comparison, domain, i) for i, domain in enumerate(comparison.domains)]


def _plate(comparison: Comparison, domain: ComparedDomain, place: int) -> Plate:
    figure = spread(comparison, domain)
    alt = f"Losses and shares of {', '.join(comparison.models)} on {domain.name}, with 95 % intervals."
    return Plate(f"F14-spread-{place}", alt, figure)


def _renamed(result: AuditResult, name: str) -> AuditResult:
    """The result under the name that its model has in this comparison."""
    return dataclasses.replace(result, model=dataclasses.replace(result.model, name=name))


def _unlinked(table: Table) -> Table:
    """The table without the places in results.json, which are those of single audits."""
    rows = tuple(tuple(dataclasses.replace(cell, path="", home=0) for cell in row) for row in table.rows)
    return dataclasses.replace(table, rows=rows)


def _embedded(comparison: Comparison) -> Markup:
    text = json.dumps(encode_json(comparison), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return Markup(text.replace("<", r"\u003c"))
