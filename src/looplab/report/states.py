"""Tables of what the vectors do: geometry against full depth, and the update of every application."""

from looplab.report.keyed import Keyed
from looplab.report.tables import Cell, Table, amount, count, tiny, words

GEOMETRY = (
    ("norm, of full depth's", "norm_ratio"), ("cosine", "cosine"), ("CKA", "cka"), ("effective rank", "effective_rank"),
    ("rank, of full depth's", "rank_ratio"), ("anisotropy", "anisotropy"), ("Fréchet", "frechet"),
)  # fmt: skip
"""Column and field of Geometry."""


def geometry(domain: Keyed) -> Table:
    """Every schedule's vectors against those of the full plan."""
    rows = tuple(
        (
            words(row.name),
            words(found.site),
            *(amount(getattr(found, field)) for _, field in GEOMETRY),
            count(found.tokens),
            count(found.zero_rows),
        )
        for row in domain.schedules
        for found in row.geometry
    )
    columns = ("schedule", "site", *(name for name, _ in GEOMETRY), "tokens", "zero rows")
    note = (
        "Descriptions of one sample of tokens, the same for all schedules, without intervals. hidden: what the head "
        "reads; state: the component that the readout reads. Zero rows are left out of the cosines."
    )
    return Table("geometry", f"Geometry against full depth on {domain.held.name}", columns, rows, note, (0, 1))


def updates(domain: Keyed) -> Table:
    """What each application does to each state component."""
    rows = []
    for row in domain.schedules:
        for found in row.updates:
            step = f"{found.held.block}.{found.held.iteration}"
            numbers = (found.low, found.high, found.state_cosine, found.update_cosine)
            head = (words(row.name), count(found.application), words(step, "code"), words(found.component))
            rows.append((*head, _relative(found.relative), *(amount(number) for number in numbers)))
    columns = (
        "schedule", "application", "block.iteration", "component", "relative update", "lower quartile",
        "upper quartile", "cosine of states", "cosine with the update before",
    )  # fmt: skip
    note = (
        "Applications count from 0. Means over documents of means over tokens; quartiles are over documents. "
        "A dash: from a zero state."
    )
    return Table("updates", f"Updates on {domain.held.name}", columns, tuple(rows), note, (0, 2, 3))


def _relative(part: Keyed) -> Cell:
    """Three digits, or scientific form where they would show nothing."""
    return tiny(part) if part.held is not None and 0 < part.held < 0.001 else amount(part)
