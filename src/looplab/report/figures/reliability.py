"""F7: how often the most likely token is right against how sure the readout is of it, with the counts below."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from looplab.audit.result import RAW, AuditResult, DomainResult, ModelCard, TokenMetrics
from looplab.report.figures.base import GREY, probe_mark, sheet, styled, title
from looplab.report.tables import signed

READOUTS = (RAW, "temperature")


def columns(model: ModelCard, domain: DomainResult) -> dict[str, list[TokenMetrics]]:
    """prefix(1), prefix(kmid) and full, where they were run and have bins -> their readouts."""
    wanted = dict.fromkeys(("prefix(1)", f"prefix({model.kmid})", "full"))
    found = {s.name: [m for m in s.metrics if m.probe in READOUTS and m.bins] for s in domain.schedules}
    return {name: found[name] for name in wanted if found.get(name)}


def finding(result: AuditResult, domain: DomainResult) -> str:
    """The title: the calibration error at the smallest depth and at full depth, raw."""
    shown = columns(result.model, domain)
    errors = [f"{signed(100 * m.ece, 1)} % at {name}" for name, found in shown.items() for m in found if m.probe == RAW]
    return f"{domain.name}: expected calibration error, raw: {', '.join(errors)}"


@styled
def reliability(result: AuditResult, domain: DomainResult) -> Figure:
    """Draws F7 for one domain."""
    shown = columns(result.model, domain)
    figure = sheet(7.4, 4.3)
    title(figure, finding(result, domain))
    grid = figure.add_gridspec(2, len(shown), height_ratios=(2.6, 1))
    upper: Axes | None = None
    lower: Axes | None = None
    for i, (name, readouts) in enumerate(shown.items()):
        upper = figure.add_subplot(grid[0, i], sharey=upper)
        lower = figure.add_subplot(grid[1, i], sharex=upper, sharey=lower)
        upper.set_title(name, loc="left")
        _diagonal(upper)
        for metrics in readouts:
            _curve(upper, metrics)
            _counts(lower, metrics)
        lower.set_xlabel("confidence")
        for axes in (upper, lower):
            axes.tick_params(labelleft=i == 0)
        upper.tick_params(labelbottom=False)
        if i == 0:
            upper.set_ylabel("accuracy (top 1)")
            lower.set_ylabel("share of\ntokens (%)")
    handles, labels = (upper or figure.add_subplot()).get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, columnspacing=1.6)
    return figure


def _diagonal(axes: Axes) -> None:
    axes.plot([0, 1], [0, 1], color=GREY, lw=1, ls=(0, (4, 3)), label="perfectly calibrated")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    ticks = [0, 0.25, 0.5, 0.75, 1]
    axes.set_xticks(ticks, ["0", ".25", ".5", ".75", "1"])
    axes.set_yticks(ticks)


def _curve(axes: Axes, metrics: TokenMetrics) -> None:
    colour, marker = probe_mark(metrics.probe)
    filled = [b for b in metrics.bins if b.count]
    axes.plot(
        [b.confidence for b in filled],
        [b.accuracy for b in filled],
        color=colour,
        marker=marker,
        markerfacecolor=colour if metrics.probe == RAW else "white",
        lw=1.2,
        ms=5,
        clip_on=False,
        label=metrics.probe,
    )


def _counts(axes: Axes, metrics: TokenMetrics) -> None:
    colour, _ = probe_mark(metrics.probe)
    total = sum(b.count for b in metrics.bins)
    edges = [metrics.bins[0].low, *(b.high for b in metrics.bins)]
    shares = [100 * b.count / total for b in metrics.bins]
    axes.stairs(shares, edges, color=colour, lw=1.5, ls="-" if metrics.probe == RAW else (0, (3, 1.5)))
