import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from looplab.audit.probes.affine import Dense, Diagonal
from looplab.audit.probes.descent import Descent, Point


class Counting:
    """log-sum-exp of linear functions plus a quadratic: smooth, strictly convex, far from quadratic."""

    def __init__(self, *, size=12, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.rows = 3 * torch.randn(40, size, generator=generator, dtype=torch.float64)
        self.goal = torch.randn(size, generator=generator, dtype=torch.float64)
        self.calls = 0

    def value(self, x):
        return torch.logsumexp(self.rows @ x, dim=0) + 0.05 * (x - self.goal).square().sum()

    def __call__(self, x):
        self.calls += 1
        x = x.clone().requires_grad_()
        loss = self.value(x)
        (gradient,) = torch.autograd.grad(loss, x)
        return float(loss.detach()), gradient


def unit(size=12):
    return Diagonal(torch.ones(size, dtype=torch.float64))


@pytest.mark.parametrize("strength", [1.0, 1e-2, 1e-5])
def test_the_minimum_is_that_of_another_minimiser(strength):
    loss, origin = Counting(), torch.linspace(-1, 1, 12, dtype=torch.float64)
    search = Descent(loss, origin)
    found = search.solve(strength, search.at(origin), unit())

    def penalised(x):
        value, gradient = loss(torch.from_numpy(x))
        away = torch.from_numpy(x) - origin
        return value + strength * float(away.square().sum()), (gradient + 2 * strength * away).numpy()

    expected = minimize(penalised, origin.numpy(), jac=True, method="BFGS", options={"gtol": 1e-9})
    assert found.converged
    np.testing.assert_allclose(found.point.x, expected.x, atol=1e-4)


def test_the_exact_curvature_of_a_quadratic_leads_there_in_one_step():
    half = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    matrix = half @ half.T + torch.eye(6, dtype=torch.float64)
    target = torch.ones(6, dtype=torch.float64)

    def loss(x):
        return float((x - target) @ matrix @ (x - target) / 2), matrix @ (x - target)

    search = Descent(loss, torch.zeros(6, dtype=torch.float64))
    found = search.solve(0.3, search.at(torch.zeros(6, dtype=torch.float64)), Dense(matrix))
    assert (found.converged, found.iterations) == (True, 1)
    torch.testing.assert_close((matrix + 0.6 * torch.eye(6)) @ found.point.x, matrix @ target)


def test_a_new_strength_starts_from_what_is_known():
    loss, origin = Counting(), torch.zeros(12, dtype=torch.float64)
    search = Descent(loss, origin)
    point = search.solve(1e-1, search.at(origin), unit()).point
    before = loss.calls
    warm = search.solve(1e-2, point, unit())
    kept = loss.calls - before
    fresh = Descent(loss, origin)
    cold = fresh.solve(1e-2, Point(point.x, point.loss, point.gradient), unit())
    assert warm.converged and cold.converged
    assert kept < loss.calls - before - kept  # pairs of the larger strength save evaluations


def test_a_minimum_needs_no_evaluation():
    loss, origin = Counting(), torch.zeros(12, dtype=torch.float64)
    search = Descent(loss, origin)
    found = search.solve(1e-2, search.at(origin), unit())
    calls = loss.calls
    again = search.solve(1e-2, found.point, unit())
    assert (again.iterations, again.converged, loss.calls) == (0, True, calls)


def test_a_search_that_cannot_decrease_the_loss_says_that_it_did_not_converge():
    loss = Counting()
    origin = torch.zeros(12, dtype=torch.float64)
    search = Descent(lambda x: (loss(x)[0], -loss(x)[1]), origin)
    assert not search.solve(1e-2, search.at(origin), unit()).converged


def test_losses_that_rounding_hides_do_not_stop_the_search():
    loss, origin = Counting(), torch.zeros(12, dtype=torch.float64)
    noise = torch.Generator().manual_seed(0)

    def rounded(x):
        value, gradient = loss(x)
        return value * (1 + 1e-7 * float(torch.randn((), generator=noise))), gradient

    search = Descent(rounded, origin)
    assert search.solve(1e-3, search.at(origin), unit()).converged
