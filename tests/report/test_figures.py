import dataclasses
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
from looplab.report.figures.factorial import factorial
from looplab.report.figures.geometry import geometry, series
from looplab.report.figures.probe_gains import probe_gains
from looplab.report.figures.reliability import columns, reliability
from looplab.report.figures.schedule_map import schedule_map
from looplab.report.figures.strata import strata
from looplab.report.figures.temperature import temperature
from looplab.report.figures.updates import components, paths, updates
from looplab.report.figures.waterfall import waterfall
from looplab.report.plates import plates
from report.sample import CASES, deep_core, dense, single_core, two_blocks

DRAWN = {**CASES, "deep": deep_core, "domains": lambda: two_blocks(domains=("text", "code"))}


def texts(figure):
    """Every visible text with its box in pixels, after layout."""
    canvas = FigureCanvasAgg(figure)
    with matplotlib.rc_context(base.STYLE):
        canvas.draw()
    found = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    return [(text, text.get_window_extent(canvas.get_renderer())) for text in found]


@pytest.fixture(scope="module")
def drawn():
    return {case: plates(make()) for case, make in DRAWN.items()}


@pytest.mark.parametrize("case", DRAWN)
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


@pytest.mark.parametrize("make", [single_core, two_blocks, deep_core])
def test_no_whisker_of_the_waterfall_is_cut_off(make):
    result = make()
    axes = waterfall(result, result.domains[0]).axes[0]
    low, high = axes.get_xlim()
    ends = [x for line in axes.lines if line.get_marker() == "|" for x in line.get_xdata()]
    assert min(ends) < 0, "the whole gap's whisker reaches past full depth"
    assert low < min(ends)
    assert max(ends) < high


def test_the_factorial_shows_both_lines_with_the_interval_of_their_difference():
    result = two_blocks()
    found = result.domains[0].factorials[0]
    raw, temperature = factorial(result, result.domains[0]).axes
    assert [axes.get_title(loc="left") for axes in (raw, temperature)] == ["raw", "temperature"]
    one, many = (line.get_ydata() for line in raw.lines[:2])
    assert list(one) == [found.cells[name].value for name in ("same(4)", "same(8)")]
    assert list(many) == [found.cells[name].value for name in ("prefix(4)", "repeat(4)")]
    effect = found.effects[0].nats
    assert list(raw.lines[2].get_ydata()) == [one[0] - effect.high, one[0] - effect.low]


def test_the_factorial_takes_one_index_at_full_count_by_either_name():
    result = two_blocks()
    first = result.domains[0]
    cells = first.factorials[0].cells
    renamed = {"repeat(1)" if name == "same(8)" else name: value for name, value in sorted(cells.items())}
    domain = dataclasses.replace(first, factorials=(dataclasses.replace(first.factorials[0], cells=renamed),))
    line = factorial(result, domain).axes[0].lines[0]
    assert list(line.get_ydata()) == [cells["same(4)"].value, cells["same(8)"].value]


def test_reliability_has_a_column_per_depth_and_leaves_out_empty_bins():
    result = two_blocks()
    shown = columns(result.model, result.domains[0])
    assert list(shown) == ["prefix(1)", "prefix(4)", "full"]
    upper = reliability(result, result.domains[0]).axes[0]
    curve_of_raw = upper.lines[1]
    assert len(curve_of_raw.get_xdata()) == 14, "the first of 15 bins is empty"
    assert list(columns(single_core().model, single_core().domains[0])) == ["prefix(1)", "full"]


def test_geometry_has_four_panels_that_end_at_full_depth():
    result = two_blocks()
    points = series(result, result.domains[0], "prefix", "hidden")
    assert [k for k, _ in points] == list(range(1, 9))
    figure = geometry(result, result.domains[0])
    assert [line.get_ydata()[-1] for line in figure.axes[0].lines[1:]] == [1.0] * 6
    assert [line.get_ydata()[-1] for line in figure.axes[3].lines[1:]] == [0.0] * 6
    styles = [line.get_linestyle() for line in figure.axes[0].lines[1:3]]
    assert styles == ["-", "--"]


def test_a_measure_without_a_number_leaves_a_gap_in_the_curve():
    result = two_blocks()
    first = result.domains[0]
    schedules = tuple(
        dataclasses.replace(s, geometry=tuple(dataclasses.replace(g, cka=None) for g in s.geometry))
        if s.name == "prefix(3)"
        else s
        for s in first.schedules
    )
    figure = geometry(result, dataclasses.replace(first, schedules=schedules))
    assert [len(axes.lines[1].get_xdata()) for axes in figure.axes] == [8, 7, 8, 8]


def test_updates_are_those_of_three_plans_without_steps_from_a_zero_state():
    result = two_blocks()
    first = result.domains[0]
    assert list(paths(result.model, first)) == ["full", "repeat(1)", "repeat(4)"]
    assert components(result.model, first) == ("state",)
    (axes,) = updates(result, first).axes
    assert axes.get_yscale() == "log"
    assert [list(line.get_xdata()) for line in axes.lines] == [list(range(1, 8))] * 3
    assert len(axes.collections) == 3, "a band of the middle half of the documents each"


def test_every_state_component_has_its_own_panel():
    result = two_blocks()
    first = result.domains[0]
    schedules = tuple(
        dataclasses.replace(
            s, updates=tuple(dataclasses.replace(u, component=c) for u in s.updates for c in ("high", "low"))
        )
        for s in first.schedules
    )
    figure = updates(result, dataclasses.replace(first, schedules=schedules))
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["high", "low"]


def test_strata_hatch_what_cannot_be_told_and_write_no_number_there():
    result = single_core()
    found = [text.get_text() for text, _ in texts(strata(result, result.domains[0]))]
    assert found.count("not identifiable") == 3
    told = two_blocks()
    axes = strata(told, told.domains[0]).axes
    assert [each.get_title(loc="left") for each in axes] == [
        "application", "distinct", "composition", "refitted readout",
    ]  # fmt: skip
    dots = [line.get_xdata()[0] for line in axes[0].lines if line.get_marker() == "o"]
    assert dots == [stratum.parts["application"].value for stratum in told.domains[0].strata]
