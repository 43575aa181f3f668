"""A slow twin of the scaling fit, from the papers: one search at a time by SciPy's L-BFGS-B.

L = E + A (n_once + r_b^phi_b (r_f / r_b)^phi_f n_rec)^-alpha + B D^-beta, with the summed Huber loss of ln L.
"""

import numpy as np
from scipy.optimize import minimize

DELTA = 1e-3
BOX = [(-5, 35), (0, 2.5), (-5, 35), (0, 2.5), (-3, 2), (-3, 3), (-3, 3)]


def objective(theta, rows, weights, scale):
    """scale times the summed Huber loss, and its gradient, at (a, alpha, b, beta, e, phi_b, phi_f)."""
    a, alpha, b, beta, e, phi_b, phi_f = theta
    n_once, n_rec, tokens, loss, forward, back = rows
    gain = back**phi_b * (forward / back) ** phi_f
    size = n_once + gain * n_rec
    parts = np.array([a - alpha * np.log(size), b - beta * np.log(tokens), np.full(len(loss), e)])
    top = parts.max(axis=0)
    total = top + np.log(np.exp(parts - top).sum(axis=0))
    share = np.exp(parts - total)
    residual = total - np.log(loss)
    small = np.abs(residual) <= DELTA
    value = np.where(small, residual**2 / 2, DELTA * (np.abs(residual) - DELTA / 2))
    slope = weights * np.clip(residual, -DELTA, DELTA)
    by_gain = -alpha * share[0] * gain * n_rec / size
    down = [
        share[0],
        -share[0] * np.log(size),
        share[1],
        -share[1] * np.log(tokens),
        share[2],
        by_gain * np.log(back),
        by_gain * np.log(forward / back),
    ]
    return scale * (weights * value).sum(), scale * (np.array(down) @ slope)


def search(start, rows, weights, *, scale=1e6, gradient=True, precise=True):
    """(theta, Q) of one search. Default tolerances of SciPy unless `precise`."""

    def value(theta):
        found = objective(theta, rows, weights, scale)
        return found if gradient else found[0]

    options = {"maxiter": 10_000, "maxfun": 100_000, **({"ftol": 1e-15, "gtol": 1e-9} if precise else {})}
    found = minimize(value, start, jac=gradient, method="L-BFGS-B", bounds=BOX, options=options)
    return found.x, found.fun / scale
