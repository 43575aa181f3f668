"""F11: the parts of the gap and the refitted readouts on parts of the documents and of their positions, in nats.

Every readout keeps the fit of the whole domain. A description: no stratum carries a verdict.
"""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from looplab.audit.result import AuditResult, DomainResult, Estimate, Stratum
from looplab.report.figures.base import INK, PALE, PARTS, UNKNOWN, probe_mark, sheet, styled, title
from looplab.report.tables import signed

MARKERS = {"application": "o", "distinct": "s", "composition": "^"}


def finding(result: AuditResult, domain: DomainResult) -> str:
    """The title: how far the gap itself differs between strata."""
    gaps = [stratum.gap.value for stratum in domain.strata]
    return f"{domain.name}: the gap is between {signed(min(gaps), 3)} and {signed(max(gaps), 3)} nats over strata"


def place(strata: tuple[Stratum, ...]) -> list[float]:
    """Height of each stratum's row; kinds stand apart."""
    rows: list[float] = []
    for i, stratum in enumerate(strata):
        apart = i > 0 and stratum.by != strata[i - 1].by
        rows.append(0.0 if i == 0 else rows[-1] + (1.6 if apart else 1.0))
    return rows


@styled
def strata(result: AuditResult, domain: DomainResult) -> Figure:
    """Draws F11 for a domain with strata."""
    found, rows = domain.strata, place(domain.strata)
    probes = [probe for probe in result.config.probes if all(probe in stratum.gains for stratum in found)]
    panels = [
        *(name for name in PARTS if any(name in s.parts for s in found)),
        *(["refitted readout"] if probes else []),
    ]
    figure = sheet(7.4 if len(panels) < 5 else 1.9 * len(panels), 1.5 + 0.25 * (rows[-1] + 1))
    title(figure, finding(result, domain))
    first: Axes | None = None
    for i, name in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), i + 1, sharey=first)
        first = first or axes
        axes.set_title(name, loc="left")
        axes.axvline(0, color=INK, lw=0.9)
        axes.grid(axis="x")
        if name in PARTS:
            _column(axes, [s.parts.get(name) for s in found], rows, PARTS[name], MARKERS[name])
        else:
            _readouts(axes, found, rows, probes)
        _frame(axes, found, rows, labels=i == 0)
    if probes:
        marks = [(probe, *probe_mark(probe)) for probe in probes]
        handles = [Line2D([], [], color=colour, marker=marker, ls="", label=probe) for probe, colour, marker in marks]
        figure.legend(handles=handles, loc="outside lower right", ncols=4, columnspacing=1.6)
    return figure


def _column(axes: Axes, values: list[Estimate | None], rows: list[float], colour: str, marker: str) -> None:
    if not any(values):
        axes.axhspan(rows[0] - 0.6, rows[-1] + 0.6, **UNKNOWN)
        label = "not identifiable"
        axes.text(0.5, 0.5, label, transform=axes.transAxes, ha="center", va="center", backgroundcolor="white")
        axes.set_xticks([])
        return
    for y, value in zip(rows, values, strict=True):
        if value is not None:
            axes.plot([value.low, value.high], [y, y], color=INK, lw=1.3, zorder=2)
            axes.plot([value.value], [y], color=colour, marker=marker, ms=7, markeredgecolor=INK, mew=0.8, zorder=3)


def _readouts(axes: Axes, found: tuple[Stratum, ...], rows: list[float], probes: list[str]) -> None:
    for i, probe in enumerate(probes):
        colour, marker = probe_mark(probe)
        shift = 0.5 * (i - (len(probes) - 1) / 2) / max(len(probes) - 1, 1)
        for y, stratum in zip(rows, found, strict=True):
            gain = stratum.gains[probe]
            axes.plot([gain.low, gain.high], [y + shift] * 2, color=colour, lw=1.3)
            axes.plot([gain.value], [y + shift], color=colour, marker=marker, ms=5)


def _frame(axes: Axes, found: tuple[Stratum, ...], rows: list[float], *, labels: bool) -> None:
    axes.set_ylim(rows[-1] + 0.6, -0.6)
    axes.set_yticks(rows, [f"{stratum.by}: {stratum.label}" for stratum in found])
    axes.tick_params(axis="y", length=0, labelleft=labels)
    axes.spines["left"].set_visible(False)
    for before, after in zip(rows, rows[1:], strict=False):
        if after - before > 1:
            axes.axhline((before + after) / 2, color=PALE, lw=0.8)
    axes.set_xlabel("nats per token")
    axes.locator_params(axis="x", nbins=3)
