"""How far every run of consecutive layers turns the stream (1: half a turn), with the run that is looped."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from looplab.interop.layer_distance import LayerDistance
from looplab.report.figures.base import RED, sheet, styled, title


def finding(distance: LayerDistance, start: int, length: int) -> str:
    """The title: the looped run beside the one of its length that turns the stream least."""
    least = distance.least(length, first=0, stop=distance.layers)
    own, best = distance.of(start, length)[0], distance.of(least, length)[0]
    turned = f"{_named(start, length)} {'turns' if length == 1 else 'turn'} the stream by {own:.3f}"
    if own <= best:
        return f"{turned}, least of all runs of its length"
    return f"{turned}; of this length, {_named(least, length).lower()} least: {best:.3f}"


def _named(start: int, length: int) -> str:
    return f"Layer {start}" if length == 1 else f"Layers {start}-{start + length - 1}"


@styled
def layer_distance(distance: LayerDistance, start: int, length: int) -> Figure:
    """Draws the heat map; the run of `length` layers from `start` on is framed."""
    layers = distance.layers
    figure = sheet(min(9.0, 5.0 + 0.18 * layers), min(7.5, 2.8 + 0.17 * layers))
    title(figure, finding(distance, start, length))
    axes = figure.add_subplot()
    table = np.full((layers, layers), np.nan)
    for row, values in enumerate(distance.angular):
        table[row, : len(values)] = values
    edges = np.arange(layers + 1) - 0.5
    mesh = axes.pcolormesh(edges, edges + 1, np.ma.masked_invalid(table), cmap="cividis", vmin=0)
    axes.add_patch(Rectangle((start - 0.5, length - 0.5), 1, 1, fill=False, edgecolor=RED, lw=2, label="looped"))
    axes.set_xlabel("first layer of the run")
    axes.set_ylabel("layers in the run")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    figure.legend(loc="outside lower right")
    figure.colorbar(mesh, ax=axes, label="angular distance")
    return figure
