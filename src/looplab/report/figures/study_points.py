"""Quantities of a study, arm by arm: points with intervals, hatched where nothing can be told."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from looplab.records import StudyPlot, StudyResult, StudyRow
from looplab.report.figures.base import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, UNKNOWN, sheet, styled, title
from looplab.report.figures.base import unknown_patch as hatched

MARKS = ((BLUE, "o"), (ORANGE, "s"), (GREEN, "^"), (PURPLE, "D"), (RED, "v"), (SKY, "P"))
"""Arm -> colour and marker, in the order of the study."""
GROUP = 0.8
"""Width of a group, of the distance between two."""


@styled
def study_points(result: StudyResult, plot: StudyPlot) -> Figure:
    """Draws one plot of a study."""
    names = list(dict.fromkeys(arm.name for arm in result.arms))
    seeds = list(dict.fromkeys(arm.seed for arm in result.arms))
    figure = sheet(max(5.2, 1.9 * len(plot.quantities) + 1.6), 3.7)
    title(figure, plot.title)
    axes = figure.add_subplot()
    axes.grid(axis="y")
    found = [row for row in result.rows if row.quantity in plot.quantities]
    scale = 100.0 if any(row.unit == "share" for row in found) else 1.0
    blanks: list[float] = []
    slots = len(names) * len(seeds)
    for group, quantity in enumerate(plot.quantities):
        for place, (name, seed) in enumerate((n, s) for n in names for s in seeds):
            x = group + GROUP * ((place + 0.5) / slots - 0.5)
            row = result.row(name, seed, quantity)
            if row is None or row.value is None:
                blanks.append(x)
            else:
                _point(axes, x, row, MARKS[names.index(name) % len(MARKS)], scale)
    for x in blanks:
        half = 0.4 * GROUP / slots
        axes.axvspan(x - half, x + half, 0, 1, zorder=0, **UNKNOWN)
    if plot.line is not None:
        axes.axhline(scale * plot.line, color=GREY, lw=1, ls=(0, (4, 3)))
    axes.axhline(0, color="#9aa1ab", lw=0.9)
    axes.set_xticks(range(len(plot.quantities)), [text.replace(", ", ",\n") for text in plot.quantities])
    axes.set_xlim(-0.5, len(plot.quantities) - 0.5)
    axes.set_ylabel("share of the gap (%)" if scale == 100.0 else "factor")
    handles: list[Line2D] = [_handle(name, MARKS[i % len(MARKS)]) for i, name in enumerate(names)]
    figure.legend(
        handles=[*handles, *([hatched("not identifiable")] if blanks else [])], loc="outside lower center", ncols=5
    )
    return figure


def _point(axes: Axes, x: float, row: StudyRow, mark: tuple[str, str], scale: float) -> None:
    assert row.value is not None
    colour, marker = mark
    low, high = (row.value if end is None else end for end in (row.low, row.high))
    axes.plot([x, x], [scale * low, scale * high], color=colour, lw=1.3)
    axes.plot([x], [scale * row.value], color=colour, marker=marker, ls="")


def _handle(name: str, mark: tuple[str, str]) -> Line2D:
    return Line2D([], [], color=mark[0], marker=mark[1], ls="", label=name)
