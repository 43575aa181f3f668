"""Searches what an audit wrote for numbers where there must be none.

*.json    a part, or anything whose reason is "not identifiable", holds no number beside k and the margin; nothing keyed
          by the name of a part holds one, and no sentence tells one
*.html    no clause that is about a part, or says "not identifiable", has a figure; in tables, no row that is about
          a part or an unidentifiable contrast, and no cell in the column of a part
*.md      the same
*.tex     the same for its tables

A figure is a decimal number or a percentage; names such as `repeat(2)` and plans such as `[0.0 0.1]` are not.
"""

import html
import json
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

PARTS = ("application", "distinct", "composition")
PHRASE = "not identifiable"
_BESIDE = {"k", "margin"}
_ABOUT = re.compile(r"(share of )?(application|distinct|composition)\b|Running more applications|later blocks")
_FIGURE = re.compile(r"\d\.\d|\d\s*\\?%")
_NAMES = re.compile(r"\[[\d. ]+\]")
_HIDDEN = re.compile(r"<(style|script)\b.*?</\1>", re.DOTALL)
_TABLE = re.compile(r"<table\b.*?</table>", re.DOTALL)
_ROW = re.compile(r"<tr\b.*?</tr>", re.DOTALL)
_CELL = re.compile(r"<t[hd]\b.*?</t[hd]>", re.DOTALL)
_RECORD_END = re.compile(r"</(li|p|h\d|caption|figcaption|div|text)>|<br>")
_TAG = re.compile(r"<!--.*?-->|<[^>]+>", re.DOTALL)


def printed_numbers(folder: Path) -> dict[str, list[str]]:
    """File of `folder` -> every number of an unidentifiable quantity in it, as the words around it. Only text files."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".json":
            found[path.name] = list(_in_json(json.loads(path.read_text()), ""))
        elif path.suffix in _RECORDS:
            found[path.name] = [record for record in _RECORDS[path.suffix](path.read_text()) if _tells(record)]
    return found


def _in_json(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, list):
        for i, entry in enumerate(value):
            yield from _in_json(entry, f"{path}[{i}]")
    if isinstance(value, str):
        yield from (f"{path}: {clause}" for clause in _clauses(value) if _tells(clause))
    if not isinstance(value, dict):
        return
    unidentified = str(value.get("reason") or "").startswith(PHRASE) or value.get("name") in PARTS
    for key, entry in value.items():
        place = f"{path}.{key}".lstrip(".")
        suspect = unidentified and key not in _BESIDE
        if suspect or (key in PARTS and not isinstance(entry, int)):
            yield from (f"{place}{inside}" for inside in _numbers(entry))
        else:
            yield from _in_json(entry, place)


def _numbers(value: Any) -> Iterator[str]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield f" = {value}"
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from (f".{key}{inside}" for inside in _numbers(entry))
    elif isinstance(value, list):
        for i, entry in enumerate(value):
            yield from (f"[{i}]{inside}" for inside in _numbers(entry))


def _tells(record: str) -> bool:
    """Whether a record is about what has no number, and has one."""
    about = PHRASE in record or _ABOUT.match(record) is not None
    return about and _FIGURE.search(_NAMES.sub("", record)) is not None


def _page_records(text: str) -> Iterator[str]:
    visible = _HIDDEN.sub("", text)
    for table in _TABLE.findall(visible):
        yield from _row_records([[_plain(cell) for cell in _CELL.findall(row)] for row in _ROW.findall(table)])
    for line in _RECORD_END.sub("\n", " ".join(_TABLE.sub("\n", visible).split())).splitlines():
        yield from _clauses(_plain(line))


def _table_records(text: str) -> Iterator[str]:
    for table in text.split(r"\toprule"):
        yield from _row_records([line.removesuffix(r"\\").split(" & ") for line in table.splitlines() if " & " in line])


def _card_records(text: str) -> Iterator[str]:
    for is_table, lines in groupby(text.splitlines(), key=lambda line: line.startswith("|")):
        if is_table:
            yield from _row_records([[cell.strip() for cell in line.strip("|").split("|")] for line in lines])
        else:
            yield from (clause for line in lines for clause in _clauses(line.removeprefix("- ")))


_RECORDS = {".html": _page_records, ".md": _card_records, ".tex": _table_records}


def _row_records(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A row about a part or a contrast is one record; other rows are one for every cell, under its column's name."""
    head = rows[0] if rows else ()
    for cells in rows:
        row = " ".join(" ".join(cells).split())
        if _ABOUT.match(row) or " - " in cells[0]:
            yield row
        else:
            yield from (
                f"{name if name in PARTS else ''} {cell}".strip() for name, cell in zip(head, cells, strict=False)
            )


def _plain(text: str) -> str:
    return " ".join(html.unescape(_TAG.sub(" ", text)).split())


def _clauses(line: str) -> Iterator[str]:
    yield from re.split(r"; ?|\. ", line)
