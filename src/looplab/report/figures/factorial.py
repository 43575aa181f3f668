"""F5: count of applications by number of indices on the first block, as two lines per readout.

A cell's own interval is mostly that of the documents, which all cells share; the whiskers are those of the paired
differences between the two lines, so they can be read against the distance of the lines.
"""

from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from looplab.audit.result import RAW, AuditResult, DomainResult, Estimate, Factorial, ModelCard
from looplab.report.figures.base import BLUE, INK, RED, sheet, styled, title
from looplab.report.tables import signed, unbroken

PANELS = (RAW, "temperature")
ONE, MANY = (RED, "s"), (BLUE, "o")
"""Colour and marker of one index and of kmid indices."""


class Square(NamedTuple):
    """Losses at kmid and at M applications, with the index effect (one index minus kmid indices) at each count."""

    one: tuple[Estimate, Estimate]
    many: tuple[Estimate, Estimate]
    effect: tuple[Estimate, Estimate]


def corners(found: Factorial, model: ModelCard) -> tuple[tuple[str, str], tuple[str, str]]:
    """Schedules of one index at kmid and M, and of kmid indices; one index at M may be named same(M) or repeat(1)."""
    short, many = f"same({model.kmid})", (f"prefix({model.kmid})", f"repeat({model.kmid})")
    (long,) = set(found.cells) - {short, *many}
    return (short, long), many


def square(found: Factorial, model: ModelCard) -> Square:
    """The four losses of one readout and its two index effects."""
    one, many = ((found.cells[short], found.cells[long]) for short, long in corners(found, model))
    return Square(one, many, (found.effects[0].nats, found.effects[1].nats))


def finding(result: AuditResult, domain: DomainResult) -> str:
    """The title: what further applications of one index change, and what distinct indices change."""
    cells, model = square(domain.factorials[0], result.model), result.model
    count = signed(cells.one[1].value - cells.one[0].value, 3)
    index = signed(-cells.effect[0].value, 3)
    return (
        f"{domain.name}: {model.units} applications of one index instead of {model.kmid} change the loss by {count} "
        f"nats; {model.kmid} indices instead of one change it by {index}"
    )


@styled
def factorial(result: AuditResult, domain: DomainResult) -> Figure:
    """Draws F5 for a domain that has the factorial, one panel per readout."""
    shown = [found for found in domain.factorials if found.probe in PANELS]
    figure = sheet(7.4, 3.3)
    title(figure, finding(result, domain))
    for i, found in enumerate(shown):
        axes = figure.add_subplot(1, len(shown), i + 1)
        axes.set_title(found.probe, loc="left")
        _panel(axes, square(found, result.model), (result.model.kmid, result.model.units))
        if i == 0:
            axes.set_ylabel("loss (nats per token)")
    names = (("one index", ONE), (f"{result.model.kmid} indices", MANY))
    handles = [Line2D([], [], color=colour, marker=marker, label=name) for name, (colour, marker) in names]
    handles.append(Line2D([], [], color=INK, lw=1.3, marker="_", label=unbroken("95 % of the difference of the lines")))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, columnspacing=1.6)
    return figure


def _panel(axes: Axes, cells: Square, counts: tuple[int, int]) -> None:
    axes.grid(axis="y")
    for values, (colour, marker) in ((cells.one, ONE), (cells.many, MANY)):
        axes.plot([0, 1], [v.value for v in values], color=colour, marker=marker, ms=7.5, mew=1.4)
    for x in (0, 1):
        one, effect = cells.one[x].value, cells.effect[x]
        away = 0.07 if x else -0.07
        ends = [one - effect.high, one - effect.low]
        axes.plot([x + away] * 2, ends, color=INK, lw=1.3)
        axes.plot([x + away] * 2, ends, color=INK, ls="", marker="_", ms=8, mew=1.3)
        axes.annotate(
            signed(effect.value, 3),
            (x + away, sum(ends) / 2),
            xytext=(7 if x else -7, 0),
            textcoords="offset points",
            ha="left" if x else "right",
            va="center",
        )
    axes.set_xlim(-0.5, 1.5)
    axes.margins(y=0.16)
    axes.set_xticks([0, 1], [str(count) for count in counts])
    axes.set_xlabel("applications of the first block")
