"""What runs cannot tell: each sentence of the design, then predicted errors."""

import re

import numpy as np
import pytest

from looplab.records import Level
from looplab.scaling import read_runs
from looplab.scaling.identify import direction, in_practice, predicted_sd, structure
from looplab.scaling.laws import Decay, ForwardBackward, IsoDepth, Power, Table
from synthetic import rows_of

POWER = ForwardBackward(gain=Power())
GAINS = {"phi_b": 0.459, "phi_f": 0.3}


def runs_of(**design):
    return read_runs(rows_of(POWER, gains=GAINS, **design))


CASES = [
    (
        {"pairs": ((1, 1), (4, 4))},
        POWER,
        Level.FAILURE,
        r"forward-only passes \(phi_f\) is not identified: no run trunc",
    ),
    ({"pairs": ((1, 1), (4, 4))}, ForwardBackward(gain=Decay()), Level.FAILURE, r"\(kappa\) is not identified"),
    ({"pairs": ((1, 1), (2, 1), (4, 2))}, POWER, Level.WARNING, "phi_b and phi_f are separated only by the power form"),
    ({"pairs": ((4, 4), (4, 2))}, POWER, Level.FAILURE, "phi is not identified: every run has num_steps = 4"),
    ({"widths": 1}, POWER, Level.WARNING, "Widths vary only with the budget"),
    ({"budgets": (1e18,)}, POWER, Level.WARNING, "beta and E are not separated from alpha: there is one budget"),
    ({"pairs": ((2, 2), (4, 4), (4, 2), (4, 1))}, POWER, Level.WARNING, "No unlooped baseline"),
]


@pytest.mark.parametrize(("design", "law", "level", "sentence"), CASES)
def test_every_gap_of_the_design_is_put_into_words(design, law, level, sentence):
    runs = runs_of(**design)
    found = [f for f in structure(law, runs.points(), runs.cells) if re.search(sentence, f.message)]
    assert [f.level for f in found] == [level]


def test_a_whole_design_has_no_gap(power_runs):
    points = power_runs.points()
    for law in (POWER, IsoDepth(), ForwardBackward(gain=Table()).on(points)):
        assert structure(law, points, power_runs.cells) == []


def test_more_parameters_than_directions_are_refused():
    runs = runs_of(pairs=((1, 1), (2, 1)), budgets=(1e18,), widths=1)
    kinds = [f.kind for f in structure(POWER, runs.points(), runs.cells)]
    assert "scaling.rank" in kinds


def test_predicted_errors_say_what_one_width_per_cell_costs(power_runs):
    theta = POWER.values(A=22.2, alpha=0.199, B=1223.0, beta=0.369, E=1.57, **GAINS)
    wide, condition, _ = predicted_sd(POWER, theta, power_runs.points(), 0.005)
    narrow = runs_of(widths=1).points()
    thin, _, _ = predicted_sd(POWER, theta, narrow, 0.005)
    assert condition < 1e7
    assert (wide[5:] < 0.02).all() and (thin[5:] > 4 * wide[5:]).all()
    found = in_practice(POWER, theta, narrow, 0.005)
    assert {f.level for f in found} == {Level.UNIDENTIFIED}
    assert "a is not identified in practice: predicted standard error" in " ".join(f.message for f in found)


def test_directions_in_words():
    assert direction(["a", "b", "c"], np.array([1.0, -0.9, 0.1])) == "a rises while b falls."
    assert direction(["a", "b", "c"], np.array([-1.0, -0.9, 0.8])) == "a and b rise while c falls."
