"""Geometry of vectors from the definitions: loops over tokens and pairs, and SciPy's square root of a matrix."""

import warnings

import numpy as np
from scipy import linalg


def norm(x):
    return float(np.sqrt(sum(float(value) ** 2 for value in x)))


def cosine(x, y):
    return sum(float(a) * float(b) for a, b in zip(x, y, strict=True)) / (norm(x) * norm(y))


def mean_cosine(xs, rs):
    """Mean over the rows where both have a direction, and how many have not."""
    found = [cosine(x, r) for x, r in zip(xs, rs, strict=True) if min(norm(x), norm(r)) >= 1e-12]
    return (sum(found) / len(found) if found else None), len(xs) - len(found)


def anisotropy(xs):
    """Mean cosine over all ordered pairs of different rows."""
    kept = [x for x in xs if norm(x) >= 1e-12]
    pairs = [cosine(kept[i], kept[j]) for i in range(len(kept)) for j in range(len(kept)) if i != j]
    return sum(pairs) / len(pairs) if pairs else None


def covariance(xs):
    """By its definition, divided by n - 1."""
    mean = sum(xs) / len(xs)
    return sum(np.outer(x - mean, x - mean) for x in xs) / (len(xs) - 1)


def cka(xs, rs):
    """Normalised Hilbert-Schmidt independence of linear kernels, tr(K H L H)."""
    n = len(xs)
    centre = np.eye(n) - np.full((n, n), 1 / n)
    k, m = (centre @ (z @ z.T) @ centre for z in (xs, rs))
    return np.trace(k @ m) / np.sqrt(np.trace(k @ k) * np.trace(m @ m))


def effective_rank(xs):
    """(sum of eigenvalues)^2 / sum of squared eigenvalues."""
    eigenvalues = np.linalg.eigvalsh(covariance(xs))
    return eigenvalues.sum() ** 2 / (eigenvalues**2).sum()


def root_of(matrix):
    """Square root of a symmetric matrix; a singular one has a root too, which SciPy warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", linalg.LinAlgWarning)
        return linalg.sqrtm(matrix).real


def frechet(xs, rs, limit=64):
    """Distance of two Gaussians in the leading principal directions of the second, over its trace there."""
    q = min(limit, xs.shape[1], len(xs) - 1)
    directions = np.linalg.eigh(covariance(rs))[1][:, ::-1][:, :q]
    x, r = xs @ directions, rs @ directions
    cx, cr = covariance(x), covariance(r)
    root = root_of(cr)
    middle = root_of(root @ cx @ root)
    apart = x.mean(axis=0) - r.mean(axis=0)
    return (apart @ apart + np.trace(cx + cr - 2 * middle)) / np.trace(cr)
