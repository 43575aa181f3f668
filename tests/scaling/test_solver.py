"""The search: the minimum of a slow twin, starts by projection, and replicates that do move."""

import numpy as np
import pytest
from scipy.optimize import nnls

from looplab.scaling.laws import ForwardBackward, Power
from looplab.scaling.solver import Problem, draw_starts, minimise, nonnegative, project
from reference import huber_fit


def problem(runs):
    law, points = ForwardBackward(gain=Power()), runs.points()
    return Problem(law, points, law.box(points))


def plain(points):
    forward, back = points.pairs[points.pair].T
    return points.n_once, points.n_rec, points.tokens, points.loss, forward, back


@pytest.fixture(scope="module")
def fitted(power_runs):
    own = problem(power_runs)
    one = np.ones(len(power_runs))
    starts = project(own, draw_starts(own, 24, np.random.default_rng(0)), one)
    found = minimise(own, starts, one, exact=False, tolerance=1e-6)
    best = minimise(own, found.theta[np.argsort(found.loss)[:1]], one, exact=True)
    return own, found, best


def test_most_projected_starts_reach_the_minimum(fitted):
    _, found, best = fitted
    assert best.converged.all()
    assert (found.loss <= best.loss[0] * 1.001).mean() >= 0.85


def test_the_minimum_is_that_of_the_slow_twin(fitted):
    own, _, best = fitted
    rows, theta = plain(own.points), best.theta[0]
    value, _ = huber_fit.objective(theta, rows, np.ones(len(own.points)), 1.0)
    assert value == pytest.approx(best.loss[0], rel=1e-12)
    twin, reached = huber_fit.search(theta + 0.01, rows, np.ones(len(own.points)))
    assert best.loss[0] <= reached * (1 + 1e-12)
    assert reached == pytest.approx(best.loss[0], rel=2e-5)
    assert twin == pytest.approx(theta, rel=0.02, abs=0.01)


def replicates(own, theta, count=12):
    cells = np.arange(len(own.points)) // 4
    draws = np.random.default_rng(1)
    counts = [np.bincount(draws.integers(36, size=36), minlength=36) for _ in range(count)]
    return np.array(counts, dtype=float)[:, cells]


def test_replicates_move_where_unscaled_optimisers_freeze(fitted):
    """SciPy's default stopping tests are absolute below 1, and Q is 1e-4: its replicates stay at the estimate."""
    own, _, best = fitted
    theta, rows = best.theta[0], plain(own.points)
    weights = replicates(own, theta)
    ours = minimise(own, np.repeat(theta[None], len(weights), axis=0), weights, exact=True)
    assert ours.converged.all()

    def spread(**how):
        return np.std([huber_fit.search(theta, rows, w, **how)[0] for w in weights], axis=0)[5:]

    ratio = ours.theta.std(axis=0)[5:] / spread()
    assert ((ratio > 0.97) & (ratio < 1.03)).all()
    assert (spread(scale=1.0, precise=False) < 0.3 * ours.theta.std(axis=0)[5:]).all()


def test_chunks_change_nothing(fitted):
    own, _, best = fitted
    weights = replicates(own, best.theta[0], 9)
    starts = np.repeat(best.theta, 9, axis=0)
    ends = [minimise(own, starts, weights, exact=True, chunk=chunk) for chunk in (1, 7, 64)]
    for end in ends[1:]:
        assert end.loss == pytest.approx(ends[0].loss, rel=1e-10)


def test_nonnegative_least_squares_is_that_of_scipy():
    draws = np.random.default_rng(0)
    columns = draws.normal(size=(20, 3, 15)) + 0.3
    found = nonnegative(columns, np.ones((20, 15)))
    for ours, own in zip(found, columns, strict=True):
        theirs, _ = nnls(own.T, np.ones(15))
        assert ours == pytest.approx(theirs, abs=1e-9)
    assert (found == 0).any()


def test_held_parameters_stay_and_bounds_hold(fitted):
    own, _, best = fitted
    box = own.box.copy()
    box[5] = 0.2
    box[3] = (0.0, 0.3)
    held = Problem(own.law, own.points, box)
    one = np.ones(len(own.points))
    end = minimise(held, np.clip(best.theta, *box.T), one, exact=True)
    assert end.theta[0, 5] == 0.2 and end.theta[0, 3] == 0.3
    assert end.converged[0] and end.loss[0] > best.loss[0]
