"""F1: how the loss gap between one unit and full depth splits, as a waterfall down to zero.

Each step starts where the one above ended; a whisker is the interval of that step alone. A bracket below shows what the
best refitted readout removes, which overlaps the steps and is not one of them.
"""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from looplab.audit.result import AuditResult, Decomposition, DomainResult, Estimate, Part, ProbeGain
from looplab.report.figures.base import GREY, INK, PARTS, PURPLE, UNKNOWN, sheet, styled, title
from looplab.report.tables import signed


def headline_gain(domain: DomainResult) -> ProbeGain | None:
    """At the smallest depth, the gain of the verdict's best probe; of the largest one where it names none."""
    first = min((gain.k for gain in domain.gains), default=0)
    gains = [gain for gain in domain.gains if gain.k == first]
    named = [gain for gain in gains if gain.probe == domain.verdict.best_probe]
    return max(named or gains, key=lambda gain: gain.net.value, default=None)


def whole_gap(domain: DomainResult) -> tuple[str, Estimate] | None:
    """The schedule that starts the waterfall, and its loss above full depth."""
    if domain.decompositions:
        return "prefix(1)", domain.decomposition().gap
    first = min(domain.gains, key=lambda gain: gain.k, default=None)
    return None if first is None else (first.schedule, first.gap)


def finding(result: AuditResult, domain: DomainResult) -> str:
    """The title: what carries the gap."""
    gap = whole_gap(domain)
    if gap is None:
        return f"{domain.name}: no gap was measured"
    name, size = gap
    if not domain.decompositions:
        units = f"{result.model.units} {'layers' if result.model.dense else 'units'}"
        return f"{domain.name}: {name} instead of all {units} costs {signed(size.value, 3)} nats"
    raw = domain.decomposition()
    if not raw.gap_measurable:
        return f"{domain.name}: the gap of {signed(size.value, 3)} nats is too small to split"
    shares = [(part.share.value, part.name) for part in raw.parts if part.share is not None and part.reason is None]
    if not shares:
        return f"{domain.name}: the gap of {signed(size.value, 3)} nats cannot be split for this model"
    share, part = max(shares)
    return f"{domain.name}: {part} carries {100 * share:.1f} % of the {size.value:.3f} nats"


@styled
def waterfall(result: AuditResult, domain: DomainResult) -> Figure:
    """Draws F1 for one domain."""
    gap, gain = whole_gap(domain), headline_gain(domain)
    rows = 1 + (len(domain.decomposition().parts) if domain.decompositions else 0) + (gain is not None)
    figure = sheet(6.1, 1.1 + 0.33 * rows)
    title(figure, finding(result, domain))
    if gap is None:
        figure.text(0.02, 0.5, "No gap was measured on this domain.")
        return figure
    axes = figure.add_subplot()
    raw = domain.decomposition() if domain.decompositions else None
    labels = _draw(axes, gap[1], raw, gain)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.45, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.axvline(0, color=INK, lw=0.9)
    axes.axvline(gap[1].value, color=INK, lw=0.9, ls=(0, (2, 2)))
    low, high = axes.dataLim.intervalx
    axes.set_xlim(low - 0.02 * (high - low), high + 0.02 * (high - low))  # a bar would end the frame at its own foot
    axes.set_xlabel("loss above full depth (nats per token)")
    _ends(axes, domain, gap[0], gap[1].value)
    return figure


def _draw(axes: Axes, gap: Estimate, raw: Decomposition | None, gain: ProbeGain | None) -> list[str]:
    _bar(axes, 0, gap.value, 0.0, gap, GREY)
    _amount(axes, 0, gap, None)
    labels, level = ["whole gap"], gap.value
    for part in raw.parts if raw else ():
        level = _step(axes, len(labels), part, level, gap.value)
        labels.append(part.name)
    if gain is not None:
        y, end = len(labels), gap.value - gain.net.value
        axes.plot([gap.value, gap.value, end, end], [y - 0.16, y, y, y - 0.16], color=PURPLE, lw=1.8)
        _whisker(axes, y, gap.value, gain.net)
        _amount(axes, y, gain.net, gain.share)
        labels.append(f"refit: {gain.probe}")
    return labels


def _step(axes: Axes, y: int, part: Part, level: float, gap: float) -> float:
    """One row; returns where the next one starts."""
    if part.bitwise_equal:
        axes.plot([level], [y], marker="|", ms=16, mew=1.6, color=PARTS[part.name])
        _note(axes, y, "0 (bitwise equal)")
        return level
    if part.nats is None or part.reason is not None:
        axes.barh(y, gap, 0.56, **UNKNOWN)
        _note(axes, y, "not measured" if (part.reason or "").startswith("not measured") else "not identifiable")
        return level
    end = level - part.nats.value
    _bar(axes, y, level, end, part.nats, PARTS[part.name])
    axes.plot([end, end], [y + 0.28, y + 0.72], color=GREY, lw=0.8)
    _amount(axes, y, part.nats, part.share)
    return end


def _bar(axes: Axes, y: int, start: float, end: float, estimate: Estimate, colour: str) -> None:
    axes.barh(y, end - start, 0.56, left=start, color=colour)
    _whisker(axes, y, start, estimate)


def _whisker(axes: Axes, y: int, start: float, estimate: Estimate) -> None:
    low, high = start - estimate.high, start - estimate.low
    axes.plot([low, high], [y, y], color=INK, lw=1.1)
    axes.plot([low, low, high, high], [y, y, y, y], color=INK, ls="", marker="|", ms=7, mew=1.1)


def _amount(axes: Axes, y: int, nats: Estimate, share: Estimate | None) -> None:
    _note(axes, y, f"{signed(nats.value, 3)} nats", right=68.0)
    if share is not None:
        _note(axes, y, f"{signed(100 * share.value, 1)} %", right=118.0)


def _note(axes: Axes, y: int, text: str, *, right: float | None = None) -> None:
    """Text beside row `y`, starting at the frame or ending `right` points after it."""
    place = {"xytext": (8 if right is None else right, 0), "ha": "left" if right is None else "right"}
    axes.annotate(text, (1.0, y), xycoords=("axes fraction", "data"), textcoords="offset points", va="center", **place)


def _ends(axes: Axes, domain: DomainResult, name: str, gap: float) -> None:
    full, cut = (domain.schedule(which).loss().loss.value for which in ("full", name))
    top = axes.secondary_xaxis("top")
    top.set_xticks([0.0, gap], [f"full: {full:.3f}", f"{name}: {cut:.3f}"])
    for label, side in zip(top.get_xticklabels(), ("right", "left"), strict=True):
        label.set_ha(side)  # outwards, so that a small gap has room for both
    top.spines["top"].set_visible(False)
    top.tick_params(length=0)
