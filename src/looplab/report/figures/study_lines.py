"""Quantities of a study along an axis: a line per arm, its mean over seeds, with the range of the seeds as a band.

Rows that combine several arms have lines of their own.
"""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from looplab.records import StudyPlot, StudyResult
from looplab.report.figures.base import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    sheet,
    styled,
    title,
)

COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, SKY, INK)
MARKERS = ("o", "s", "^", "D", "v")
"""Their numbers have no common divisor: the pair tells 35 arms apart."""


@styled
def study_lines(result: StudyResult, plot: StudyPlot) -> Figure:
    """Draws one plot of a study that has an axis; an arm without any of its quantities is left out."""
    figure = sheet(7.6, 4.6)
    title(figure, plot.title)
    axes = figure.add_subplot()
    axes.grid(axis="y")
    axes.set_xscale("log", base=2)
    names = (*(arm.name for arm in result.arms), *(row.arm for row in result.rows))
    for place, name in enumerate(dict.fromkeys(names)):
        _line(axes, result, plot, name, place)
    if plot.line is not None:
        axes.axhline(plot.line, color=GREY, lw=1, ls=(0, (4, 3)))
    axes.set_xticks(plot.x, [f"{x:g}" for x in plot.x])
    axes.minorticks_off()
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(plot.y_label)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=4)
    return figure


def _line(axes: Axes, result: StudyResult, plot: StudyPlot, name: str, place: int) -> None:
    points: list[tuple[float, list[float]]] = []
    for x, quantity in zip(plot.x, plot.quantities, strict=True):
        found = [row.value for row in result.rows if (row.arm, row.quantity) == (name, quantity)]
        values = [value for value in found if value is not None]
        if values:
            points.append((x, values))
    if not points:
        return
    places = [x for x, _ in points]
    colour = COLOURS[place % len(COLOURS)]
    axes.plot(
        places,
        [sum(values) / len(values) for _, values in points],
        color=colour,
        marker=MARKERS[place % len(MARKERS)],
        label=name,
    )
    if any(len(values) > 1 for _, values in points):
        low, high = ([end(values) for _, values in points] for end in (min, max))
        axes.fill_between(places, low, high, color=colour, alpha=0.15, lw=0)
