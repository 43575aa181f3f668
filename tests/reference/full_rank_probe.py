"""Slow twin of the full-rank probe: its objective and gradient, one token and one feature after another."""

import math

import numpy as np


def softmax(row):
    largest = max(row)
    exponentials = [math.exp(value - largest) for value in row]
    total = sum(exponentials)
    return [value / total for value in exponentials]


def changed(hidden, matrix, shift, scale):
    """hidden + A hidden + s b of one token."""
    return [
        hidden[i] + sum(matrix[i][j] * hidden[j] for j in range(len(hidden))) + scale * shift[i]
        for i in range(len(hidden))
    ]


def logits(hidden, weight):
    """Linear head, `weight` "vocab dim"."""
    return [sum(w * h for w, h in zip(row, hidden, strict=True)) for row in weight]


def objective(hidden, weight, wanted, matrix, shift, scale, strength):
    """Penalised mean loss and its gradient in [A b].

    `wanted`: one row of probabilities per token; a row with a single 1 is nll, the full depth's output is kl.
    """
    dim = len(shift)
    loss = strength * (sum(a * a for row in matrix for a in row) + sum(b * b for b in shift))
    gradient = 2 * strength * np.concatenate([np.array(matrix), np.array(shift)[:, None]], axis=1)
    for h, q in zip(hidden, wanted, strict=True):
        p = softmax(logits(changed(h, matrix, shift, scale), weight))
        loss += sum(qv * (math.log(qv) - math.log(pv)) for qv, pv in zip(q, p, strict=True) if qv > 0) / len(hidden)
        for i in range(dim):
            slope = sum((pv - qv) * row[i] for pv, qv, row in zip(p, q, weight, strict=True)) / len(hidden)
            for j in range(dim):
                gradient[i, j] += slope * h[j]
            gradient[i, dim] += slope * scale
    return loss, gradient
