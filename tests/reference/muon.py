"""Muon from its equations: singular values moved one by one, matrices one by one. Imports nothing of the package."""

import torch


def moved(value):
    """What five Newton-Schulz steps make of one singular value: s <- 3.4445 s - 4.7750 s^3 + 2.0315 s^5."""
    for _ in range(5):
        value = 3.4445 * value - 4.7750 * value**3 + 2.0315 * value**5
    return value


def orthogonal(matrix):
    """U f(S / |S|) V^T of one matrix."""
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    size = float(torch.sqrt((s * s).sum()))
    values = [moved(float(value) / size) for value in s]
    return u @ torch.diag(torch.tensor(values, dtype=matrix.dtype)) @ vh


def updated(weight, gradients, *, lr, decay, beta=0.95):
    """One matrix after an update for every gradient."""
    momentum = torch.zeros_like(weight)
    for gradient in gradients:
        momentum = beta * momentum + gradient
        direction = gradient + beta * momentum
        rows, cols = weight.shape
        scale = (rows / cols) ** 0.5 if rows > cols else 1.0
        weight = weight - lr * decay * weight - lr * scale * orthogonal(direction)
    return weight
