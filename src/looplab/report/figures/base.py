"""What all figures share: size, type, colours that differ in shape too, and files that repeat byte for byte.

Colours are those of Okabe and Ito ("Color Universal Design", 2008), told apart under the common colour blindnesses. A
hatch means one thing everywhere: not identifiable, or not measured.
"""

import io
import re
from collections.abc import Iterable
from textwrap import fill

import matplotlib
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from looplab.report.tables import unbroken

BLUE, SKY, GREEN, ORANGE, RED, PURPLE, YELLOW = (
    "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#F0E442",
)  # fmt: skip
INK, GREY, PALE = "#22272e", "#6b7280", "#e5e7eb"

PARTS = {"application": SKY, "distinct": ORANGE, "composition": GREEN}
FAMILIES = {"prefix": (BLUE, "o"), "suffix": (RED, "s"), "repeat": (GREEN, "^")}
"""Schedule family -> colour and marker."""
OTHER_FAMILY = (GREY, "D")
PROBES = {"raw": (INK, "o"), "temperature": (PURPLE, "s"), "affine": (BLUE, "D"), "full_rank": (RED, "v")}
"""Readout -> colour and marker."""
UNKNOWN = {"facecolor": "white", "edgecolor": "#9aa1ab", "hatch": "////", "linewidth": 0.8}
"""Face of what is not identifiable."""
LOG_FROM = 16
"""Depth axes with more units than this are logarithmic."""

_OWN = {
    "font.family": "DejaVu Sans",  # shipped with matplotlib, so text is as wide everywhere
    "font.size": 9.5,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.labelsize": 9.5,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#9aa1ab",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "grid.color": PALE,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "hatch.linewidth": 0.7,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.5,
    "svg.hashsalt": "looplab",
    "svg.fonttype": "path",
    "pdf.fonttype": 3,
    "pdf.compression": 6,
}
# The reader's matplotlibrc must not reach the page: every setting starts from matplotlib's own default.
STYLE = {key: value for key, value in matplotlib.rcParamsDefault.items() if not key.startswith("backend")} | _OWN

styled = matplotlib.rc_context(STYLE)
"""Decorator of every function that draws."""


def sheet(width: float, height: float) -> Figure:
    """An empty figure, in inches, whose parts are laid out without overlap."""
    return Figure(figsize=(width, height), layout="constrained")


def title(figure: Figure, text: str) -> None:
    """The finding, left above the axes."""
    width = int(figure.get_figwidth() * 11.5)
    figure.suptitle(fill(unbroken(text), width), x=0.008, ha="left", fontsize=10.5, fontweight="bold")


def unknown_patch(label: str) -> Patch:
    """The legend entry of a hatched mark."""
    return Patch(label=label, **UNKNOWN)


def family_mark(family: str) -> tuple[str, str]:
    """Colour and marker of a schedule family."""
    return FAMILIES.get(family, OTHER_FAMILY)


def probe_mark(probe: str) -> tuple[str, str]:
    """Colour and marker of a readout."""
    return PROBES.get(probe, (GREEN, "P"))


def in_order(probes: Iterable[str]) -> tuple[str, ...]:
    """Readouts by their number of parameters: a mapping that was read from a file has lost its order."""
    known = tuple(PROBES)
    return tuple(sorted(probes, key=lambda probe: (known.index(probe) if probe in known else len(known), probe)))


@styled
def svg(figure: Figure) -> str:
    """The figure as SVG text with glyphs as paths; equal figures give equal text."""
    out = io.StringIO()
    blank = {"Date": None, "Creator": None, "Format": None, "Type": None}
    FigureCanvasSVG(figure).print_svg(out, metadata=blank)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


@styled
def pdf(figure: Figure) -> bytes:
    """The figure as PDF without a date; equal figures give equal bytes."""
    out = io.BytesIO()
    FigureCanvasPdf(figure).print_pdf(out, metadata={"CreationDate": None, "Creator": "looplab", "Producer": None})
    return out.getvalue()


def inline(text: str, prefix: str) -> str:
    """SVG text for an HTML page: no prolog, no metadata, and ids that are unique under `prefix`."""
    body = text[text.index("<svg") :]
    for block in ("metadata", "style"):
        body = re.sub(rf"<{block}\b.*?</{block}>", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="', f'id="{prefix}-', body)
    body = re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}-", body)
    body = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", body)
    return re.sub(r"<!--.*?-->\s*|<defs>\s*</defs>\s*", "", body, flags=re.DOTALL)
