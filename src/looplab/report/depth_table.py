"""The table "how many loops should I pay for?": every further step of depth, what it gains and what it costs."""

from looplab.audit.depth_value import MOST, UNDECIDED
from looplab.report.figures.base import in_order
from looplab.report.keyed import Keyed
from looplab.report.tables import NONE, Cell, Table, amount, count, nats, words

PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def depth_value_table(domain: Keyed) -> Table:
    """One row per measured depth, the shallowest first; without rows where depth was not valued."""
    name, value = domain.held.name, domain.depth_value
    caption = f"What further depth is worth on {name}"
    if value.held is None:
        return Table("depth-value", caption, ("depth",), (), "Fewer than two depths were measured.")
    probes = in_order(value.held.steps[0].net)
    dash = Cell(NONE, tone="muted")
    start = (
        words(value.start.schedule),
        count(value.start.units),
        nats(value.start.loss),
        dash,
        *(dash for _ in probes),
    )
    first = (*start, Cell(""), Cell(""), *_cost(value.start), dash)
    rows = tuple(
        (
            words(step.after),
            count(step.units),
            nats(step.loss),
            nats(step.gain),
            *(nats(step.net[probe]) for probe in probes),
            words(step.word),
            _more(step),
            *_cost(step),
            magnitude(step.added_flops),
        )
        for step in value.steps
    )
    columns = (
        "depth",
        "units",
        "loss",
        "gain of the step",
        *(f"gain net of {probe}" for probe in probes),
        "word",
        "more documents to decide",
        "FLOPs per token",
        "KV bytes per token",
        "ms per token",
        "FLOPs added",
    )
    text = (0, columns.index("word"))
    return Table("depth-value", caption, columns, (first, *rows), _note(value), text).trimmed()


def magnitude(part: Keyed) -> Cell:
    """A count as `1.23 M`; the exact one stands in results.json."""
    for size, letter in PREFIXES:
        if part.held >= size:
            return Cell(f"{part.held / size:.3g} {letter}", part.path, part.home, float(part.held))
    return count(part)


def _cost(depth: Keyed) -> tuple[Cell, Cell, Cell]:
    time = Cell("") if depth.held.milliseconds is None else amount(depth.milliseconds)
    return magnitude(depth.flops), count(depth.kv_bytes), time


def _more(step: Keyed) -> Cell:
    if step.held.word != UNDECIDED:
        return Cell("")
    if step.held.more_documents is None:
        return Cell(f"over {MOST} times as many", step.more_documents.path, step.home)
    more = step.held.more_documents
    return Cell(f"about {more:,}", step.more_documents.path, step.home, float(more))


def _note(value: Keyed) -> str:
    held = value.held
    margins = {f"{step.margin:.3f}" for step in held.steps if step.margin is not None}
    within = f" of {', '.join(sorted(margins))} nats" if margins else ""
    return (
        "Gain: nats per token that the step from the row above removes; net: with the readout refitted at both depths. "
        f"Equivalent to zero: the 90 % interval lies inside the margin{within}. FLOPs are forward, up to this depth, "
        f"prelude and readout included, at {held.context_tokens:,} tokens; KV bytes follow the model's own rule, "
        f"{held.itemsize} bytes a number."
    )
