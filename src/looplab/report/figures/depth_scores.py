"""Scores of one task against depth: a panel for each metric, with standard errors."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from looplab.records import EvalResult, EvalScore
from looplab.report.figures.base import BLUE, LOG_FROM, PALE, sheet, styled, title
from looplab.report.tables import signed

COLUMNS = 3
DIGITS = 3


@styled
def depth_scores(result: EvalResult, task: str) -> Figure:
    """Draws every metric of one task, or group of tasks."""
    curves = {(metric, kind): scores for (of, metric, kind), scores in result.curves().items() if of == task}
    rows = -(-len(curves) // COLUMNS)
    figure = sheet(3.7 * min(COLUMNS, len(curves)) + 0.6, 3.1 * rows + 0.5)
    title(figure, finding(result, task))
    panels = figure.subplots(rows, min(COLUMNS, len(curves)), squeeze=False).flatten()
    for axes, (name, scores) in zip(panels, curves.items(), strict=False):
        _panel(axes, result, name, scores)
    for axes in panels[len(curves) :]:
        axes.set_visible(False)
    return figure


def finding(result: EvalResult, task: str) -> str:
    """The title: the first metric at the smallest and the largest depth."""
    metric, scores = next((metric, scores) for (of, metric, _), scores in result.curves().items() if of == task)
    ends = [score for score in (scores[0], scores[-1]) if score.value is not None]
    if not ends:
        return f"{task}: {metric} has no number"
    unit = result.unit.removesuffix("s")
    said = [
        f"{signed(score.value or 0.0, DIGITS)} at {score.depth} {unit}{'s' if score.depth != 1 else ''}"
        for score in dict.fromkeys(ends)
    ]
    return f"{task}: {metric} {', '.join(said)}"


def label(metric: str, kind: str, scores: Sequence[EvalScore]) -> str:
    """Name of a metric, its filter where there is one, and which way is better."""
    better = {True: "higher is better", False: "lower is better", None: ""}[scores[0].higher_is_better]
    named = metric if kind == "none" else f"{metric} ({kind})"
    return f"{named}\n{better}" if better else named


def _panel(axes: Axes, result: EvalResult, name: tuple[str, str], scores: Sequence[EvalScore]) -> None:
    found = [score for score in scores if score.value is not None]
    depths = [score.depth for score in found]
    axes.grid(axis="y")
    if result.trained_units is not None:
        _trained(axes, result)
    axes.errorbar(
        depths,
        [score.value or 0.0 for score in found],
        yerr=[score.stderr or 0.0 for score in found],
        color=BLUE,
        marker="o",
        lw=1.6,
        capsize=2.5,
        elinewidth=1.1,
    )
    axes.set_title(label(*name, scores), loc="left")
    _depth_axis(axes, result)


def _trained(axes: Axes, result: EvalResult) -> None:
    assert result.trained_units is not None
    low, high = (min(max(end, result.depths[0]), result.depths[-1]) for end in result.trained_units)
    wide = (low / 1.07, high * 1.07) if _logarithmic(result) else (low - 0.2, high + 0.2)
    axes.axvspan(*wide, color=PALE, lw=0, zorder=0)


def _depth_axis(axes: Axes, result: EvalResult) -> None:
    """The depths that were run; logarithmic where there are large ones."""
    if _logarithmic(result):
        axes.set_xscale("log", base=2)
    else:
        axes.set_xlim(result.depths[0] - 0.5, result.depths[-1] + 0.5)
    axes.set_xticks(result.depths, [str(depth) for depth in result.depths])
    axes.minorticks_off()
    axes.set_xlabel(f"depth ({result.unit})")


def _logarithmic(result: EvalResult) -> bool:
    return result.depths[-1] > LOG_FROM and result.depths[0] > 0
