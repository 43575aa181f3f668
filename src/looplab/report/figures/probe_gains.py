"""F4: what each refitted readout removes of the gap at the smallest depth, beside the dense control's."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from looplab.audit.result import AuditResult, DomainResult, Estimate, ProbeGain
from looplab.report.figures.base import GREY, probe_mark, sheet, styled, title, unknown_patch
from looplab.report.figures.waterfall import headline_gain
from looplab.report.tables import signed

SIZES = {"temperature": "1 parameter", "affine": "2 per feature", "full_rank": "a full matrix"}
"""Parameters of each probe; probes stand in this order on the axis."""
LINE = 0.05
"""Share above which the verdict says `present`."""


def headline(gains: tuple[ProbeGain, ...]) -> dict[str, ProbeGain]:
    """Probe -> its gain at the smallest depth."""
    first = min((gain.k for gain in gains), default=0)
    return {gain.probe: gain for gain in gains if gain.k == first}


def dense_gain(domain: DomainResult, probe: str) -> ProbeGain | None:
    """The dense control's gain at the depth whose gap is nearest."""
    if domain.control is None:
        return None
    wanted = [c.dense_k for c in domain.control.comparisons if c.probe == probe and c.at == "nearest gap"]
    return next((g for g in domain.control.gains if g.probe == probe and wanted and g.k == wanted[0]), None)


def finding(result: AuditResult, domain: DomainResult) -> str:
    """The title: the best probe's net share."""
    best = headline_gain(domain)
    if best is None or best.share is None:
        return f"{domain.name}: the gap is too small for a share of any probe"
    return f"{domain.name}: {best.probe} removes {signed(100 * best.share.value, 1)} % of the gap, net of full depth"


@styled
def probe_gains(result: AuditResult, domain: DomainResult) -> Figure:
    """Draws F4 for one domain."""
    figure = sheet(6.1, 3.3)
    title(figure, finding(result, domain))
    axes = figure.add_subplot()
    axes.grid(axis="y")
    found = headline(domain.gains)
    names = [name for name in SIZES if name in found] + [name for name in found if name not in SIZES]
    for x, name in enumerate(names):
        dense = dense_gain(domain, name)
        _share(axes, x - (0.13 if dense else 0.0), found[name].share, name, hollow=False)
        if dense:
            _share(axes, x + 0.13, dense.share, name, hollow=True)
    axes.axhline(0, color="#9aa1ab", lw=0.9)
    axes.axhline(100 * LINE, color=GREY, lw=1, ls=(0, (4, 3)))
    axes.annotate(
        "5 %",
        (1.0, 100 * LINE),
        xycoords=("axes fraction", "data"),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
    )
    axes.set_xticks(range(len(names)), [f"{name}\n{SIZES.get(name, '')}".strip() for name in names])
    axes.set_xlim(-0.6, max(len(names), 1) - 0.4)
    bottom, top = axes.get_ylim()
    axes.set_ylim(min(bottom, -2.0), max(top * 1.08, 10.0))
    axes.set_ylabel("net share of the gap (%)")
    _legend(
        figure, has_dense=any(dense_gain(domain, n) for n in names), gaps=[n for n in names if found[n].share is None]
    )
    return figure


def _share(axes: Axes, x: float, share: Estimate | None, probe: str, *, hollow: bool) -> None:
    if share is None:
        return
    colour, marker = probe_mark(probe)
    axes.plot([x, x], [100 * share.low, 100 * share.high], color=colour, lw=1.8, zorder=2)
    axes.plot(
        [x],
        [100 * share.value],
        marker=marker,
        ms=8.5,
        color=colour,
        markerfacecolor="white" if hollow else colour,
        mew=1.6,
        ls="",
    )
    axes.annotate(
        f"{signed(100 * share.value, 1)} %",
        (x, 100 * share.value),
        xytext=(10 if hollow else -10, 0),
        textcoords="offset points",
        va="center",
        ha="left" if hollow else "right",
    )


def _legend(figure: Figure, *, has_dense: bool, gaps: list[str]) -> None:
    handles: list = [Line2D([], [], ls="", marker="o", ms=8, color=GREY, label="this model")]
    if has_dense:
        handles.append(
            Line2D(
                [],
                [],
                ls="",
                marker="o",
                ms=8,
                color=GREY,
                markerfacecolor="white",
                mew=1.6,
                label="dense control, nearest gap",
            )
        )
    handles += [unknown_patch(f"{name}: gap too small") for name in gaps]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, columnspacing=1.6)
