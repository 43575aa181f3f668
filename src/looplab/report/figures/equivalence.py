"""F6: which effects are equivalent to zero: the 90 % interval against the margin, for every domain.

The frame is a few margins wide, because the question is about zero; an effect outside it is an arrow with its size.
"""

from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from looplab.audit.result import AuditResult, DomainResult, Estimate
from looplab.report.figures.base import INK, PALE, UNKNOWN, probe_mark, sheet, styled, title, unknown_patch
from looplab.report.tables import signed

AT_FULL_COUNT = {"permute-full": "permuted", "pinned-full": "pinned index", "order-full": "other order"}
"""Contrast families that leave the number of applications alone -> row label."""
FRAME = 4.0
"""Half width of the frame, in margins."""


class Effect(NamedTuple):
    """One row of one readout; `nats` is None where nothing can be told, `equivalent` where the gap is too small."""

    label: str
    probe: str
    nats: Estimate | None
    margin: float
    equivalent: bool | None
    bitwise: bool


def effects(domain: DomainResult) -> list[Effect]:
    """Parts of each decomposition and the controls at full count, readouts of one row together.

    A row without any number stands once, for all readouts.
    """
    found = [
        Effect(p.name, d.probe, None if p.reason else p.nats, d.margin, p.equivalent, p.bitwise_equal)
        for d in domain.decompositions
        for p in d.parts
    ]
    for c in domain.contrasts:
        if c.family in AT_FULL_COUNT:
            nats = None if c.reason else c.effect
            label = AT_FULL_COUNT[c.family]
            found.append(Effect(label, c.probe, nats, c.margin or 0.0, c.equivalent, c.bitwise_equal))
    order = list(dict.fromkeys(effect.label for effect in found))
    measured = {effect.label for effect in found if effect.nats is not None or effect.bitwise}
    once = [e for e in found if e.label in measured or e.probe == found[0].probe]
    return sorted(once, key=lambda effect: order.index(effect.label))


def finding(result: AuditResult) -> str:
    """The title: how many effects are equivalent to zero."""
    measured = [e for domain in result.domains for e in effects(domain) if e.equivalent is not None or e.bitwise]
    if not measured:
        return "No effect can be compared with zero for this model"
    zero = sum(bool(e.equivalent) or e.bitwise for e in measured)
    return f"{zero} of {len(measured)} effects are equivalent to zero within the margin"


@styled
def equivalence(result: AuditResult) -> Figure:
    """Draws F6, one panel per domain."""
    panels = [effects(domain) for domain in result.domains]
    rows = max((len(panel) for panel in panels), default=1)
    figure = sheet(7.4 if len(panels) < 3 else 2.6 * len(panels), 1.5 + 0.175 * max(rows, 6))
    title(figure, finding(result))
    for i, (domain, panel) in enumerate(zip(result.domains, panels, strict=True)):
        axes = figure.add_subplot(1, len(panels), i + 1)
        if len(panels) > 1:
            axes.set_title(domain.name, loc="left")
        _panel(axes, panel)
    probes = list(dict.fromkeys(effect.probe for panel in panels for effect in panel))
    figure.legend(handles=_legend(probes, panels), loc="outside lower center", ncols=4, columnspacing=1.6)
    return figure


def _panel(axes: Axes, panel: list[Effect]) -> None:
    edge = FRAME * max((effect.margin for effect in panel), default=1.0) or 1.0
    y = 0.0
    centres: dict[str, list[float]] = {}
    for i, effect in enumerate(panel):
        if i and effect.label != panel[i - 1].label:
            axes.axhline(y - 0.25, color=PALE, lw=0.8)
            y += 0.5
        centres.setdefault(effect.label, []).append(y)
        _row(axes, y, effect, edge)
        y += 1
    axes.axvline(0, color=INK, lw=0.9)
    axes.set_xlim(-edge, edge)
    axes.set_ylim(y - 0.4, -0.7)
    axes.set_yticks([sum(ys) / len(ys) for ys in centres.values()], list(centres))
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("effect (nats per token)")


def _row(axes: Axes, y: float, effect: Effect, edge: float) -> None:
    colour, marker = probe_mark(effect.probe)
    axes.barh(y, 2 * effect.margin, 1.0, left=-effect.margin, color=PALE, zorder=0)
    if effect.bitwise:
        axes.plot([0], [y], color=colour, marker=marker)
        return
    if effect.nats is None:
        axes.barh(y, 2 * edge, 0.7, left=-edge, **UNKNOWN)
        return
    nats = effect.nats
    if abs(nats.value) > edge:
        side = 1 if nats.value > 0 else -1
        axes.plot([side * edge * 0.96], [y], color=colour, marker=">" if side > 0 else "<", ms=6.5)
        axes.annotate(signed(nats.value, 3), (side * edge * 0.9, y), va="center", ha="right" if side > 0 else "left")
        return
    axes.plot([nats.low, nats.high], [y, y], color=colour, lw=0.9)
    axes.plot([nats.low90, nats.high90], [y, y], color=colour, lw=3, solid_capstyle="butt")
    axes.plot(
        [nats.value], [y], color=colour, marker=marker, markerfacecolor="white" if not effect.equivalent else colour
    )


def _legend(probes: list[str], panels: list[list[Effect]]) -> list[Line2D | Patch]:
    marks = {probe: probe_mark(probe) for probe in probes}
    handles: list[Line2D | Patch] = [
        Line2D([], [], color=colour, marker=marker, lw=3, label=probe) for probe, (colour, marker) in marks.items()
    ]
    handles += [
        Line2D([], [], color=INK, marker="o", markerfacecolor=INK, ls="", label="filled: equivalent to zero"),
        Line2D([], [], color=INK, lw=3, label="90 %"),
        Line2D([], [], color=INK, lw=0.9, label="95 %"),
        Patch(color=PALE, label="margin"),
    ]
    if any(effect.nats is None and not effect.bitwise for panel in panels for effect in panel):
        handles.append(unknown_patch("not identifiable"))
    return handles
