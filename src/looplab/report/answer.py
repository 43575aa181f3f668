"""The answer band: what a reader must know in ten seconds, as data for the page."""

import dataclasses

from looplab.records import Level
from looplab.report.figures.waterfall import headline_gain, whole_gap
from looplab.report.keyed import Keyed
from looplab.report.tables import NBSP, Cell, nats, percent, words

QUESTIONS = {
    "application": "more applications",
    "distinct": "distinct iterations",
    "composition": "later blocks",
}
"""Part of the gap -> what it stands for, in words."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """One of the four figures: a name, the number, its interval in small type, and the verdict word."""

    name: str
    detail: str
    number: Cell
    interval: Cell
    word: str
    tone: str = ""


def tiles(domain: Keyed) -> list[Tile]:
    """Application, distinct, composition and the best refitted readout; for a dense model the gap and the readout."""
    found = (
        [_part_tile(part) for part in domain.decompositions[0].parts] if domain.decompositions else _gap_tile(domain)
    )
    best = headline_gain(domain.held)
    if best is not None:
        gain = domain.gains[domain.held.gains.index(best)]
        word = best.word + (", by flattening a wrong answer" if best.flattening else "")
        number, interval = _numbers(gain.share if best.share else gain.net, share=best.share is not None)
        found.append(Tile(f"{best.probe} refit", "net of full depth", number, interval, word))
    return found


def _part_tile(part: Keyed) -> Tile:
    name, detail = part.held.name, QUESTIONS[part.held.name]
    if part.held.bitwise_equal:
        return Tile(name, detail, Cell("0", part.bitwise_equal.path, part.home), Cell("bitwise equal"), part.held.word)
    if part.held.reason or part.held.nats is None:
        return Tile(name, detail, Cell(""), Cell(""), part.held.word, "unknown")
    number, interval = _numbers(part.share if part.held.share else part.nats, share=part.held.share is not None)
    return Tile(name, detail, number, interval, part.held.word)


def _gap_tile(domain: Keyed) -> list[Tile]:
    gap = whole_gap(domain.held)
    if gap is None:
        return []
    gain = domain.gains.where(schedule=gap[0])[0]
    number, interval = _numbers(gain.gap, share=False)
    return [Tile("gap", f"{gap[0]} above full depth", number, interval, "")]


def _numbers(estimate: Keyed, *, share: bool) -> tuple[Cell, Cell]:
    whole = percent(estimate) if share else nats(estimate)
    value, interval = whole.text.split(" [")
    unit = "" if share else f"{NBSP}nats"
    return dataclasses.replace(whole, text=value + unit), dataclasses.replace(whole, text="[" + interval)


def unidentified(domain: Keyed) -> list[str]:
    """What this model cannot tell apart, one line per reason."""
    reasons: dict[str, list[str]] = {}
    for part in domain.held.decompositions[0].parts if domain.held.decompositions else ():
        if part.reason:
            reasons.setdefault(part.reason, []).append(part.name)
    for contrast in domain.held.contrasts:
        if contrast.reason and contrast.probe == "raw" and contrast.plus != contrast.minus:
            reasons.setdefault(contrast.reason, []).append(contrast.name)
    return [f"{_names(names)}: {reason}" for reason, names in reasons.items()]


def _names(names: list[str]) -> str:
    """At most four names, then how many more."""
    shown = list(dict.fromkeys(names))
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")


def warnings(result: Keyed) -> list[Cell]:
    """Messages of the findings that a reader must not miss, failures first."""
    found = [finding for level in (Level.FAILURE, Level.WARNING) for finding in result.findings.where(level=level)]
    return [words(finding.message) for finding in found]
