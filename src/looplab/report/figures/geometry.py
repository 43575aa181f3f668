"""F8: how the vectors of each schedule lie against those of full depth, in four measures, against depth.

These describe one sample of tokens, the same for all schedules, and have no interval.
"""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from looplab.audit.result import AuditResult, DomainResult, Geometry
from looplab.report.figures.base import GREY, family_mark, sheet, styled, title
from looplab.report.figures.depth_curves import CURVES, depth_axis
from looplab.report.tables import signed

PANELS = {
    "cosine": "cosine with full depth",
    "cka": "linear CKA with full depth",
    "rank_ratio": "effective rank, of full depth's",
    "frechet": "Fréchet distance, normalised",
}
"""Field of Geometry -> what its panel is called. Full depth itself is at 1, 1, 1 and 0."""
SITES: dict[str, Any] = {"hidden": "-", "state": (0, (4, 2))}
"""What is compared -> its line style."""


def series(result: AuditResult, domain: DomainResult, family: str, site: str) -> list[tuple[int, Geometry]]:
    """(k, geometry) of one family at one site in order of k, full depth last."""
    named = {row.name for row in result.schedule_map if row.family == family}
    found = [
        (result.model.units if s.name == "full" else s.k, geometry)
        for s in domain.schedules
        if s.name in named | {"full"}
        for geometry in s.geometry
        if geometry.site == site
    ]
    ordered = sorted(((k, g) for k, g in found if k is not None), key=lambda point: point[0])
    return ordered if len(ordered) > 1 else []


def finding(result: AuditResult, domain: DomainResult) -> str:
    """The title: the direction of the hidden vectors at the smallest depth."""
    points = series(result, domain, "prefix", "hidden")
    if not points or (cosine := points[0][1].cosine) is None:
        return f"{domain.name}: hidden vectors and states against those of full depth"
    k, first = points[0]
    rank = "" if first.rank_ratio is None else f" and {signed(first.rank_ratio, 2)} of their effective rank"
    return f"{domain.name}: hidden vectors after {k} have cosine {signed(cosine, 2)} with those at full depth{rank}"


@styled
def geometry(result: AuditResult, domain: DomainResult) -> Figure:
    """Draws F8 for one domain."""
    figure = sheet(7.4, 4.7)
    title(figure, finding(result, domain))
    drawn = [family for family in CURVES if series(result, domain, family, "hidden")]
    for i, (field, name) in enumerate(PANELS.items()):
        axes = figure.add_subplot(2, 2, i + 1)
        axes.set_title(name, loc="left")
        axes.grid(axis="y")
        axes.axhline(0 if field == "frechet" else 1, color="#9aa1ab", lw=0.9)
        for family in drawn:
            for site in SITES:
                _line(axes, series(result, domain, family, site), field, family, site)
        depth_axis(axes, result.model.units, "units run (k)" if i > 1 else "")
        axes.margins(y=0.1)
    handles = [Line2D([], [], color=family_mark(f)[0], marker=family_mark(f)[1], label=f) for f in drawn]
    handles += [Line2D([], [], color=GREY, ls=style, label=site) for site, style in SITES.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, columnspacing=1.6, handlelength=2.6)
    return figure


def _line(axes: Axes, points: list[tuple[int, Geometry]], field: str, family: str, site: str) -> None:
    colour, marker = family_mark(family)
    known = [(k, value) for k, g in points if (value := getattr(g, field)) is not None]
    axes.plot(
        [k for k, _ in known],
        [value for _, value in known],
        color=colour,
        marker=marker,
        ms=4.5,
        markerfacecolor=colour if site == "hidden" else "white",
        ls=SITES[site],
        lw=1.3,
    )
