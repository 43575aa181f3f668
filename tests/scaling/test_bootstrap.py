"""Intervals: drawn cells identify the law, replicates converge, and other starts find nothing better."""

import numpy as np
import pytest

from looplab.scaling.bootstrap import bootstrap, draw_counts, percentiles, sandwich
from looplab.scaling.laws import ForwardBackward, Power, Table
from looplab.scaling.solver import Problem, minimise


@pytest.fixture(scope="module")
def fitted(power_runs):
    law, points = ForwardBackward(gain=Power()), power_runs.points()
    own = Problem(law, points, law.box(points))
    truth = law.values(A=22.2, alpha=0.199, B=1223.0, beta=0.369, E=1.57, phi_b=0.459, phi_f=0.3)
    return own, minimise(own, truth[None], np.ones(len(points)), exact=True).theta[0], power_runs.cell_index


def test_every_replicate_converges_and_restarts_find_nothing(fitted):
    own, theta, cells = fitted
    found = bootstrap(own, theta, cells, replicates=20, draws=np.random.default_rng(0), restarts=4)
    assert found.converged.all() and found.redrawn == 0
    assert found.improved <= 1e-6
    low, high = percentiles(found.theta).T
    assert ((low < theta) & (theta < high)).all()


def test_the_sandwich_agrees_with_the_bootstrap(fitted):
    own, theta, cells = fitted
    found = bootstrap(own, theta, cells, replicates=100, draws=np.random.default_rng(0), restarts=0)
    ratio = np.sqrt(np.diag(sandwich(own, theta, cells))) / found.theta.std(axis=0)
    assert ((ratio > 0.6) & (ratio < 1.7)).all()
    assert sandwich(own, theta, np.zeros(len(cells), dtype=np.int64)) is None


def test_draws_that_lose_a_pair_are_drawn_again(fitted):
    own, _, cells = fitted
    law = ForwardBackward(gain=Table()).on(own.points)
    wide = Problem(law, own.points, law.box(own.points))
    counts, thrown = draw_counts(wide, cells, 20, np.random.default_rng(0))
    assert thrown > 0
    for count in counts:
        drawn = own.points.take(np.flatnonzero(count[cells])).present()
        assert {(f, b) for f, b in drawn.tolist()} >= set(law.gain.pairs)
