"""Slow twins of the temperature fit and of calibration scores: plain loops in float64, from the definitions."""

import math

import numpy as np


def mean_loss(logits, targets, beta):
    """mean_i [ logsumexp(beta z_i) - beta <q_i, z_i> ]; targets are ids or rows of probabilities."""
    total = 0.0
    for row, target in zip(np.asarray(logits, dtype=np.float64), targets, strict=True):
        scaled = beta * row
        largest = scaled.max()
        log_sum = largest + math.log(sum(math.exp(value - largest) for value in scaled))
        total += log_sum - (scaled[target] if np.ndim(target) == 0 else float(np.dot(target, scaled)))
    return total / len(logits)


def golden_section(function, low, high, *, tolerance=1e-12):
    """The minimiser of a unimodal function of x on [low, high], by golden section."""
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = function(left), function(right)
    while high - low > tolerance * max(abs(low), abs(high)):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = function(right)
    return (low + high) / 2


def fit(logits, targets, *, low=1e-4, high=2e3, sweeps=240, weights=None):
    """beta with the least mean loss, by golden section in log beta; vectorised over tokens, otherwise plain."""
    logits = np.asarray(logits, dtype=np.float64)
    targets = np.asarray(targets)
    weights = np.ones(len(logits)) if weights is None else np.asarray(weights, dtype=np.float64)
    largest = logits.max(axis=1)
    chosen = logits[np.arange(len(logits)), targets] if targets.ndim == 1 else (logits * targets).sum(axis=1)

    def loss(log_beta):
        beta = math.exp(log_beta)
        sums = np.exp(beta * (logits - largest[:, None])).sum(axis=1)
        values = np.log(sums) + beta * largest - beta * chosen
        return float((weights * values).sum() / weights.sum())

    best = golden_section(loss, math.log(low), math.log(high), tolerance=1e-13)
    return math.exp(best), loss(best)


def calibration_error(confidence, correct, bins):
    """Equal-width bins (low, high], the first closed, by one loop over bins and one over items."""
    error = 0.0
    for b in range(bins):
        low, high = b / bins, (b + 1) / bins
        inside = [i for i, c in enumerate(confidence) if (low < c <= high) or (b == 0 and c == 0)]
        if inside:
            accuracy = sum(bool(correct[i]) for i in inside) / len(inside)
            average = sum(float(confidence[i]) for i in inside) / len(inside)
            error += len(inside) / len(confidence) * abs(accuracy - average)
    return error


def token_statistics(row, target):
    """Loss, top-1 confidence, entropy, Brier score, top-1 correctness, norms of one row of logits."""
    row = [float(value) for value in row]
    largest = max(row)
    exponentials = [math.exp(value - largest) for value in row]
    total = sum(exponentials)
    p = [value / total for value in exponentials]
    mean = sum(row) / len(row)
    return {
        "nll": -math.log(p[target]) if p[target] > 0 else math.inf,
        "confidence": max(p),
        "entropy": -sum(q * math.log(q) for q in p if q > 0),
        "brier": sum((q - (j == target)) ** 2 for j, q in enumerate(p)),
        "correct": row.index(largest) == target,
        "logit_norm": math.sqrt(sum(value**2 for value in row)),
        "centred_norm": math.sqrt(sum((value - mean) ** 2 for value in row)),
    }
