"""F10: net probe share against the size of the gap, for the looped model and its dense control.

Shares depend on the size of the gap, so the two are compared where their gaps in nats per byte are alike.
"""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from looplab.audit.result import AuditResult, DomainResult, Estimate, ProbeGain
from looplab.report.figures.base import BLUE, GREY, RED, sheet, styled, title
from looplab.report.figures.probe_gains import dense_gain
from looplab.report.figures.waterfall import headline_gain
from looplab.report.tables import signed

MARKS = {"this model": (BLUE, "o", BLUE), "dense control": (RED, "s", "white")}
"""Model -> colour, marker, face."""


def points(gains: tuple[ProbeGain, ...], gaps: dict[str, Estimate], probe: str) -> list[tuple[int, float, Estimate]]:
    """(k, gap in nats per byte, net share) of one probe where both have a number."""
    return [
        (gain.k, gaps[gain.schedule].value, gain.share)
        for gain in gains
        if gain.probe == probe and gain.share is not None and gain.schedule in gaps
    ]


def finding(result: AuditResult, domain: DomainResult) -> str:
    """The title: both shares of the best probe where the gaps are nearest."""
    best = headline_gain(domain)
    probe = "" if best is None else best.probe
    near = [
        c for c in (domain.control.comparisons if domain.control else ()) if c.probe == probe and c.at == "nearest gap"
    ]
    here = [g.share for g in domain.gains if near and g.probe == probe and g.k == near[0].looped_k]
    dense = dense_gain(domain, probe)
    if not here or here[0] is None or dense is None or dense.share is None:
        return f"{domain.name}: the dense control has no gap to compare with"
    shares = f"{signed(100 * here[0].value, 1)} % here, {signed(100 * dense.share.value, 1)} % in the dense control"
    return f"{domain.name}: at the nearest gap {probe} removes {shares}"


@styled
def dense_control(result: AuditResult, domain: DomainResult) -> Figure:
    """Draws F10 for a domain with a control, one panel per probe."""
    control = domain.control
    if control is None:
        raise ValueError(f"F10: domain {domain.name} must have a dense control. Got none. Audit with --control MODEL.")
    probes = list(dict.fromkeys(gain.probe for gain in domain.gains))
    figure = sheet(7.4, 3.5)
    title(figure, finding(result, domain))
    first: Axes | None = None
    for i, probe in enumerate(probes):
        axes = figure.add_subplot(1, len(probes), i + 1, sharey=first)
        first = first or axes
        axes.set_title(probe, loc="left")
        axes.grid(axis="y")
        axes.axhline(0, color="#9aa1ab", lw=0.9)
        _series(axes, points(domain.gains, domain.gaps_per_byte, probe), "this model")
        _series(axes, points(control.gains, control.gaps_per_byte, probe), "dense control")
        axes.set_xlabel("gap (nats per byte)")
        axes.margins(x=0.08, y=0.12)
    if first is not None:
        first.set_ylabel("net share of the gap (%)")
    handles = [Line2D([], [], color=c, marker=m, markerfacecolor=f, label=name) for name, (c, m, f) in MARKS.items()]
    note = Line2D([], [], ls="", label="number: k of prefix(k)", color=GREY)
    figure.legend(handles=[*handles, note], loc="outside lower center", ncols=3)
    return figure


def _series(axes: Axes, found: list[tuple[int, float, Estimate]], name: str) -> None:
    colour, marker, face = MARKS[name]
    for k, gap, share in found:
        axes.plot([gap, gap], [100 * share.low, 100 * share.high], color=colour, lw=1.3)
        above = name == "this model"
        axes.annotate(
            str(k),
            (gap, 100 * (share.high if above else share.low)),
            xytext=(0, 3 if above else -3),
            textcoords="offset points",
            ha="center",
            va="bottom" if above else "top",
            color=colour,
            fontsize=9,
        )
    found = sorted(found, key=lambda point: point[1])
    axes.plot(
        [g for _, g, _ in found],
        [100 * s.value for _, _, s in found],
        color=colour,
        marker=marker,
        markerfacecolor=face,
        lw=1,
        mew=1.4,
    )
