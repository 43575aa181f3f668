"""F2: loss against depth for prefix, suffix and repeat, as paired differences from full depth."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from looplab.audit.result import RAW, AuditResult, DomainResult, Estimate, ModelCard
from looplab.report.figures.base import LOG_FROM, PALE, family_mark, sheet, styled, title, unknown_patch
from looplab.report.tables import signed

CURVES = ("prefix", "suffix", "repeat")
LINES = {RAW: "-", "temperature": (0, (4, 2))}
"""Readouts that are drawn, with their line style."""


def curve(domain: DomainResult, family: str, probe: str, units: int) -> list[tuple[int, Estimate]]:
    """(k, loss above full depth) in order of k, without what has no number; at k = M it is 0 by definition."""
    found = [
        (contrast.k, contrast.effect)
        for contrast in domain.contrasts
        if (contrast.family, contrast.probe) == (f"{family}-full", probe)
        and contrast.k is not None
        and contrast.effect is not None
        and contrast.reason is None
    ]
    zero = Estimate(value=0.0, low=0.0, high=0.0, low90=0.0, high90=0.0, plain_low=0.0, plain_high=0.0)
    return [*sorted(found, key=lambda point: point[0]), (units, zero)] if found else []


def finding(result: AuditResult, domain: DomainResult) -> str:
    """The title: what stopping early costs, and what repeating the first unit gives back."""
    units = result.model.units
    prefix, repeat = (dict(curve(domain, family, RAW, units)) for family in ("prefix", "repeat"))
    if not prefix:
        return f"{domain.name}: no depth curve was measured"
    k = min(prefix)
    text = f"{domain.name}: stopping after {k} of {units} costs {signed(prefix[k].value, 3)} nats"
    return f"{text}; repeating unit {k} up to {units} leaves {signed(repeat[k].value, 3)}" if k in repeat else text


@styled
def depth_curves(result: AuditResult, domain: DomainResult) -> Figure:
    """Draws F2 for one domain."""
    units = result.model.units
    figure = sheet(7.4, 3.7)
    title(figure, finding(result, domain))
    axes = figure.add_subplot()
    axes.grid(axis="y")
    absent = [family for family in CURVES if not _family(axes, domain, family, units)]
    _trained(axes, result.model)
    axes.axhline(0, color="#9aa1ab", lw=0.9)
    depth_axis(axes, units, "units run (k)")
    axes.set_ylabel("loss above full depth\n(nats per token)")
    if any(schedule.name == "full" and schedule.losses for schedule in domain.schedules):
        full = domain.schedule("full").loss().loss.value
        right = axes.secondary_yaxis("right", functions=(lambda y: y + full, lambda y: y - full))
        right.set_ylabel("loss, raw readout\n(nats per token)")
    handles = axes.get_legend_handles_labels()[0]
    if absent:
        handles.append(unknown_patch(f"{', '.join(absent)}: not identifiable"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, columnspacing=1.6, handlelength=2.6)
    return figure


def depth_axis(axes: Axes, units: int, label: str) -> None:
    """Whole numbers of units; logarithmic where there are many."""
    if units > LOG_FROM:
        ticks = [2**n for n in range(units.bit_length()) if 2**n <= units]
        axes.set_xscale("log", base=2)
    else:
        ticks = list(range(1, units + 1))
        axes.set_xlim(0.6, units + 0.4)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(label)


def _trained(axes: Axes, model: ModelCard) -> None:
    if model.trained_units is not None:
        low, high = model.trained_units
        wide = (low / 1.07, high * 1.07) if model.units > LOG_FROM else (low - 0.2, high + 0.2)
        axes.axvspan(*wide, color=PALE, lw=0, zorder=0, label="readout trained")


def _family(axes: Axes, domain: DomainResult, family: str, units: int) -> bool:
    """Whether anything was drawn."""
    colour, marker = family_mark(family)
    drawn = False
    for probe, line in LINES.items():
        points = curve(domain, family, probe, units)
        if points:
            ks, values = [k for k, _ in points], [e.value for _, e in points]
            label = family if probe == RAW else f"{family}, {probe}"
            face = colour if probe == RAW else "white"
            axes.plot(ks, values, ls=line, color=colour, marker=marker, markerfacecolor=face, label=label)
            lows, highs = [e.low for _, e in points], [e.high for _, e in points]
            axes.fill_between(ks, lows, highs, color=colour, alpha=0.16 if probe == RAW else 0.09, lw=0)
            drawn = True
    return drawn
