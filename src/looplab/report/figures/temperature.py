"""F3: the temperature each schedule's readout asks for, against depth."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from looplab.audit.result import AuditResult, DomainResult, ScheduleResult, TemperatureFit
from looplab.report.figures.base import GREY, family_mark, sheet, styled, title
from looplab.report.figures.depth_curves import CURVES, depth_axis

BOUNDARY = {"uniform": "^", "separable": "v", "sharp": "v"}
"""Fits that ran to the end of the range -> the arrow that says so."""


def fits(result: AuditResult, domain: DomainResult, family: str) -> list[tuple[int, TemperatureFit]]:
    """(k, fit) of one family in order of k."""
    named = {row.name for row in result.schedule_map if row.family == family}
    found = [(s.k, s.temperature) for s in domain.schedules if s.name in named and s.k is not None and s.temperature]
    return sorted(found, key=lambda point: point[0])


def full_fit(domain: DomainResult) -> TemperatureFit | None:
    """The fit at full depth."""
    return next((s.temperature for s in domain.schedules if s.name == "full"), None)


def finding(result: AuditResult, domain: DomainResult) -> str:
    """The title: T at the smallest depth against T at full depth."""
    prefix, full = fits(result, domain, "prefix"), full_fit(domain)
    if not prefix or full is None:
        return f"{domain.name}: no temperature was fitted"
    return f"{domain.name}: prefix({prefix[0][0]}) asks for T = {written(prefix[0][1])}, full depth for {written(full)}"


def written(fit: TemperatureFit) -> str:
    """T with two decimals; inf where the best readout is the uniform one."""
    return "inf" if fit.temperature is None else f"{fit.temperature:.2f}"


@styled
def temperature(result: AuditResult, domain: DomainResult) -> Figure:
    """Draws F3 for one domain."""
    figure = sheet(6.1, 3.3)
    title(figure, finding(result, domain))
    axes = figure.add_subplot()
    axes.set_yscale("log")
    axes.axhline(1, color=GREY, lw=1, ls=(0, (1, 2)), label="T = 1")
    full = full_fit(domain)
    if full is not None and full.temperature is not None:
        axes.axhline(full.temperature, color=GREY, lw=1, ls=(0, (5, 2)), label="T at full depth")
    _limits(axes, domain.schedules)
    for i, family in enumerate(CURVES):
        _family(axes, fits(result, domain, family), family, shift=0.09 * (i - 1))
    depth_axis(axes, result.model.units, "units run (k)")
    axes.set_ylabel("temperature T (log axis)")
    figure.legend(loc="outside lower center", ncols=5, columnspacing=1.4, handlelength=2.2)
    return figure


def _limits(axes: Axes, schedules: tuple[ScheduleResult, ...]) -> None:
    found = [s.temperature for s in schedules if s.temperature and s.temperature.temperature]
    ends = [t for fit in found for t in (fit.temperature, fit.low, fit.high) if t]
    low, high = min([*ends, 0.9]) / 1.12, max([*ends, 1.1]) * 1.18
    axes.set_ylim(low, high)
    candidates = (
        [0.25 * n for n in range(1, 40)] if high / low < 4 else [m * 10.0**n for n in range(-3, 4) for m in (1, 2, 5)]
    )
    ticks = [tick for tick in candidates if low < tick < high]
    axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()


def _family(axes: Axes, points: list[tuple[int, TemperatureFit]], family: str, shift: float) -> None:
    colour, marker = family_mark(family)
    inside = [(k + shift, fit) for k, fit in points if fit.temperature is not None and fit.status not in BOUNDARY]
    label: str | None = family
    if inside:
        axes.plot([x for x, _ in inside], [f.temperature for _, f in inside], color=colour, marker=marker, label=label)
        label = None
    for x, fit in inside:
        if fit.low is not None and fit.high is not None:
            axes.plot([x, x], [fit.low, fit.high], color=colour, lw=1.1)
    bottom, top = axes.get_ylim()
    for k, fit in points:
        if fit.status in BOUNDARY:
            y = top / 1.05 if fit.status == "uniform" else bottom * 1.05
            axes.plot([k + shift], [y], color=colour, marker=BOUNDARY[fit.status], ms=9, ls="", label=label)
            label = None
