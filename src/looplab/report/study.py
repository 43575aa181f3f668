"""The page of a study: claims with their words first, then the arms with links to their audits, then provenance.

It depends on the `StudyResult` alone, which is embedded in the page; every number knows its path in results.json.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from looplab.records import ClaimResult, Part, PartResult, Published, StudyResult, dump_json, write_atomic
from looplab.report.figures.base import pdf
from looplab.report.figures.study_lines import study_lines
from looplab.report.figures.study_points import study_points
from looplab.report.keyed import Keyed
from looplab.report.latex import render
from looplab.report.page import _asset, _environment
from looplab.report.plates import Plate
from looplab.report.tables import NONE, Cell, Table, signed, unknown, words

PAGE, TABLES, FIGURES = "report.html", "tables.tex", "figures"
UNITS = {"share": (100.0, 1, " %"), "nats": (1.0, 3, ""), "factor": (1.0, 2, "")}
"""Unit -> scale, digits, sign."""
POINTS = "Points with 95 % document intervals. Hatched: not identifiable for this arm."
LINES = "Means over training seeds; bands are the range of the seeds."
NOT_IDENTIFIABLE, NOT_MEASURED, NO_WORD = "not identifiable", "not measured", "-"


def write_study(result: StudyResult, folder: str | os.PathLike[str]) -> Path:
    """Writes report.html, tables.tex and figures/ and returns the path of the page; equal results give equal bytes."""
    folder = Path(folder)
    (folder / FIGURES).mkdir(parents=True, exist_ok=True)
    drawn = plates(result)
    for plate in drawn:
        write_atomic(folder / FIGURES / f"{plate.name}.svg", plate.svg)
        write_atomic(folder / FIGURES / f"{plate.name}.pdf", pdf(plate.figure))
    write_atomic(folder / TABLES, study_tex(result))
    write_atomic(folder / PAGE, study_page(result, drawn=drawn))
    return folder / PAGE


def plates(result: StudyResult) -> list[Plate]:
    """The figures that the study asks for."""
    return [
        Plate(
            plot.name,
            f"{plot.title}. {', '.join(plot.quantities)}, arm by arm.",
            (study_lines if plot.x else study_points)(result, plot),
        )
        for plot in result.plots
    ]


def study_page(result: StudyResult, *, drawn: Sequence[Plate] | None = None) -> str:
    """The HTML of a study.

    Args:
        drawn: The figures of `plates(result)`, if they exist already.
    """
    keyed = Keyed(result)
    context = {
        "result": result,
        "claims": claims_table(keyed),
        "untested": untested_table(keyed),
        "parts": parts_table(keyed),
        "arms": arms_table(keyed),
        "facts": facts_table(keyed),
        "matched": matched_table(keyed),
        "versions": Table("versions", "Versions", ("part", "version"), _pairs(keyed.versions), "", (0, 1)),
        "plates": plates(result) if drawn is None else drawn,
        "captions": [LINES if plot.x else POINTS for plot in result.plots],
        "record": _embedded(result),
        "css": _asset("audit.css") + "\n" + _asset("study.css"),
        "js": _asset("audit.js"),
    }
    return _environment().get_template("study.html.jinja").render(context)


def study_tex(result: StudyResult) -> str:
    """The text of tables.tex: claims, what they rest on, and arms."""
    keyed = Keyed(result)
    head = (
        f"% Study {result.study}, version {result.version}, scale {result.scale}, predictions {result.predictions}. "
        "Needs \\usepackage{booktabs}.\n"
    )
    return head + "\n".join(render(table) for table in (claims_table(keyed), parts_table(keyed), arms_table(keyed)))


def claims_table(result: Keyed) -> Table:
    """One row per claim that can be tested: what was said, the rule, the word, and what others published."""
    note = "Supported: every part is. Not supported: one part is not. Rules were fixed before the first arm ran."
    tested = [claim for claim in result.claims if not claim.held.claim.withheld]
    return _claims("claims", f"Claims of {result.held.study}", tested, note)


def untested_table(result: Keyed) -> Table:
    """Claims that no scale offered here can test."""
    untested = [claim for claim in result.claims if claim.held.claim.withheld]
    return _claims("untested", "Not tested here", untested, "A word about our scale is no evidence against a source.")


def _claims(name: str, caption: str, claims: Sequence[Keyed], note: str) -> Table:
    rows = []
    for claim in claims:
        held: ClaimResult = claim.held
        said = f"{held.claim.statement} (“{held.claim.quote}”)" if held.claim.quote else held.claim.statement
        word = f"{held.word} ({held.reason})" if held.reason and held.word.startswith("not ident") else held.word
        no_answer = held.word.startswith("not ident") or held.word == NO_WORD
        cell = Cell(", ".join((word, *held.flags)), claim.word.path, tone="unknown" if no_answer else "")
        rows.append(
            (
                words(claim.claim.id), words(said), words(held.claim.rule), cell,
                words("" if word != held.word else held.reason), words(_published(held.claim.published)),
                words(_published(held.claim.contradicted_by)),
            )
        )  # fmt: skip
    columns = ("claim", "statement", "rule", "word", "why there is no answer", "published", "contradicted by")
    return Table(name, caption, columns, tuple(rows), note, tuple(range(len(columns)))).trimmed()


def parts_table(result: Keyed) -> Table:
    """The numbers that the words rest on."""
    rows = []
    for claim in result.claims:
        for part, declared in zip(claim.parts, claim.held.claim.parts, strict=True):
            held: PartResult = part.held
            unit = claim.held.claim.unit
            number = unknown(_without(held.word)) if held.value is None else _number(part, unit)
            seeds = ", ".join(_text(value, unit) for value in held.seeds)
            rows.append(
                (
                    words(claim.claim.id), words(part.label), words(_asked(declared)), words(declared.decides),
                    number, words(f"{100 * held.level:g} %"), words(seeds), words(held.note), words(part.word),
                )
            )  # fmt: skip
    columns = ("claim", "part", "quantity", "rule", "value", "level", "seeds", "beside", "word")
    note = "Values are over seeds where there are several; an equivalence shows its 90 % interval."
    return Table("parts", "What the words rest on", columns, tuple(rows), note, (0, 1, 2, 3, 6, 7, 8)).trimmed()


def arms_table(result: Keyed) -> Table:
    """One row per arm and seed: its quantities with the audit's words."""
    rows = []
    for arm in result.arms:
        held = arm.held
        cells = [_quantity(result, held.name, held.seed, quantity) for quantity in result.held.columns]
        rows.append((words(held.label), words(held.title), *cells))
    note = "Brackets: 95 % intervals over documents or items."
    if any(row.unit == "share" for row in result.held.rows):
        note = f"Shares are of each arm's own gap: read them beside the nats. {note}"
    columns = ("arm", "what it is", *result.held.columns)
    return Table("arms", "Arms", columns, tuple(rows), note, tuple(range(len(columns))))


