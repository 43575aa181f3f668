import dataclasses

import numpy as np

from looplab.records import StudyArm, StudyPlot, StudyResult, StudyRow
from looplab.report.figures.study_lines import study_lines

PLOT = StudyPlot(
    name="F1",
    title="A title",
    quantities=("a", "b", "c"),
    x=(8.0, 16.0, 32.0),
    x_label="length",
    y_label="EM",
    line=0.5,
)


def result(values):
    """(arm, seed, quantity) -> value."""
    arms = dict.fromkeys((arm, seed) for arm, seed, _ in values)
    return StudyResult(
        study="s", version=1, scale="cpu", question="", references=(), predictions="", claims=(), matched=(),
        columns=(), plots=(PLOT,), notes=(), versions={}, command="",
        arms=tuple(
            StudyArm(name=name, title="", seed=seed, audit="", sentence="", facts={}) for name, seed in arms
        ),
        rows=tuple(
            StudyRow(arm=arm, seed=seed, quantity=quantity, unit="exact match", value=value)
            for (arm, seed, quantity), value in values.items()
        ),
    )  # fmt: skip


def lines(found):
    """Label -> points of the arms' lines."""
    axes = study_lines(found, PLOT).axes[0]
    return {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
        for line in axes.lines
        if not line.get_label().startswith("_")
    }


def test_a_line_is_the_mean_of_the_seeds_at_its_places():
    found = result({("m", 0, "a"): 1.0, ("m", 1, "a"): 0.5, ("m", 0, "c"): 0.25})
    assert lines(found) == {"m": ([8.0, 32.0], [0.75, 0.25])}
    band = study_lines(found, PLOT).axes[0].collections[0].get_paths()[0].vertices
    assert np.isin([1.0, 0.5], band[:, 1]).all()


def test_an_arm_without_values_has_no_line():
    found = result({("m", 0, "a"): 1.0, ("other", 0, "z"): 1.0, ("lost", 0, "a"): None})
    assert list(lines(found)) == ["m"]


def test_a_plot_without_a_threshold_has_none():
    found = result({("m", 0, "a"): 1.0})
    with_line = len(study_lines(found, PLOT).axes[0].lines)
    assert len(study_lines(found, dataclasses.replace(PLOT, line=None)).axes[0].lines) == with_line - 1


def test_rows_that_combine_arms_have_a_line_of_their_own():
    found = result({("m", 0, "a"): 1.0, ("all", 0, "a"): 0.5, ("all", 0, "b"): 0.25})
    found = dataclasses.replace(found, arms=found.arms[:1])
    assert lines(found)["all"] == ([8.0, 16.0], [0.5, 0.25])


def test_a_plot_without_any_line_is_drawn_without_a_legend():
    figure = study_lines(result({("m", 0, "z"): 1.0}), PLOT)
    assert not figure.legends
