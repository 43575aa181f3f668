"""The page of a retrofit: which layers stand where, and what every run of layers does to the stream."""

import json
import os
from pathlib import Path

from markupsafe import Markup

from looplab.interop.retrofit import Record
from looplab.records import dump_json, write_atomic
from looplab.report.figures.base import pdf
from looplab.report.figures.layer_distance import finding, layer_distance
from looplab.report.keyed import Keyed
from looplab.report.latex import render
from looplab.report.page import _asset, _environment
from looplab.report.plates import Plate
from looplab.report.tables import Cell, Table, amount, count, words

PAGE, TABLES, FIGURES, MAP = "report.html", "tables.tex", "figures", "layer-distance"


def write_retrofit(record: Record, folder: str | os.PathLike[str]) -> Path:
    """Writes report.html, tables.tex and figures/ and returns the path of the page; equal records give equal bytes."""
    folder = Path(folder)
    plate = distance_plate(record)
    if plate is not None:
        (folder / FIGURES).mkdir(parents=True, exist_ok=True)
        write_atomic(folder / FIGURES / f"{MAP}.svg", plate.svg)
        write_atomic(folder / FIGURES / f"{MAP}.pdf", pdf(plate.figure))
    tables = [cut_table(record), *distance_tables(record), parameters_table(record)]
    head = f"% Retrofit of {record.source}. Needs \\usepackage{{booktabs}}.\n"
    write_atomic(folder / TABLES, head + "\n".join(render(table) for table in tables))
    write_atomic(folder / PAGE, retrofit_page(record, plate))
    return folder / PAGE


def retrofit_page(record: Record, plate: Plate | None) -> str:
    """The HTML; `plate` is `distance_plate(record)`."""
    runs, single = distance_tables(record) or (None, None)
    context = {
        "record": record,
        "sentence": sentence(record),
        "cut": cut_table(record),
        "plate": plate,
        "runs": runs,
        "single": single,
        "parameters": parameters_table(record),
        "hashes": hashes_table(record),
        "embedded": _embedded(record),
        "css": _asset("audit.css"),
        "js": _asset("audit.js"),
    }
    return _environment().get_template("retrofit.html.jinja").render(context)


def looped(record: Record) -> tuple[int, int]:
    """First layer and length of the run of the source that is looped."""
    layers = [layer for group in record.cut.core for layer in group]
    return min(layers), len(layers)


def distance_plate(record: Record) -> Plate | None:
    """The heat map; None where nothing was measured."""
    if record.distance is None:
        return None
    start, length = looped(record)
    alt = f"Angular distance of every run of layers. {finding(record.distance, start, length)}."
    return Plate(MAP, alt, layer_distance(record.distance, start, length))


def sentence(record: Record) -> str:
    """What was made, in a line."""
    cut = record.cut
    shape = f"{len(cut.prelude)}-{len(cut.core)}-{len(cut.coda)}"
    made = "" if cut.rounds == 1 else f", each core layer the mean of {cut.rounds}"
    dropped = f"layers dropped: {spans(cut.dropped)}" if cut.dropped else "no layer dropped"
    return f"{cut.layers} layers of {record.family} as {shape}{made}; {dropped}."


def spans(layers: tuple[int, ...]) -> str:
    """`0-3, 8` of (0, 1, 2, 3, 8); a dash for none."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs) or "none"


def cut_table(record: Record) -> Table:
    """Layers of the source by what became of them."""
    cut = record.cut
    core = tuple(layer for group in cut.core for layer in group)
    rows = [
        (words(name), words(spans(layers)), Cell(str(len(layers)), order=float(len(layers))))
        for name, layers in (("prelude", cut.prelude), ("core", core), ("coda", cut.coda), ("dropped", cut.dropped))
    ]
    return Table("cut", "Layers of the source", ("place", "layers", "count"), tuple(rows), "", (0, 1))


def distance_tables(record: Record) -> tuple[Table, ...]:
    """Runs of the looped length, then single layers; nothing where nothing was measured."""
    if record.distance is None:
        return ()
    start, length = looped(record)
    note = "Angular distance: arccos(cos) / pi. Block influence: 1 - cos. Means over tokens."
    runs = _runs(record, length, f"Runs of {length} layers", f"{note} Looped: layers {start}-{start + length - 1}.")
    return runs, _runs(record, 1, "Single layers", note)


def _runs(record: Record, length: int, caption: str, note: str) -> Table:
    keyed = Keyed(record).distance
    rows = []
    for first in range(record.cut.layers - length + 1):
        run = f"{first}-{first + length - 1}" if length > 1 else str(first)
        cells = (amount(keyed.angular[length - 1][first], 4), amount(keyed.influence[length - 1][first], 4))
        rows.append((words(run), *cells))
    return Table(f"runs-{length}", caption, ("layers", "angular distance", "block influence"), tuple(rows), note)


def parameters_table(record: Record) -> Table:
    """Parameters by group, and of the source."""
    keyed = Keyed(record)
    rows = [(words(name), count(keyed.groups[name])) for name in record.groups]
    rows += [(words("total"), count(keyed.parameters)), (words("source"), count(keyed.source_parameters))]
    return Table("parameters", "Parameters, stored once", ("group", "count"), tuple(rows))


def hashes_table(record: Record) -> Table:
    """SHA-256 of the source's weight files."""
    rows = [(words(name), words(digest, "code")) for name, digest in record.sha256.items()]
    return Table("hashes", "Weight files of the source", ("file", "SHA-256"), tuple(rows), "", (0, 1))


def _embedded(record: Record) -> Markup:
    text = json.dumps(json.loads(dump_json(record)), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return Markup(text.replace("<", r"\u003c"))
