"""The decomposition on parts of the documents and of their positions, as a table."""

from looplab.report.keyed import Keyed
from looplab.report.measured import phrase
from looplab.report.tables import NONE, Cell, Table, nats, unknown, words

PARTS = ("application", "distinct", "composition")


def strata(domain: Keyed, probes: tuple[str, ...]) -> Table:
    """Gap, parts and net probe gains of every stratum, in nats."""
    rows = tuple(
        (
            words(found.by),
            words(found.label).over(f"{found.held.documents:,} documents, {found.held.tokens:,} tokens"),
            nats(found.gap),
            *(_part(domain, found, name) for name in PARTS),
            *(nats(found.gains[p]) if p in found.held.gains else Cell(NONE, tone="muted") for p in probes),
        )
        for found in domain.strata
    )
    columns = ("by", "stratum", "gap", *PARTS, *(f"net gain, {probe}" for probe in probes))
    note = (
        "A description: no stratum carries a verdict. Raw readout; every refit keeps the fit of the whole domain. "
        "loss: thirds of the documents by their loss at full depth."
    )
    return Table("strata", f"Strata of {domain.held.name}, nats", columns, rows, note, (0, 1))


def _part(domain: Keyed, stratum: Keyed, name: str) -> Cell:
    if stratum.held.parts.get(name) is not None:
        return nats(stratum.parts[name])
    raw = domain.held.decompositions[0].parts if domain.held.decompositions else ()
    return unknown(phrase(next((part.reason for part in raw if part.name == name and part.reason), "")))
