"""Tables of the orders in which a gap can be taken apart: two structural ones, the four-way view, the factorial.

Structure, count, index and readout overlap, so a term is worth something else in each order; none is the true one.
"""

from looplab.audit.result import ModelCard
from looplab.report.figures.factorial import corners
from looplab.report.keyed import Keyed
from looplab.report.measured import phrase
from looplab.report.tables import NONE, Cell, Table, nats, span, unknown, words

PARTS = ("application", "distinct", "composition")
SATURATION = (
    "Read before quoting: “application” may come almost wholly from 1 to kmid applications and then saturate; "
    "after kmid it may be nothing."
)
"""The original's own warning about its first term."""


def structural(domain: Keyed) -> Table:
    """application, distinct and composition by count first and by index first, under every readout."""
    rows = tuple(
        (words(found.probe), words(order.name), *(_term(domain, order.terms, name) for name in PARTS))
        for found in domain.factorials
        for order in found.orders
    )
    return Table(
        "orders",
        f"Both orders of count and index on {domain.held.name}, nats",
        ("readout", "order", *PARTS),
        rows,
        "Each row adds up to the gap. Count first is the decomposition above.",
        (0, 1),
    )


def four_way(domain: Keyed) -> Table:
    """The gap to the refitted full depth by every order, their mean and their range."""
    merged = any("structure" in found.mean for found in domain.held.four_way)
    terms = ("structure", "calibration") if merged else (*PARTS, "calibration")
    rows = []
    for found in domain.four_way:
        head, whole = words(found.probe), nats(found.whole)
        orders = [(words(path.name), path.terms) for path in found.paths] + [(words("mean of the orders"), found.mean)]
        rows += [(head, name, *(_term(domain, values, term) for term in terms), whole) for name, values in orders]
        ranges = (span(found.spread[term]) if term in found.held.spread else Cell(NONE, tone="muted") for term in terms)
        rows.append((head, words("range over the orders"), *ranges, Cell("")))
    note = (
        "Each order adds up to the whole. Structure and readout overlap, so no order is the true one: read the range."
    )
    if merged:
        note += " structure: application, distinct and composition together, which this audit cannot tell apart."
    return Table(
        "four-way",
        f"Four-way view on {domain.held.name}, nats: prefix(1) with the raw readout to full depth with a refitted one",
        ("readout", "order", *terms, "whole"),
        tuple(rows),
        note,
        (0, 1),
    )


def _term(domain: Keyed, terms: Keyed, name: str) -> Cell:
    """A term in nats, or the words that stand for one that this model cannot give."""
    if name in terms.held:
        return nats(terms[name])
    raw = domain.held.decompositions[0].parts if domain.held.decompositions else ()
    return unknown(phrase(next((part.reason for part in raw if part.name == name and part.reason), "")))


def cells(domain: Keyed, model: ModelCard) -> Table:
    """The four losses of the factorial under every readout."""
    kmid, units = model.kmid, model.units
    rows = []
    for found in domain.factorials:
        for indices, names in zip(("one index", f"{kmid} indices"), corners(found.held, model), strict=True):
            rows.append((words(found.probe), words(indices), *(nats(found.cells[name]) for name in names)))
    columns = ("readout", "indices", f"{kmid} applications", f"{units} applications")
    return Table("factorial-cells", f"Losses of the factorial on {domain.held.name}", columns, tuple(rows), "", (0, 1))


def effects(domain: Keyed) -> Table:
    """Effects of count and index, interaction, Shapley values and further orders; a column per readout."""
    squares = list(domain.factorials)
    rows = tuple(
        (words(first.name), words(first.formula), *(_effect(found.effects[i]) for found in squares))
        for i, first in enumerate(squares[0].effects if squares else ())
    )
    note = f"Nats; positive: the first schedule is worse. {SATURATION}"
    columns = ("effect", "losses", *(found.held.probe for found in squares))
    return Table("factorial", f"Count and index on the first block, {domain.held.name}", columns, rows, note, (0, 1))


def _effect(effect: Keyed) -> Cell:
    """The effect, and below it whether it is equivalent to zero."""
    if effect.held.bitwise_equal:
        return Cell("0 (bitwise equal)", effect.bitwise_equal.path, effect.home, 0.0)
    return nats(effect.nats).over("equivalent to zero" if effect.held.equivalent else "")
