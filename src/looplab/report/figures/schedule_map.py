"""F12: every schedule as a row of applications: the colour is the block, the number the iteration.

Rows joined by a bracket are one function of the input; those struck out were not run.
"""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from looplab.audit.result import AuditResult, ScheduleEntry
from looplab.recurrence.plan import Plan
from looplab.report.figures.base import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, SKY, YELLOW, sheet, styled, title

BLOCKS = (SKY, ORANGE, GREEN, YELLOW, PURPLE, BLUE, RED)
"""Colour of a block, in turn; the number of the iteration is written on it."""
NAME, LANE = 3.4, 0.45
"""Widths, in cells, of the column of names and of one bracket."""


def finding(result: AuditResult) -> str:
    """The title: schedules, different words, and what sharing saves."""
    rows, counts = result.schedule_map, result.counts
    words = len({row.word for row in rows})
    saved = f"{counts.minimal_applications} applications per document instead of {counts.naive_applications}"
    return f"{len(rows)} schedules, {words} different functions, {saved}"


@styled
def schedule_map(result: AuditResult) -> Figure:
    """Draws F12."""
    rows = result.schedule_map
    plans = [Plan.parse(row.plan) for row in rows]
    wide = max(len(plan) for plan in plans)
    groups = _same(rows)
    cell = min(0.27, 7.5 / wide)
    reasons = 17 if any(row.reason for row in rows) else 0
    across = NAME * 0.27 / cell + wide + LANE * 0.27 / cell * (len(groups) + 1)
    figure = sheet(across * cell + 0.118 * reasons + 0.6, 0.235 * len(rows) + 0.65)
    title(figure, finding(result))
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.set_xlim(-NAME * 0.27 / cell, wide + LANE * 0.27 / cell * (len(groups) + 1) + 0.118 * reasons / cell)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    for y, (row, plan) in enumerate(zip(rows, plans, strict=True)):
        _row(axes, y, row, plan, numbers=cell >= 0.2)
    for lane, members in enumerate(groups):
        _bracket(axes, wide + LANE * 0.27 / cell * (lane + 0.6), members, LANE * 0.27 / cell * 0.35)
    for y, row in enumerate(rows):
        if row.reason:
            x = wide + LANE * 0.27 / cell * (len(groups) + 1)
            axes.text(x, y, row.reason, va="center", color=GREY, fontsize=9)
    return figure


def _same(rows: tuple[ScheduleEntry, ...]) -> list[list[int]]:
    words: dict[str, list[int]] = {}
    for y, row in enumerate(rows):
        words.setdefault(row.word, []).append(y)
    return [members for members in words.values() if len(members) > 1]


def _row(axes: Axes, y: int, row: ScheduleEntry, plan: Plan, *, numbers: bool) -> None:
    struck = row.reason is not None
    axes.text(
        -0.35,
        y,
        row.name if row.family != "explicit" else "explicit",
        va="center",
        ha="right",
        color=GREY if struck else INK,
    )
    for x, (block, iteration) in enumerate(plan):
        colour = BLOCKS[block % len(BLOCKS)]
        axes.add_patch(
            Rectangle((x + 0.04, y - 0.42), 0.92, 0.84, facecolor=colour, alpha=0.25 if struck else 0.85, lw=0)
        )
        if numbers:
            axes.text(x + 0.5, y, str(iteration), va="center", ha="center", fontsize=9, color=GREY if struck else INK)
    if struck:
        axes.plot([0, len(plan)], [y, y], color=GREY, lw=1.1)


def _bracket(axes: Axes, x: float, members: list[int], tick: float) -> None:
    axes.plot([x, x], [members[0], members[-1]], color=INK, lw=1)
    for y in members:
        axes.plot([x - tick, x], [y, y], color=INK, lw=1)
