"""Intervals: the block bootstrap over cells, and the cell-clustered sandwich.

Cells are drawn with replacement, because runs of a cell share more than their formula; the counts are the weights of
the fit. Every replicate is fitted until converged, from the estimate, and on every tenth also from projected starts as
an alarm. Derived numbers go through the replicates, never through a delta method.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from looplab.scaling.identify import can_redraw
from looplab.scaling.laws.points import Array
from looplab.scaling.solver import CHUNK, Problem, draw_starts, minimise, project

EVERY = 10
"""Replicates per one that is also fitted from other starts."""
MOST_DRAWS = 100


@dataclass(frozen=True, eq=False)
class Replicates:
    """Fits to drawn cells."""

    theta: Array
    """[replicates, p]"""
    converged: NDArray[np.bool_]
    redrawn: int
    """Draws thrown away because their cells did not identify the law."""
    improved: float
    """Largest relative fall of Q that other starts found; a fall above 1e-6 is an alarm."""


def draw_counts(
    problem: Problem, cells: NDArray[np.int64], count: int, draws: np.random.Generator
) -> tuple[Array, int]:
    """How often every cell is drawn, [count, cells], and how many draws were thrown away.

    Raises:
        ValueError: Hardly any draw identifies the law.
    """
    size = int(cells.max()) + 1
    kept: list[Array] = []
    thrown = 0
    while len(kept) < count:
        counts = np.bincount(draws.integers(size, size=size), minlength=size).astype(np.float64)
        if can_redraw(problem.law, problem.points, counts[cells] > 0):
            kept.append(counts)
        else:
            thrown += 1
            if thrown > MOST_DRAWS * count:
                raise ValueError(
                    f"bootstrap: drawn cells must identify {problem.law.title}. {thrown} draws did not. Add cells."
                )
    return np.array(kept), thrown


def bootstrap(
    problem: Problem,
    theta: Array,
    cells: NDArray[np.int64],
    *,
    replicates: int,
    draws: np.random.Generator,
    restarts: int = 8,
    chunk: int = CHUNK,
) -> Replicates:
    """Fits every replicate from the estimate `theta`.

    Args:
        cells: Cell of every run, numbered from 0.
        restarts: Projected starts of every tenth replicate.
    """
    counts, thrown = draw_counts(problem, cells, replicates, draws)
    weights = counts[:, cells]
    warm = minimise(problem, np.repeat(theta[None], replicates, axis=0), weights, exact=True, chunk=chunk)
    improved = 0.0
    if restarts:
        chosen = np.arange(0, replicates, EVERY)
        own = np.repeat(weights[chosen], restarts, axis=0)
        starts = project(problem, draw_starts(problem, len(own), draws), own, chunk)
        found = minimise(problem, starts, own, exact=False, tolerance=1e-7, chunk=chunk)
        best = found.loss.reshape(len(chosen), restarts).min(axis=1)
        improved = float(np.max(1 - best / np.maximum(warm.loss[chosen], 1e-300), initial=0.0))
    return Replicates(warm.theta, warm.converged, thrown, improved)


def percentiles(theta: Array, level: float = 0.95) -> Array:
    """[p, 2]: the interval of every parameter, or of any other number per replicate."""
    return np.quantile(theta, [(1 - level) / 2, (1 + level) / 2], axis=0).T


def sandwich(problem: Problem, theta: Array, cells: NDArray[np.int64]) -> Array | None:
    """Covariance `H^-1 (sum_c s_c s_c') H^-1 K / (K - p)` over the parameters that may move, zero elsewhere, [p, p].

    None where H is singular or there are too few cells.
    """
    one = np.ones((1, len(problem.points)))
    state = problem.state(theta[None], one, exact=True)
    free = np.flatnonzero(problem.free(state.theta, state.gradient)[0])
    number = int(cells.max()) + 1
    assert state.hessian is not None
    hessian = state.hessian[0][np.ix_(free, free)]
    if number <= len(free) or np.linalg.matrix_rank(hessian) < len(free):
        return None
    total, jacobian, _ = problem.law.derivatives(theta, problem.points)
    slope = np.clip(total[0] - np.log(problem.points.loss), -problem.delta, problem.delta)
    scores = np.zeros((number, len(free)))
    np.add.at(scores, cells, (jacobian[0, free] * slope).T)
    bread = np.linalg.inv(hessian)
    covariance = np.zeros((len(theta), len(theta)))
    covariance[np.ix_(free, free)] = bread @ scores.T @ scores @ bread * number / (number - len(free))
    return covariance
