"""The claims of many studies in one table: as text, JSON, Markdown and LaTeX. Reads results.json alone, no PyTorch.

The newest run of a claim at a scale counts, by the date in its ledger.json; older ones are listed.
"""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from looplab.records import Claim, ClaimResult, PartResult, Published, StudyResult, dump_json
from looplab.report.escape import MINUS, escape

RESULTS, LEDGER = "results.json", "ledger.json"
UNITS = {"share": (100.0, 1, " %"), "nats": (1.0, 3, ""), "factor": (1.0, 2, "")}
"""Unit -> scale, digits, sign."""
NO_WORD = "-"


class ClaimsError(ValueError):
    """A folder without results, or results that cannot be read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClaimRow:
    """One claim of one run of a study."""

    id: str
    scale: str
    word: str
    reason: str
    flags: tuple[str, ...]
    ours: str
    statement: str
    quote: str
    rule: str
    published: str
    contradicted_by: str
    study: str
    question: str
    predictions: str
    command: str
    folder: str
    written: str
    """When the newest arm was finished; empty where nothing says it."""
    tested: bool
    """False for what no scale can test."""

    @property
    def said(self) -> str:
        """The word with its scale."""
        return self.word if self.word == NO_WORD else f"{self.word} ({self.scale})"

    @property
    def because(self) -> str:
        """Why there is no answer, and flags."""
        return "; ".join(filter(None, (self.reason, *self.flags)))


@dataclasses.dataclass(frozen=True)
class Merged:
    """All claims, and the older runs of some."""

    rows: tuple[ClaimRow, ...]
    older: tuple[ClaimRow, ...]

    def counts(self) -> str:
        """`12 supported, 3 undecided, 1 not run: 16 claims of 2 studies`."""
        words = ["not run" if row.word == NO_WORD else row.word for row in self.rows]
        told = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
        studies = len({row.study for row in self.rows})
        of = f"{studies} {'study' if studies == 1 else 'studies'}"
        return f"{told}: {len(words)} {'claim' if len(words) == 1 else 'claims'} of {of}"


def merge(folders: Sequence[Path], scale: str | None = None) -> Merged:
    """The claims of all studies in and below some folders.

    Raises:
        ClaimsError: A folder holds no results of a study, or some that cannot be read.
    """
    newest: dict[tuple[str, str], ClaimRow] = {}
    older: list[ClaimRow] = []
    for folder in folders:
        paths = sorted({path for depth in ("", "*/", "*/*/") for path in folder.glob(f"{depth}{RESULTS}")})
        runs = [(path, result) for path in paths if (result := _read(path)) is not None]
        if not runs:
            raise ClaimsError(f"DIR must be a folder with results of studies. Got {folder}. Run `looplab study` first.")
        for path, result in runs:
            for row in _rows(path, path.parent.relative_to(folder).as_posix(), result):
                if scale not in (None, row.scale):
                    continue
                before = newest.get((row.id, row.scale))
                if before is None or row.written >= before.written:
                    newest[row.id, row.scale] = row
                    older += [] if before is None else [before]
                else:
                    older.append(row)
    return Merged(tuple(newest.values()), tuple(older))


def _read(path: Path) -> StudyResult | None:
    """The result of a study; None for the result of something else."""
    try:
        text = path.read_text()
        return StudyResult.from_json(text) if "study" in json.loads(text) else None
    except (ValueError, KeyError, TypeError) as error:
        raise ClaimsError(f"{path} cannot be read: {error} Run the study again.") from error


def _rows(path: Path, folder: str, result: StudyResult) -> Iterable[ClaimRow]:
    ledger = path.with_name(LEDGER)
    facts = json.loads(ledger.read_text()) if ledger.exists() else {}
    dates = [facts.get("predictions_written", ""), *(arm.get("finished", "") for arm in facts.get("arms", {}).values())]
    for each in result.claims:
        claim: Claim = each.claim
        yield ClaimRow(
            id=claim.id,
            scale=result.scale,
            word=each.word,
            reason=each.reason,
            flags=each.flags,
            ours=measured(each),
            statement=claim.statement,
            quote=claim.quote,
            rule=claim.rule,
            published=_published(claim.published),
            contradicted_by=_published(claim.contradicted_by),
            study=result.study,
            question=result.question,
            predictions=result.predictions,
            command=result.command,
            folder=folder,
            written=max(dates),
            tested=not claim.withheld,
        )


def measured(result: ClaimResult) -> str:
    """Every part's number with its interval."""
    if result.word == NO_WORD:
        return ""
    parts = [(part, number(part, result.claim.unit)) for part in result.parts if part.value is not None]
    if len(result.parts) == 1:
        return "; ".join(text for _, text in parts)
    return "; ".join(f"{part.label}: {text}" for part, text in parts)


