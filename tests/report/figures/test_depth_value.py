import itertools
import re

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from looplab.report.figures import base
from looplab.report.figures.depth_value import depth_value, finding
from report.depth_sample import VALUED, made
from report.sample import single_core


def drawn(case):
    return depth_value(made(case), made(case).domains[0])


def texts(figure):
    """Every text that is drawn, with its box in pixels; ticks outside the axes are laid out, but never drawn."""
    canvas = FigureCanvasAgg(figure)
    with matplotlib.rc_context(base.STYLE):
        canvas.draw()
    found = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    return [(text, text.get_window_extent(canvas.get_renderer())) for text in found]


def marks(figure, label):
    """The marks of one legend entry."""
    (line,) = [line for line in figure.axes[0].lines if line.get_label() == label]
    return line


@pytest.mark.parametrize("case", VALUED)
def test_texts_are_large_inside_the_figure_and_apart(case):
    figure = drawn(case)
    found = texts(figure)
    assert all(text.get_fontsize() >= 9 for text, _ in found)
    whole = figure.bbox.padded(1)
    assert all(whole.contains(box.x0, box.y0) and whole.contains(box.x1, box.y1) for _, box in found)
    pairs = itertools.combinations(found, 2)
    clashes = [
        (a.get_text(), b.get_text()) for (a, box), (b, other) in pairs if box.padded(-1).overlaps(other.padded(-1))
    ]
    assert not clashes


@pytest.mark.parametrize("case", VALUED)
def test_every_gain_is_a_mark_with_its_interval_inside_the_frame(case):
    value, figure = made(case).domains[0].depth_value, drawn(case)
    axes = figure.axes[0]
    low, high = axes.get_ylim()
    for label, gains in {
        "raw readout": [step.gain for step in value.steps],
        **{f"net of {probe}": [step.net[probe] for step in value.steps] for probe in value.steps[0].net},
    }.items():
        assert list(marks(figure, label).get_ydata()) == [gain.value for gain in gains]
        bars = [list(line.get_ydata()) for line in axes.lines]
        for gain in gains:
            assert [gain.low, gain.high] in bars
            assert low < gain.low < gain.high < high


def test_raw_marks_are_filled_and_net_ones_hollow_and_no_two_are_alike():
    figure = drawn("two_blocks")
    kinds = [marks(figure, label) for label in ("raw readout", "net of temperature", "net of affine")]
    assert [line.get_markerfacecolor() for line in kinds] == [base.INK, "white", "white"]
    assert len({line.get_marker() for line in kinds}) == len({line.get_color() for line in kinds}) == 3


def test_the_margin_is_a_band_and_what_lies_past_full_depth_a_ground():
    figure = drawn("extended_core")
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[:3] == ["raw readout", "net of temperature", "net of affine"]
    assert set(labels[3:]) == {"full depth; trained 4", "past full depth", "within ±0.020 nats"}
    line = marks(figure, "full depth; trained 4").get_xdata()[0]
    places = list(marks(figure, "raw readout").get_xdata())
    assert places[2] < line < places[3], "the step to full lies before the line, the first past it behind"
    assert "past full depth" not in [text.get_text() for text in drawn("two_blocks").legends[0].get_texts()]


def test_the_upper_axis_holds_the_flops_of_the_depths_below():
    figure = drawn("extended_core")
    (top,) = figure.axes[0].child_axes
    value = made("extended_core").domains[0].depth_value
    flops = {value.start.units: value.start.flops} | {step.units: step.flops for step in value.steps}
    ticks = dict(zip(top.get_xticks(), (label.get_text() for label in top.get_xticklabels()), strict=True))
    assert ticks == {units: f"{count / 1e6:.3g}" for units, count in flops.items()}
    assert top.get_xlabel() == "MFLOPs per token up to there, at 512 tokens"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("two_blocks", "text: all 8 units pay"),
        ("saturated", "text: 4 of 8 units are enough"),
        ("open", "text: undecided whether fewer than 8 units are enough"),
        ("extended_core", "text: all 4 units pay; past full depth, safe up to 8"),
        ("noisy", "text: all 8 units pay; past full depth, not shown safe"),
        ("dense", "text: all 6 layers pay"),
    ],
)
def test_the_title_is_the_answer(case, words):
    assert finding(made(case), made(case).domains[0]) == words
    assert re.sub(r"\s+", " ", drawn(case).get_suptitle()) == words


def test_a_domain_without_a_value_says_so():
    result = single_core()
    found = [text.get_text() for text, _ in texts(depth_value(result, result.domains[0]))]
    assert "Fewer than two depths were measured on this domain." in found


def test_equal_values_give_equal_files():
    assert base.svg(drawn("extended_core")) == base.svg(drawn("extended_core"))
