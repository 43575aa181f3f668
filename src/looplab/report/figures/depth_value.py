"""What each further step of depth gains, against the depth it reaches and the FLOPs that costs.

Inside the margin of equivalence the axis of gains is linear, outside it is logarithmic, so that a first step of one nat
and a last one of a thousandth can be read off the same figure.
"""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from looplab.audit.result import RAW, AuditResult, DepthStep, DepthValue, DomainResult, Estimate
from looplab.report.figures.base import GREY, LOG_FROM, PALE, SKY, in_order, probe_mark, sheet, styled, title
from looplab.report.figures.depth_curves import depth_axis
from looplab.report.tables import signed

MARKED = ("raw readout", "net of ")
"""How the legend entries of gains begin; they stand before those of lines and grounds."""


def finding(result: AuditResult, domain: DomainResult) -> str:
    """The title: how many units are enough, and how far past full depth is safe."""
    value = domain.depth_value
    name, whole = "layers" if result.model.dense else "units", result.model.units
    if value is None:
        return f"{domain.name}: the value of depth was not measured"
    if value.enough is None:
        text = f"{domain.name}: undecided whether fewer than {whole} {name} are enough"
    elif value.enough == whole:
        text = f"{domain.name}: all {whole} {name} pay"
    else:
        text = f"{domain.name}: {value.enough} of {whole} {name} are enough"
    if value.safe_until is None:
        return text
    return (
        f"{text}; past full depth, {f'safe up to {value.safe_until}' if value.safe_until > whole else 'not shown safe'}"
    )


@styled
def depth_value(result: AuditResult, domain: DomainResult) -> Figure:
    """Draws the gains of one domain."""
    figure = sheet(7.4, 4.0)
    title(figure, finding(result, domain))
    value = domain.depth_value
    if value is None:
        figure.text(0.02, 0.5, "Fewer than two depths were measured on this domain.")
        return figure
    axes = figure.add_subplot()
    margin = value.steps[0].margin or 0.0
    deepest, whole = value.steps[-1].units, result.model.units
    _gain_axis(axes, value, margin)
    depth_axis(axes, deepest, "layers run" if result.model.dense else "units run, at the end of the step")
    _depths(axes, value, whole, deepest)
    axes.axhspan(-margin, margin, color=SKY, alpha=0.22, lw=0, zorder=0, label=f"within ±{margin:.3f} nats")
    axes.axhline(0, color="#9aa1ab", lw=0.9)
    readouts = (RAW, *in_order(value.steps[0].net))
    for i, readout in enumerate(readouts):
        _gains(axes, value.steps, readout, i - (len(readouts) - 1) / 2, logarithmic=deepest > LOG_FROM)
    _flops_axis(axes, value)
    handles = axes.get_legend_handles_labels()[0]
    marks = [handle for handle in handles if handle.get_label().startswith(MARKED)]
    figure.legend(
        handles=[*marks, *(handle for handle in handles if handle not in marks)],
        loc="outside lower center",
        ncols=3,
        columnspacing=1.6,
    )
    return figure


def _gain_axis(axes: Axes, value: DepthValue, margin: float) -> None:
    """Linear inside the margin, logarithmic outside; ticks at zero, the margin and 1, 2, 5 times powers of ten."""
    ends = [end for step in value.steps for each in (step.gain, *step.net.values()) for end in (each.low, each.high)]
    lowest, largest = 1.5 * min(*ends, -margin), 1.5 * max(*ends, margin)
    axes.set_yscale("symlog", linthresh=margin, linscale=0.5)
    rounds = [
        digit * 10.0**power for power in range(-4, 3) for digit in (1, 2, 5) if digit * 10.0**power > 1.8 * margin
    ]
    sparse = [each for each in rounds if f"{each:e}"[0] == "1"]
    above, below = ([each for each in some if each <= end] for some, end in ((rounds, largest), (rounds, -lowest)))
    if len(above) + len(below) > 7:
        above, below = ([each for each in some if each in sparse] for some in (above, below))
    ticks = [*(-each for each in reversed(below)), -margin, 0.0, margin, *above]
    axes.set_yticks(ticks, [signed(tick, 4).rstrip("0").rstrip(".") or "0" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(lowest, largest)
    axes.set_ylabel("gain of the step (nats per token),\nlogarithmic outside the margin")
    axes.grid(axis="y")


def _depths(axes: Axes, value: DepthValue, whole: int, deepest: int) -> None:
    """Full depth as a line, with what was trained, and what lies past it as a ground."""
    edge = whole * 1.08 if deepest > LOG_FROM else whole + 0.3
    if deepest > LOG_FROM:
        axes.set_xlim(value.start.units / 1.1, deepest * 1.15)
    left, right = axes.get_xlim()
    label = "full depth" if value.trained is None else f"full depth; trained {_range(*value.trained)}"
    axes.axvline(edge, color=GREY, lw=1.2, ls=(0, (4, 3)), label=label)
    if deepest > whole:
        axes.axvspan(edge, right, color=PALE, lw=0, zorder=0, label="past full depth")
    axes.set_xlim(left, right)


def _range(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"


def _gains(axes: Axes, steps: tuple[DepthStep, ...], readout: str, place: float, *, logarithmic: bool) -> None:
    """One readout: filled as it is, hollow where it was refitted at both depths."""
    colour, marker = probe_mark(readout)
    found: list[Estimate] = [step.gain if readout == RAW else step.net[readout] for step in steps]
    at = [step.units * 1.035**place if logarithmic else step.units + 0.13 * place for step in steps]
    for x, gain in zip(at, found, strict=True):
        axes.plot([x, x], [gain.low, gain.high], color=colour, lw=1.6, zorder=2)
    face = colour if readout == RAW else "white"
    label = MARKED[0] if readout == RAW else f"{MARKED[1]}{readout}"
    values = [gain.value for gain in found]
    axes.plot(at, values, ls="", marker=marker, ms=6, color=colour, mfc=face, mew=1.4, zorder=3, label=label)


def _flops_axis(axes: Axes, value: DepthValue) -> None:
    """FLOPs per token over the depths that were run, as many as have room."""
    depths = {value.start.units: value.start.flops} | {step.units: step.flops for step in value.steps}
    every = -(-len(depths) // 7)
    shown = dict(list(depths.items())[::-1][::every])
    largest = max(shown.values())
    size, letter = next(
        ((size, letter) for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")) if largest >= size),
        (1.0, ""),
    )
    top = axes.secondary_xaxis("top")
    top.set_xticks(list(shown), [f"{flops / size:.3g}" for flops in shown.values()])
    top.minorticks_off()
    top.set_xlabel(f"{letter}FLOPs per token up to there, at {value.context_tokens:,} tokens")
