"""Slow twins of injections, state starts, boundaries and updates, one token at a time. Imports nothing of looplab."""

import math
from statistics import NormalDist

import torch


def softplus(x):
    """log(1 + e^x)."""
    return torch.log(1 + torch.exp(x))


def sigmoid(x):
    """1 / (1 + e^-x)."""
    return 1 / (1 + torch.exp(-x))


def inject(kind, s, e, t, w, *, order=None, eps=1e-6, value=1.0):
    """u of one token at iteration t."""
    if kind == "Add":
        return s + value * e
    if kind == "LearnedScalar":
        normed = w["rule.weight.norm.weight"] * e / torch.sqrt((e * e).mean() + eps)
        return s if t == 0 else s + w["rule.weight.alpha"] * normed
    if kind == "Concat":
        return w["rule.w.weight"] @ torch.cat([e, s] if order == "embeds_first" else [s, e]) + w.get("rule.w.bias", 0)
    if kind == "Gated":
        g = sigmoid(w["rule.gate.weight"] @ torch.cat([s, e]) + w["rule.gate.bias"])
        return g * s + (1 - g) * e
    dt, a = softplus(w["rule.dt_bias"]), torch.exp(w["rule.a_log"])
    carried, entering = torch.exp(-dt * a) * s, dt * (w["rule.w.weight"] @ e)
    if kind == "Diagonal":
        return carried + entering
    overlap = sum(carried * entering) / (sum(entering * entering) + eps)
    return carried - overlap * entering + entering


def truncated(z, cut):
    """Phi^-1(Phi(-c) + Phi(z) (Phi(c) - Phi(-c))) of one number."""
    phi = NormalDist()
    return phi.inv_cdf(phi.cdf(-cut) + phi.cdf(z) * (phi.cdf(cut) - phi.cdf(-cut)))


def update(kind, s, h, w, *, alpha=None, tau=1.0, previous=None):
    """(next state, energy or None) of one token."""
    if kind == "Damped":
        return alpha * h + (1 - alpha) * s, None
    if kind == "Selective":
        a = torch.exp(-softplus(w["w.weight"] @ (h - s)) * torch.exp(w["a_log"]))
        return a * h + (1 - a) * s, None
    inner = w["up.weight"] @ torch.cat([s, h])
    energy = (w["down.weight"] @ (inner * sigmoid(inner)) + w["down.bias"])[0]
    change = 0.0 if previous is None else torch.abs(previous - energy)
    g = sigmoid(-(energy + 0.5 * change) / tau)
    return g * h + (1 - g) * s, energy


def like_init_std(dim):
    """Huginn's start of matrices."""
    return math.sqrt(2 / (5 * dim))
