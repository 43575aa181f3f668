"""Tables as data, drawn alike on the page and in LaTeX: a cell is a text, and where its number stands in results.json.

Shares are rounded to 0.1 %, losses and effects to 0.001 nats. What has no number is words.
"""

import dataclasses
import re

from looplab.report.escape import MINUS, NBSP, NONE
from looplab.report.keyed import Keyed


@dataclasses.dataclass(frozen=True)
class Cell:
    """One entry. `order` sorts the column; `tone` is "", "muted", "unknown", "warning" or "code"; `under` is small."""

    text: str
    path: str = ""
    home: int = 0
    order: float | None = None
    tone: str = ""
    under: str = ""

    def over(self, text: str) -> "Cell":
        """The same entry with `text` in small type below it, unless that only says it again."""
        return self if text == self.text else dataclasses.replace(self, under=unbroken(text))


@dataclasses.dataclass(frozen=True)
class Table:
    """A caption, column heads, rows, and a note on how to read it. `text_columns` are set left, the others right."""

    name: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    text_columns: tuple[int, ...] = (0,)

    def trimmed(self) -> "Table":
        """Without the columns that say nothing in any row."""
        kept = [i for i in range(len(self.columns)) if any(row[i].text not in ("", NONE) for row in self.rows)]
        return dataclasses.replace(
            self,
            columns=tuple(self.columns[i] for i in kept),
            rows=tuple(tuple(row[i] for i in kept) for row in self.rows),
            text_columns=tuple(new for new, old in enumerate(kept) if old in self.text_columns),
        )


def signed(value: float, digits: int) -> str:
    """A rounded number with a real minus sign; never a negative zero."""
    text = f"{value:.{digits}f}"
    if float(text) == 0:
        text = text.lstrip("-")
    return text.replace("-", MINUS)


def unbroken(text: str) -> str:
    """The text with every number held to its unit, so that no line ends between them."""
    return re.sub(r"(?<=\d) (?=(?:%|nats\b))", NBSP, text)


def short(word: str) -> str:
    """A verdict word without what stands in its brackets."""
    return re.sub(r" \([^)]*\)", "", word)


def words(part: Keyed | str, tone: str = "") -> Cell:
    """Text, as it is or as it stands in the result."""
    if isinstance(part, str):
        return Cell(unbroken(part), tone=tone)
    return Cell(unbroken(str(part.held)), part.path, part.home, tone=tone)


def unknown(text: str) -> Cell:
    """A cell whose number this model cannot give."""
    return Cell(text, tone="unknown")


def amount(part: Keyed, digits: int = 3) -> Cell:
    """A single number; a dash for None."""
    if part.held is None:
        return Cell(NONE, tone="muted")
    return Cell(signed(part.held, digits), part.path, part.home, float(part.held))


def span(ends: Keyed) -> Cell:
    """`0.350 .. 0.362` of a pair; a dash for None."""
    if ends.held is None:
        return Cell(NONE, tone="muted")
    low, high = ends.held
    return Cell(f"{signed(low, 3)} .. {signed(high, 3)}", ends.path, ends.home, low)


def yes_no(part: Keyed) -> Cell:
    """`yes` or `no`; blank for None."""
    return Cell("") if part.held is None else Cell("yes" if part.held else "no", part.path, part.home)


def count(part: Keyed) -> Cell:
    """A whole number with thousands apart; a dash for None."""
    if part.held is None:
        return Cell(NONE, tone="muted")
    return Cell(f"{part.held:,.0f}", part.path, part.home, float(part.held))


def percent_of(part: Keyed) -> Cell:
    """A fraction as `1.2 %`; a dash for None."""
    if part.held is None:
        return Cell(NONE, tone="muted")
    return Cell(f"{signed(100 * part.held, 1)}{NBSP}%", part.path, part.home, part.held)


def tiny(part: Keyed) -> Cell:
    """A number of any size in scientific form; a dash for None."""
    if part.held is None:
        return Cell(NONE, tone="muted")
    if part.held == 0:
        return Cell("0", part.path, part.home, 0.0)
    return Cell(f"{part.held:.1e}".replace("-", MINUS), part.path, part.home, float(part.held))


def nats(part: Keyed) -> Cell:
    """`0.350 [0.342, 0.358]` of an Estimate; a dash for None."""
    return _interval(part, 1.0, 3, "")


def percent(part: Keyed) -> Cell:
    """`35.1 % [34.2, 36.0]` of an Estimate; a dash for None."""
    return _interval(part, 100.0, 1, f"{NBSP}%")


def _interval(part: Keyed, scale: float, digits: int, unit: str) -> Cell:
    if part.held is None:
        return Cell(NONE, tone="muted")
    value, low, high = (signed(scale * x, digits) for x in (part.held.value, part.held.low, part.held.high))
    return Cell(f"{value}{unit} [{low}, {high}]", part.path, part.home, part.held.value)
