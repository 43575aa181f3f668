"""Least Huber loss of a law over many starts, or many bootstrap replicates, at once.

    Q(theta) = sum_i w_i H_delta(ln L(theta)_i - ln L_i)

Summed, never averaged: an absolute stopping test of an optimiser would end at once on 6e-4, and replicates started from
the estimate would not move. All tests here are relative.

- Starts: uniform in the box; given the other parameters, the law is linear in its amplitudes, and these are replaced
  by non-negative least squares on relative residuals (variable projection, arXiv:2603.22339).
- Descent: Levenberg-Marquardt, projected on the box, on the quadratic that majorises the Huber loss.
- End: Newton with the exact Hessian, until max_i |g_i| / sqrt(H_ii) <= 1e-7 sqrt(Q) over free parameters.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from looplab.scaling.laws.base import Law, gradient, log_sum
from looplab.scaling.laws.points import Array, Points

DELTA = 1e-3
TOLERANCE = 1e-7
PERFECT = 1e-22
"""Q per run below which a fit is exact: rounding of ln L is all that is left."""
CHUNK = 32
"""Rows of theta at once: their arrays stay in the cache."""
DESCENTS, NEWTONS = 100, 200
"""Most iterations of either stage."""


@dataclass(frozen=True, eq=False)
class Problem:
    """A law, the runs, and the box its parameters must lie in; a parameter is held by a box of no width."""

    law: Law
    points: Points
    box: Array
    """[p, 2]"""
    delta: float = DELTA

    def state(self, theta: Array, weights: Array, exact: bool) -> "State":
        """Q and its derivatives at theta [S, p] under weights [S, n]."""
        terms = self.law.terms(theta, self.points, curved=exact)
        total, shares = log_sum([term.value for term in terms])
        residual = total - np.log(self.points.loss)
        size = np.abs(residual)
        quadratic = size <= self.delta
        huber = np.where(quadratic, 0.5 * residual**2, self.delta * (size - 0.5 * self.delta))
        loss = (weights * huber).sum(axis=1)
        slope = weights * np.clip(residual, -self.delta, self.delta)
        jacobian = gradient(terms, shares, theta.shape[1])
        down = (jacobian @ slope[:, :, None])[:, :, 0]
        major = weights * np.minimum(1.0, self.delta / np.maximum(size, 1e-300))
        matrix = (jacobian * major[:, None]) @ jacobian.transpose(0, 2, 1)
        hessian = None
        if exact:
            hessian = (jacobian * (weights * quadratic - slope)[:, None]) @ jacobian.transpose(0, 2, 1)
            for term, share in zip(terms, shares, strict=True):
                bent = share * slope
                part = (term.first * bent[:, None]) @ term.first.transpose(0, 2, 1)
                if term.second is not None:
                    part = part + (term.second * bent[:, None, None]).sum(axis=3)
                hessian[:, np.array(term.params)[:, None], np.array(term.params)] += part
        return State(theta, loss, down, matrix, hessian)

    def free(self, theta: Array, down: Array) -> NDArray[np.bool_]:
        """[S, p]: parameters that may move; not those that the gradient presses against their bound."""
        low, high = self.box.T
        return (low < high) & ~((theta <= low) & (down > 0)) & ~((theta >= high) & (down < 0))

    def gap(self, state: "State") -> Array:
        """max |g_i| / sqrt(H_ii) over free parameters, over sqrt(Q), [S]: converged at or below `TOLERANCE`."""
        matrix = state.matrix if state.hessian is None else state.hessian
        bend = np.maximum(np.diagonal(matrix, axis1=1, axis2=2), 0.0)
        floor = 1e-6 * np.diagonal(state.matrix, axis1=1, axis2=2) + 1e-300
        scaled = np.abs(state.gradient) / np.sqrt(np.maximum(bend, floor))
        worst = np.where(self.free(state.theta, state.gradient), scaled, 0.0).max(axis=1, initial=0.0)
        perfect = state.loss <= PERFECT * len(self.points)
        return np.where(perfect, 0.0, worst / np.sqrt(np.maximum(state.loss, 1e-300)))


@dataclass(eq=False)
class State:
    """Where S searches stand."""

    theta: Array
    loss: Array
    gradient: Array
    matrix: Array
    """[S, p, p]: J' W J of the majorising quadratic."""
    hessian: Array | None
    """[S, p, p]: exact, where asked for."""

    def take(self, rows: NDArray[np.generic]) -> "State":
        """Some of the searches."""
        hessian = None if self.hessian is None else self.hessian[rows]
        return State(self.theta[rows], self.loss[rows], self.gradient[rows], self.matrix[rows], hessian)

    def put(self, rows: NDArray[np.generic], other: "State", chosen: NDArray[np.bool_]) -> None:
        """Overwrites the searches `rows[chosen]`."""
        for field in fields(self):
            mine = getattr(self, field.name)
            if mine is not None:
                mine[rows[chosen]] = getattr(other, field.name)[chosen]


@dataclass(frozen=True, eq=False)
class Minima:
    """Ends of S searches."""

    theta: Array
    loss: Array
    gap: Array
    iterations: NDArray[np.int64]

    @property
    def converged(self) -> NDArray[np.bool_]:
        return self.gap <= TOLERANCE

    @classmethod
    def join(cls, parts: list["Minima"]) -> "Minima":
        """The searches of all parts, in order."""
        return cls(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)))


def minimise(
    problem: Problem, starts: Array, weights: Array, *, exact: bool, tolerance: float = 0.0, chunk: int = CHUNK
) -> Minima:
    """Descends from every row of `starts` [S, p] under its row of `weights` [S, n] or [n].

    Args:
        exact: Newton with the exact Hessian, until converged; else Levenberg-Marquardt.
        tolerance: Relative fall of Q in one accepted step below which Levenberg-Marquardt ends.
    """
    rows = np.broadcast_to(weights, (len(starts), len(problem.points)))
    parts = [
        _descend(problem, starts[at : at + chunk], rows[at : at + chunk], exact, tolerance)
        for at in range(0, len(starts), chunk)
    ]
    return Minima.join(parts)


