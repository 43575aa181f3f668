"""F9: how far each application moves the state, relative to its length, along full, repeat(1) and repeat(kmid)."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from looplab.audit.result import AuditResult, DomainResult, ModelCard, Update
from looplab.report.figures.base import BLUE, GREEN, ORANGE, sheet, styled, title
from looplab.report.tables import signed

MARKS: tuple[tuple[str, str, Any], ...] = ((BLUE, "o", "-"), (ORANGE, "s", (0, (4, 2))), (GREEN, "^", (0, (1.5, 1.5))))
"""Colour, marker and line of full, repeat(1) and repeat(kmid)."""


def paths(model: ModelCard, domain: DomainResult) -> dict[str, tuple[Update, ...]]:
    """full, repeat(1) and repeat(kmid), where they were run on their own -> their applications."""
    wanted = dict.fromkeys(("full", "repeat(1)", f"repeat({model.kmid})"))
    found = {s.name: s.updates for s in domain.schedules if s.updates}
    return {name: found[name] for name in wanted if name in found}


def components(model: ModelCard, domain: DomainResult) -> tuple[str, ...]:
    """State components that some application moves, in the order of the plan."""
    moved = (u.component for updates in paths(model, domain).values() for u in updates if u.relative is not None)
    return tuple(dict.fromkeys(moved))


def finding(result: AuditResult, domain: DomainResult) -> str:
    """The title: the first and the last relative update of the full plan."""
    updates = paths(result.model, domain).get("full", ())
    moves = [u.relative for u in updates if u.relative is not None]
    if not moves:
        return f"{domain.name}: how far each application moves the state"
    first, last = (signed(100 * move, 1 if move < 10 else 0) for move in (moves[0], moves[-1]))
    return f"{domain.name}: the first update measured moves the state by {first} % of its length, the last by {last} %"


@styled
def updates(result: AuditResult, domain: DomainResult) -> Figure:
    """Draws F9 for one domain, one panel per state component."""
    moved = components(result.model, domain)
    figure = sheet(7.4, 3.4)
    title(figure, finding(result, domain))
    first: Axes | None = None
    for i, component in enumerate(moved):
        axes = figure.add_subplot(1, len(moved), i + 1, sharey=first)
        first = first or axes
        axes.set_yscale("log")
        axes.grid(axis="y")
        if len(moved) > 1:
            axes.set_title(component, loc="left")
        for (name, found), mark in zip(paths(result.model, domain).items(), MARKS, strict=False):
            _line(axes, [u for u in found if u.component == component and u.relative], name, mark)
        axes.set_xlabel("application, from 0")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.tick_params(labelleft=i == 0)
    if first is not None:
        _ticks(first)
        first.set_ylabel("relative update\n(log axis)")
        figure.legend(*first.get_legend_handles_labels(), loc="outside lower center", ncols=3, handlelength=2.6)
    return figure


def _line(axes: Axes, found: list[Update], name: str, mark: tuple[str, str, Any]) -> None:
    colour, marker, style = mark
    places, moves = [u.application for u in found], [u.relative or 0.0 for u in found]
    axes.plot(places, moves, color=colour, marker=marker, ls=style, label=name, ms=5)
    banded = [u for u in found if u.low is not None and u.high is not None]
    axes.fill_between(
        [u.application for u in banded],
        [u.low or 0.0 for u in banded],
        [u.high or 0.0 for u in banded],
        color=colour,
        alpha=0.15,
        lw=0,
    )


def _ticks(axes: Axes) -> None:
    low, high = axes.get_ylim()
    steps = (1, 2, 5) if high / low < 100 else (1,)
    ticks = [m * 10.0**n for n in range(-9, 6) for m in steps if low <= m * 10.0**n <= high]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
