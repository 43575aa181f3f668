"""F14: the same quantity of several models on the same documents, model by model in the order given."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from looplab.audit.compare import PER_BYTE, SHARE, ComparedDomain, Comparison, Quantity
from looplab.report.figures.base import BLUE, GREY, INK, PALE, PARTS, UNKNOWN, sheet, styled, title

COLUMNS = 4
MARKERS = "os^Dv"


def finding(domain: ComparedDomain) -> str:
    """The title: how far the loss itself spreads."""
    loss = domain.quantity("loss at full depth", PER_BYTE)
    return f"{domain.name}: loss at full depth from {loss.smallest:.3f} to {loss.largest:.3f} nats per byte"


def shown(domain: ComparedDomain) -> list[Quantity]:
    """Quantities with a number for some model: losses and gaps per byte, everything else as a share."""
    return [
        quantity
        for quantity in domain.quantities
        if quantity.values and (quantity.unit == SHARE or quantity.name in ("loss at full depth", "gap"))
    ]


@styled
def spread(comparison: Comparison, domain: ComparedDomain) -> Figure:
    """Draws F14."""
    quantities = shown(domain)
    rows = -(-len(quantities) // COLUMNS)
    longest = max(map(len, comparison.models))
    figure = sheet(11.0, 0.5 + rows * (1.55 + 0.055 * longest))
    title(figure, finding(domain))
    for i, quantity in enumerate(quantities):
        axes = figure.add_subplot(rows, COLUMNS, i + 1)
        _panel(axes, quantity, comparison.models, MARKERS[i % len(MARKERS)])
    return figure


def _panel(axes: Axes, quantity: Quantity, models: tuple[str, ...], marker: str) -> None:
    scale = 100 if quantity.unit == SHARE else 1
    axes.set_title(quantity.name, loc="left")
    axes.set_ylabel("% of the gap" if quantity.unit == SHARE else quantity.unit)
    axes.grid(axis="y")
    there = [(x, quantity.values[model]) for x, model in enumerate(models) if model in quantity.values]
    axes.plot([x for x, _ in there], [scale * value.value for _, value in there], color=PALE, lw=1.2, zorder=1)
    for x, value in there:
        axes.plot([x, x], [scale * value.low, scale * value.high], color=INK, lw=1.3, zorder=2)
        colour = PARTS.get(quantity.name, BLUE)
        axes.plot([x], [scale * value.value], color=colour, marker=marker, ms=6.5, mec=INK, mew=0.8, zorder=3)
    for x, model in enumerate(models):
        if model in quantity.missing:
            axes.axvspan(x - 0.4, x + 0.4, **UNKNOWN)
    if quantity.unit == SHARE:
        axes.axhline(0, color=GREY, lw=0.8, zorder=0)
    axes.set_xlim(-0.6, len(models) - 0.4)
    axes.set_xticks(range(len(models)), models, rotation=35 if max(map(len, models)) > 6 else 0, ha="right")
    axes.tick_params(axis="x", length=0)