def number(part: PartResult, unit: str) -> str:
    """`0.95 [0.93, 0.97]`, with its note."""
    scale, digits, sign = UNITS.get(unit, (1.0, 3, ""))
    assert part.value is not None
    text = f"{scale * part.value:g}" if unit.startswith("1 =") else f"{scale * part.value:.{digits}f}"
    if part.low is not None and part.high is not None and part.low < part.high:
        text += f" [{scale * part.low:.{digits}f}, {scale * part.high:.{digits}f}]"
    said = text.replace("-", MINUS) + sign
    return f"{said} ({part.note})" if part.note else said


def _published(found: Sequence[Published]) -> str:
    return "; ".join(f"{each.figure} ({each.source})" for each in found)


def as_text(merged: Merged) -> str:
    """For a terminal: a line of counts, then two or three lines per claim."""
    lines = [merged.counts(), ""]
    for row in merged.rows:
        lines.append(f"{row.id:<24}{row.said}" + (f"  {row.because}" if row.because else ""))
        lines.append(f"{'':<24}{row.statement} Rule: {row.rule}.")
        figures = [f"ours {row.ours}" if row.ours else "", f"published {row.published}" if row.published else ""]
        figures.append(f"contradicted by {row.contradicted_by}" if row.contradicted_by else "")
        if any(figures):
            lines.append(f"{'':<24}{' | '.join(filter(None, figures))}")
    if merged.older:
        lines += ["", "Older runs:"]
        lines += [f"  {row.id:<22}{row.said}  {row.folder}  {row.written}" for row in merged.older]
    return "\n".join(lines) + "\n"


def as_json(merged: Merged) -> str:
    """Everything, as JSON."""
    return dump_json({"counts": merged.counts(), "claims": merged.rows, "older": merged.older})


COLUMNS = ("claim", "word", "ours", "statement", "rule", "published", "contradicted by")


def as_markdown(merged: Merged) -> str:
    """A page: a table per study, what is not tested here at the end."""
    lines = ["# Claims", "", f"{merged.counts()}.", ""]
    lines += ["Output of `looplab claims --format md`; never edited. A word holds for its scale and recipe alone.", ""]
    for heads, rows in _groups([row for row in merged.rows if row.tested]):
        first = rows[0]
        lines += [f"## {heads}", "", first.question, "", f"    {first.command}", ""]
        lines += [f"Predictions, hashed before the first arm ran: `{first.predictions}`.", ""]
        lines += _markdown(COLUMNS, [_cells(row) for row in rows])
    untested = [row for row in merged.rows if not row.tested]
    if untested:
        lines += ["## Not tested here", ""]
        lines += _markdown(
            ("claim", "statement", "word"), [(r.id, _statement(r), f"{r.word} ({r.reason})") for r in untested]
        )
    if merged.older:
        lines += ["## Older runs", ""]
        lines += _markdown(("claim", "word", "folder"), [(row.id, row.said, row.folder) for row in merged.older])
    return "\n".join(lines).rstrip("\n") + "\n"


def as_tex(merged: Merged) -> str:
    r"""A `tabular` per study, for `\usepackage{booktabs}`."""
    found = [f"% {merged.counts()}. Needs \\usepackage{{booktabs}}.\n"]
    for heads, rows in _groups(merged.rows):
        lines = [" & ".join(map(escape, _cells(row))) + r" \\" for row in rows]
        found.append(
            "\n".join(
                [
                    r"\begin{table}",
                    r"\centering\small",
                    rf"\caption{{Claims of {escape(heads)}.}}",
                    rf"\begin{{tabular}}{{{'l' * len(COLUMNS)}}}",
                    r"\toprule",
                    " & ".join(COLUMNS) + r" \\",
                    r"\midrule",
                    *lines,
                    r"\bottomrule",
                    r"\end{tabular}",
                    r"\end{table}",
                    "",
                ]
            )
        )
    return "\n".join(found)


FORMATS = {"table": as_text, "json": as_json, "md": as_markdown, "tex": as_tex}


def _groups(rows: Iterable[ClaimRow]) -> list[tuple[str, list[ClaimRow]]]:
    """Rows of one run together."""
    found: dict[str, list[ClaimRow]] = {}
    for row in rows:
        found.setdefault(f"{row.study}, scale {row.scale}", []).append(row)
    return list(found.items())


def _cells(row: ClaimRow) -> tuple[str, ...]:
    said = f"{row.said}: {row.because}" if row.because else row.said
    return (row.id, said, row.ours, _statement(row), row.rule, row.published, row.contradicted_by)


def _statement(row: ClaimRow) -> str:
    return f"{row.statement} (“{row.quote}”)" if row.quote else row.statement


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(cell.replace('|', '&#124;') or ' ' for cell in row)} |" for row in rows]
    return [*lines, ""]