def facts_table(result: Keyed) -> Table:
    """Hashes and counts of every arm."""
    names = list(dict.fromkeys(name for arm in result.held.arms for name in arm.facts))
    rows = [
        (
            words(arm.held.label),
            *(words(arm.facts[n], "code") if n in arm.held.facts else Cell(NONE, tone="muted") for n in names),
        )
        for arm in result.arms
    ]
    return Table("facts", "Hashes and counts", ("arm", *names), tuple(rows), "", tuple(range(len(names) + 1)))


def matched_table(result: Keyed) -> Table:
    """What the arms had to share, and whether they do."""
    rows = [
        (words(match.name), words("equal" if match.held.equal else "NOT EQUAL", "" if match.held.equal else "warning"))
        for match in result.matched
    ]
    note = "Per training seed; init and data_order are hashes of the initial weights and of all batches in order."
    return Table("matched", "Held equal between the arms", ("what", "arms of one seed"), tuple(rows), note, (0, 1))


def _quantity(result: Keyed, arm: str, seed: int | None, quantity: str) -> Cell:
    found = [row for row in result.rows if (row.held.arm, row.held.seed, row.held.quantity) == (arm, seed, quantity)]
    if not found:
        return Cell(NONE, tone="muted")
    row = found[0]
    if row.held.reason:
        measured = not row.held.reason.startswith(NOT_MEASURED)
        return unknown(f"{NOT_IDENTIFIABLE}: {row.held.reason}" if measured else row.held.reason)
    if row.held.value is None:
        return words(row.word)
    cell = _number(row, row.held.unit)
    return Cell(f"{cell.text} {row.held.word}".strip(), cell.path, order=cell.order)


def _number(part: Keyed, unit: str) -> Cell:
    held = part.held
    text = _text(held.value, unit)
    if held.low is not None and held.high is not None and held.low < held.high:
        scale, digits, _ = UNITS.get(unit, (1.0, 3, ""))
        text += f" [{signed(scale * held.low, digits)}, {signed(scale * held.high, digits)}]"
    return Cell(text, part.path, order=held.value)


def _text(value: float, unit: str) -> str:
    if unit.startswith("1 ="):
        return f"{value:g}"
    scale, digits, sign = UNITS.get(unit, (1.0, 3, ""))
    return f"{signed(scale * value, digits)}{sign}"


def _asked(part: Part) -> str:
    """The quantities of all cells."""
    return ", ".join(dict.fromkeys(quantity for _, quantity in part.cells))


def _without(word: str) -> str:
    """What stands in the place of a number."""
    return NOT_IDENTIFIABLE if word.startswith("not ident") else NOT_MEASURED if word == NO_WORD else NONE


def _published(found: Sequence[Published]) -> str:
    return "; ".join(f"{each.figure} ({each.source})" for each in found)


def _pairs(mapping: Keyed) -> tuple[tuple[Cell, ...], ...]:
    return tuple((words(name), words(mapping[name])) for name in mapping.held)


def _embedded(result: StudyResult) -> Markup:
    text = json.dumps(json.loads(dump_json(result)), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return Markup(text.replace("<", r"\u003c"))
