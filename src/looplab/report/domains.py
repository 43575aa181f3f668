"""What agrees and what differs between domains: a sentence each, and the words and shares side by side."""

from looplab.audit.result import RAW
from looplab.report.keyed import Keyed
from looplab.report.measured import part_share
from looplab.report.tables import NONE, Cell, Table, percent, short, unknown, words

EVERYWHERE = "in every domain"


def sentences(result: Keyed) -> list[Cell]:
    """Where the raw parts and the refits agree, then where they differ, with the words; nothing for one domain."""
    found = [a for a in result.agreements if a.held.probe == RAW or a.held.part == "readout"]
    same = [a for a in found if a.held.word == EVERYWHERE]
    apart = [a for a in found if a.held.word != EVERYWHERE]
    lines = []
    if same:
        lines.append(words("The same in every domain: " + ", ".join(f"{_name(a)} ({_word(a)})" for a in same) + "."))
    for each in apart:
        told = "; ".join(f"{short(word)} on {domain}" for domain, word in _ordered(result, each))
        lines.append(words(f"Differs by domain: {_name(each)} ({told})."))
    return lines


def _name(agreement: Keyed) -> str:
    return f"{agreement.held.probe} refit" if agreement.held.part == "readout" else agreement.held.part


def _word(agreement: Keyed) -> str:
    return short(next(iter(sorted(agreement.held.words.values()))))


def _ordered(result: Keyed, agreement: Keyed) -> list[tuple[str, str]]:
    names = [domain.held.name for domain in result.domains]
    return [(name, agreement.held.words[name]) for name in names if name in agreement.held.words]


def agreements(result: Keyed) -> Table:
    """Share and word of every part and refit on every domain, with the differences of the shares."""
    names = [domain.held.name for domain in result.domains]
    pairs = list(dict.fromkeys(pair for a in result.held.agreements for pair in sorted(a.differences)))
    rows = tuple(
        (
            words(found.part),
            words(found.probe),
            words(found.word),
            *(_told(domain, found) for domain in result.domains),
            *(
                percent(found.differences[p]) if p in found.held.differences else Cell(NONE, tone="muted")
                for p in pairs
            ),
        )
        for found in result.agreements
    )
    columns = ("part", "readout", "same word?", *names, *(f"{pair} (share)" for pair in pairs))
    note = (
        "Every domain has its own documents, fits and decomposition; nothing is pooled. A difference of shares is "
        "shown where both can be told; domains are independent, so its interval combines theirs."
    )
    return Table("agreements", "Every part on every domain", columns, rows, note, (0, 1, 2))


def _told(domain: Keyed, agreement: Keyed) -> Cell:
    """The share on one domain with its word below."""
    part, probe = agreement.held.part, agreement.held.probe
    word = agreement.held.words.get(domain.held.name)
    if word is None:
        return unknown("not measured")
    if part == "readout":
        (gain,) = domain.gains.where(probe=probe, k=1)
        return percent(gain.share).over(word)
    (decomposition,) = domain.decompositions.where(probe=probe)
    (found,) = decomposition.parts.where(name=part)
    return part_share(found).over(short(word))
