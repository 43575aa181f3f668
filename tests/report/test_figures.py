import itertools
import re

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from looplab.report.figures import base
from looplab.report.figures.dense_control import dense_control
from looplab.report.figures.depth_curves import curve, depth_curves
from looplab.report.figures.equivalence import effects, equivalence
from looplab.report.figures.probe_gains import probe_gains
from looplab.report.figures.schedule_map import schedule_map
from looplab.report.figures.temperature import temperature
from looplab.report.figures.waterfall import waterfall
from looplab.report.plates import plates
from report.sample import CASES, deep_core, dense, single_core, two_blocks


def texts(figure):
    """Every visible text with its box in pixels, after layout."""
    canvas = FigureCanvasAgg(figure)
    with matplotlib.rc_context(base.STYLE):
        canvas.draw()
    found = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    return [(text, text.get_window_extent(canvas.get_renderer())) for text in found]


@pytest.fixture(scope="module")
def drawn():
    return {case: plates(make()) for case, make in {**CASES, "deep": deep_core}.items()}


@pytest.mark.parametrize("case", [*CASES, "deep"])
def test_text_is_large_enough_and_neither_overlaps_nor_leaves_the_figure(drawn, case):
    for name, plate in drawn[case].items():
        found = texts(plate.figure)
        small = [text.get_text() for text, _ in found if text.get_fontsize() < 9]
        assert not small, f"{name}: smaller than 9 points: {small}"
        # Ticks outside the axes are laid out, but never drawn.
        ticks = {"[−0-9.]+" if name != "F12-schedules" else "$"}
        words = [(t.get_text(), box) for t, box in found if not re.fullmatch(*ticks, t.get_text())]
        whole = plate.figure.bbox.padded(1)
        outside = [text for text, b in words if not (whole.contains(b.x0, b.y0) and whole.contains(b.x1, b.y1))]
        assert not outside, f"{name}: cut off: {outside}"
        pairs = itertools.combinations(words, 2)
        clashes = [(a, b) for (a, box), (b, other) in pairs if box.padded(-1).overlaps(other.padded(-1))]
        assert not clashes, f"{name}: texts on top of each other: {clashes}"


def test_equal_figures_give_equal_files_without_a_date():
    one, two = (plates(single_core())["F2-depth-text"] for _ in range(2))
    assert one.svg == two.svg
    files = [base.pdf(plate.figure) for plate in (one, two)]
    assert files[0] == files[1]
    assert b"CreationDate" not in files[0]


def test_a_readers_matplotlib_settings_change_nothing():

    expected = plates(single_core())["F1-waterfall-text"].svg
    with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "red", "svg.hashsalt": None}):
        assert plates(single_core())["F1-waterfall-text"].svg == expected


def test_inline_svg_has_its_own_ids_and_loads_nothing(drawn):
    body = base.inline(drawn["two_blocks"]["F2-depth-text"].svg, "here")
    ids = re.findall(r'\bid="([^"]*)"', body)
    assert ids
    assert all(name.startswith("here-") for name in ids)
    used = set(re.findall(r'href="#([^"]*)"', body)) | set(re.findall(r"url\(#([^)]*)\)", body))
    assert used
    assert used <= set(ids), "a reference points at an id that is not there"
    assert "http" not in body
    assert "<metadata" not in body


def test_the_waterfall_writes_no_number_beside_a_part_that_cannot_be_told():
    result = single_core()
    found = [text.get_text() for text, _ in texts(waterfall(result, result.domains[0]))]
    assert found.count("not identifiable") == 3
    gain, gap = result.domains[0].gains, result.domains[0].decompositions[0].gap
    beside = [text for text in found if re.search(r"\d (nats|%)$", text)]
    net = max(g.net.value for g in gain if g.k == 1)
    assert sorted(beside) == sorted([f"{gap.value:.3f} nats", f"{net:.3f} nats", "32.5 %"])


def test_the_steps_of_the_waterfall_end_at_full_depth():
    result = two_blocks()
    bars = [p for p in waterfall(result, result.domains[0]).axes[0].patches if p.get_width()]
    whole, *steps = bars
    assert sum(step.get_width() for step in steps) == pytest.approx(whole.get_width())
    assert steps[-1].get_x() + steps[-1].get_width() == pytest.approx(0)


def test_depth_curves_are_the_paired_differences_and_end_in_zero():
    result = two_blocks()
    points = curve(result.domains[0], "prefix", "raw", 8)
    assert [k for k, _ in points] == list(range(1, 9))
    assert points[0][1] == result.domains[0].contrasts[0].effect
    assert points[-1][1].value == 0


def test_a_family_without_numbers_is_hatched_in_the_legend():
    result = single_core()
    figure = depth_curves(result, result.domains[0])
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "suffix, repeat: not identifiable" in labels
    assert not [label for label in labels if label in ("suffix", "repeat")]


def test_equivalence_counts_what_lies_inside_the_margin():
    result = two_blocks()
    measured = [effect for effect in effects(result.domains[0]) if effect.nats is not None]
    inside = [e for e in measured if -e.margin < e.nats.low90 and e.nats.high90 < e.margin]
    assert equivalence(result).get_suptitle().startswith(f"{len(inside)} of {len(measured)} ")


def test_a_temperature_at_its_boundary_is_an_arrow_inside_the_frame():
    result = two_blocks()
    assert [s.name for s in result.domains[0].schedules if s.temperature.status == "uniform"] == ["suffix(1)"]
    axes = temperature(result, result.domains[0]).axes[0]
    arrows = [line for line in axes.lines if line.get_marker() == "^" and line.get_linestyle() == "None"]
    assert len(arrows) == 1
    low, high = axes.get_ylim()
    assert low < arrows[0].get_ydata()[0] < high


def test_probe_shares_and_the_dense_control_are_labelled_with_their_numbers():
    result = two_blocks()
    found = {text.get_text() for text, _ in texts(probe_gains(result, result.domains[0]))}
    assert {"16.5 %", "32.5 %", "14.8 %", "29.3 %", "5 %"} <= found


def test_dense_control_without_a_control_says_what_to_do():
    result = single_core()
    with pytest.raises(ValueError, match=r"must have a dense control. Got none. Audit with --control MODEL."):
        dense_control(result, result.domains[0])


@pytest.mark.parametrize("make", [single_core, two_blocks, dense])
def test_the_schedule_map_joins_equal_words_and_strikes_out_what_was_not_run(make):
    result = make()
    axes = schedule_map(result).axes[0]
    uprights = [line for line in axes.lines if len(set(line.get_xdata())) == 1]
    words = [row.word for row in result.schedule_map]
    assert len(uprights) == len({word for word in words if words.count(word) > 1})
    struck = [line for line in axes.lines if len(set(line.get_ydata())) == 1 and line.get_xdata()[0] == 0]
    assert len(struck) == sum(row.reason is not None for row in result.schedule_map)
