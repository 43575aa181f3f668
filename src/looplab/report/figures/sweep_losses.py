"""Loss against one varied field: a line per combination of the others, means over seeds, the seeds' range as a band."""

import json
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from looplab.report.figures.base import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, SKY, sheet, styled, title
from looplab.training.sweep.points import short_names, text_of
from looplab.training.sweep.table import Setting, SweepTable

COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, SKY, INK)
MARKERS = ("o", "s", "^", "D", "v")
MOST_NAMED = 14
"""With more lines than this they are grey and have no names."""
LOG_FROM = 8
"""Positive axes whose ends differ by this factor are logarithmic."""


@styled
def sweep_losses(table: SweepTable, path: str) -> Figure:
    """Draws the finished runs of a sweep along one of its fields."""
    lines = _lines(table, path)
    ticks = _ticks(table, path)
    figure = sheet(7.6, 4.6)
    title(figure, finding(table, path))
    axes = figure.add_subplot()
    axes.grid(axis="y")
    named = len(lines) <= MOST_NAMED
    for place, (name, settings) in enumerate(lines.items()):
        colour = COLOURS[place % len(COLOURS)] if named else GREY
        _line(axes, [(ticks[text_of(s.values[path])], s.losses) for s in settings], colour, place, name)
    places = list(ticks.values())
    if all(isinstance(place, float) for place in places) and min(places) > 0 and max(places) / min(places) >= LOG_FROM:
        axes.set_xscale("log")
    axes.set_xticks(places, list(ticks), rotation=0 if sum(map(len, ticks)) < 70 else 20)
    axes.minorticks_off()
    axes.set_xlabel(path)
    axes.set_ylabel("held-out loss, nats per token")
    if named and len(lines) > 1:
        figure.legend(loc="outside lower center", ncols=3)
    return figure


def finding(table: SweepTable, path: str) -> str:
    """The title: where the loss is least."""
    best, name = table.best(), short_names(table.varied)[path]
    if best is None:
        return f"Loss against {name}"
    return f"Loss against {name}: least {best.mean:.4f} at {name} = {text_of(best.values[path])}"


def drawable(table: SweepTable) -> tuple[str, ...]:
    """The fields along which there is something to see; none where losses cannot be compared."""
    if not table.comparable:
        return ()
    done = [setting for setting in table.settings() if setting.losses]
    return tuple(
        path for path in table.varied if path != "seed" and len({text_of(setting.values[path]) for setting in done}) > 1
    )


def _lines(table: SweepTable, path: str) -> dict[str, list[Setting]]:
    """Name of a line -> its settings: those that share all other fields."""
    names = short_names(table.varied)
    found: dict[str, list[Setting]] = {}
    for setting in table.settings():
        if setting.losses:
            rest = {k: v for k, v in setting.values.items() if k != path}
            name = " ".join(f"{names[k]}={text_of(v)}" for k, v in rest.items())
            found.setdefault(name, []).append(setting)
    return found


def _ticks(table: SweepTable, path: str) -> dict[str, float]:
    """Text of a value -> its place on the axis: numbers where they are, words side by side."""
    values: Sequence[Any] = [setting.values[path] for setting in table.settings() if setting.losses]
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        return {text_of(value): float(value) for value in sorted(values)}
    unique = dict.fromkeys(json.dumps(value, sort_keys=True) for value in values)
    return {text_of(json.loads(value)): float(place) for place, value in enumerate(unique, start=1)}


def _line(axes: Axes, points: list[tuple[float, tuple[float, ...]]], colour: str, place: int, name: str) -> None:
    points = sorted(points)
    xs = [x for x, _ in points]
    means = [sum(losses) / len(losses) for _, losses in points]
    axes.plot(xs, means, color=colour, marker=MARKERS[place % len(MARKERS)], label=name)
    if any(len(losses) > 1 for _, losses in points):
        low, high = ([end(losses) for _, losses in points] for end in (min, max))
        axes.fill_between(xs, low, high, color=colour, alpha=0.15, lw=0)