def _descend(problem: Problem, starts: Array, weights: Array, exact: bool, tolerance: float) -> Minima:
    low, high = problem.box.T
    state = problem.state(np.clip(starts, low, high), weights, exact)
    damping = np.full(len(starts), 1e-6 if exact else 1e-2)
    gap = problem.gap(state)
    iterations = np.zeros(len(starts), dtype=np.int64)
    live = np.flatnonzero(gap > TOLERANCE)
    for _ in range(NEWTONS if exact else DESCENTS):
        if not len(live):
            break
        now = state.take(live)
        theta = np.clip(now.theta + _step(problem, now, damping[live]), low, high)
        trial = problem.state(theta, weights[live], exact)
        trial_gap = problem.gap(trial)
        lower = trial.loss < now.loss
        # Within rounding of the minimum Q says nothing any more, and the gradient decides.
        flat = (trial.loss <= now.loss * (1 + 1e-13)) & (trial_gap < gap[live])
        good = lower | flat
        fall = (now.loss - trial.loss) / np.maximum(now.loss, 1e-300)
        state.put(live, trial, good)
        gap[live[good]] = trial_gap[good]
        iterations[live] += 1
        damping[live] = np.where(good, np.maximum(damping[live] * 0.2, 1e-15), np.minimum(damping[live] * 8, 1e12))
        stuck = ~good & (damping[live] >= 1e12)
        done = (gap[live] <= TOLERANCE) | stuck | (good & (fall < tolerance) & (not exact))
        live = live[~done]
    return Minima(state.theta, state.loss, gap, iterations)


def _step(problem: Problem, state: State, damping: Array) -> Array:
    """-(A + damping D)^-1 g over free parameters, with D the diagonal of the majorising matrix."""
    free = problem.free(state.theta, state.gradient)
    scale = np.sqrt(np.maximum(np.diagonal(state.matrix, axis1=1, axis2=2), 1e-300))
    scale = np.where(free, scale, 1.0)
    both = free[:, :, None] & free[:, None]
    outer = scale[:, :, None] * scale[:, None]
    eye = np.eye(state.theta.shape[1])
    down = np.where(free, state.gradient, 0.0) / scale
    major = np.where(both, state.matrix / outer, eye)
    if state.hessian is None:
        matrix = major + damping[:, None, None] * eye
        return -np.linalg.solve(matrix, down[:, :, None])[:, :, 0] / scale
    values, vectors = np.linalg.eigh(np.where(both, state.hessian / outer, eye))
    # Where the Huber loss is flat or bends down, the length of a step is that of the damping alone.
    bend = np.abs(values) + damping[:, None] + 1e-13
    along = (vectors.transpose(0, 2, 1) @ down[:, :, None])[:, :, 0]
    return -(vectors @ (along / bend)[:, :, None])[:, :, 0] / scale


def draw_starts(problem: Problem, count: int, draws: np.random.Generator) -> Array:
    """Points uniform in the box, [count, p]."""
    low, high = problem.box.T
    return low + (high - low) * draws.random((count, len(low)))


def project(problem: Problem, starts: Array, weights: Array, chunk: int = CHUNK) -> Array:
    """The starts with amplitudes by non-negative least squares of L(theta) / L - 1; the rest as it was."""
    linear = list(problem.law.linear)
    rows = np.broadcast_to(weights, (len(starts), len(problem.points)))
    found = starts.copy()
    low, high = problem.box[linear].T
    for at in range(0, len(starts), chunk):
        part = starts[at : at + chunk]
        terms = problem.law.terms(part, problem.points, curved=False)
        logs = np.stack([t.value - part[:, i, None] for t, i in zip(terms, linear, strict=True)], axis=1)
        unit = logs.max(axis=2, keepdims=True)
        columns = np.exp(logs - unit) / problem.points.loss
        amplitudes = nonnegative(columns, rows[at : at + chunk])
        with np.errstate(divide="ignore"):
            found[at : at + chunk, linear] = np.clip(np.log(amplitudes) - unit[:, :, 0], low, high)
    return found


def nonnegative(columns: Array, weights: Array) -> Array:
    """Least squares of `x @ columns` [S, K, n] to 1 with x >= 0, [S, K]: the best of all 2^K - 1 active sets."""
    weighted = columns * weights[:, None]
    gram, right = weighted @ columns.transpose(0, 2, 1), weighted.sum(axis=2)
    scale = np.sqrt(np.maximum(np.diagonal(gram, axis1=1, axis2=2), 1e-300))
    gram, right = gram / (scale[:, :, None] * scale[:, None]), right / scale
    best, value = np.zeros_like(right), np.full(len(right), np.inf)
    for active in _subsets(right.shape[1]):
        # Terms can be nearly parallel; a ridge at rounding level keeps the system solvable.
        own = gram[:, active[:, None], active] + 1e-14 * np.eye(len(active))
        part = np.linalg.solve(own, right[:, active][:, :, None])[:, :, 0]
        reached = -(part * right[:, active]).sum(axis=1)
        better = (part >= 0).all(axis=1) & (reached < value)
        value = np.where(better, reached, value)
        whole = np.zeros_like(right)
        whole[:, active] = part
        best = np.where(better[:, None], whole, best)
    return best / scale


def _subsets(size: int) -> Iterator[NDArray[np.int64]]:
    for count in range(1, size + 1):
        for active in itertools.combinations(range(size), count):
            yield np.array(active)
