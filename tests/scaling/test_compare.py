"""Comparisons: the truth is preferred, ties are ties, and cells that go together are seen."""

import numpy as np
import pytest

from looplab.scaling import FitRefused, compare, read_runs
from looplab.scaling.compare import intraclass
from looplab.scaling.laws import Decay, ForwardBackward, IsoDepth, Power, Table, Tilt
from synthetic import rows_of

LAWS = [IsoDepth(), *(ForwardBackward(gain=gain) for gain in (Power(), Decay(), Tilt()))]


def test_the_truth_is_preferred(decay_runs):
    found = compare(decay_runs, LAWS, starts=12)
    assert found.verdict == "preferred by AICc: Decay"
    best, *others = found.rows
    assert best.name == "Decay" and best.delta == 0 and best.behind is None
    assert all(row.delta > 10 and row.word == "worse" and row.behind[0] > 0 for row in others)
    assert best.residual <= best.held_cell < 1.1 * 0.005 < min(row.held_cell for row in others)
    assert "Decay" in str(found) and "noise between seeds unknown" in str(found)


def test_two_coordinates_of_one_law_are_a_tie(power_runs):
    class Twin(ForwardBackward):
        title = "Twin"

    found = compare(power_runs, [LAWS[1], Twin(gain=Power(coordinates="ratio"))], starts=12)
    assert found.verdict == "indistinguishable by AICc: Power, Twin" or found.verdict.endswith("Twin, Power")


def test_laws_that_the_runs_do_not_identify_are_listed(full_runs):
    found = compare(full_runs, [IsoDepth(), LAWS[1]], starts=12)
    assert [row.name for row in found.rows] == ["IsoDepth"] and "no run truncates" in found.refused["Power"]
    with pytest.raises(FitRefused, match="no run truncates"):
        compare(full_runs, LAWS[1:2], starts=12)


def test_a_better_table_says_that_all_misfit(decay_runs):
    found = compare(decay_runs, [IsoDepth(), ForwardBackward(gain=Table())], starts=12)
    assert "Table" in [row.name for row in found.rows]
    assert found.verdict.startswith(("all misfit: the table of pairs", "preferred by leave-one-cell-out"))


@pytest.mark.slow
def test_cells_that_go_together_are_decided_by_cells():
    rows = rows_of(LAWS[1], cell_noise=0.01, noise=0.002, gains={"phi_b": 0.459, "phi_f": 0.3})
    found = compare(read_runs(rows), LAWS[1:3], starts=12)
    assert found.rows[0].correlation > 0.5
    assert "leave-one-cell-out" in found.verdict


def test_intraclass_correlation_of_a_known_mixture():
    draws = np.random.default_rng(0)
    cells = np.repeat(np.arange(400), 5)
    mixed = draws.normal(size=400)[cells] + draws.normal(size=2000)
    assert intraclass(mixed, cells) == pytest.approx(0.5, abs=0.06)
    assert intraclass(draws.normal(size=2000), cells) < 0.06
    assert intraclass(mixed[:5], np.arange(5)) == 0.0
