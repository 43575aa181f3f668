"""Slow twins of norms, feed-forwards, norm placements and AdaLN, one token at a time. Imports nothing of looplab."""

import math

import torch


def rms_norm(x, eps, weight):
    """w x / rms(x) of one vector."""
    return weight * (x / torch.sqrt(sum(c * c for c in x) / len(x) + eps))


def layer_norm(x, eps, weight, bias):
    """w (x - mean) / std + b of one vector."""
    mean = sum(x) / len(x)
    variance = sum((c - mean) ** 2 for c in x) / len(x)
    return weight * (x - mean) / torch.sqrt(variance + eps) + bias


def feed_forward(kind, x, w, scale=1.0):
    """One token through a feed-forward branch; gated ones apply their function to the gate."""
    up = w["up.weight"] @ x
    gated = kind in ("SwiGLU", "GeGLU", "GatedReluSquared")
    a = w["gate.weight"] @ x if gated else up
    if kind in ("SwiGLU", "Silu"):
        a = a / (1 + torch.exp(-a))
    elif kind in ("ReluSquared", "GatedReluSquared"):
        a = scale * torch.where(a > 0, a, 0 * a) ** 2
    else:
        a = a * 0.5 * (1 + torch.erf(a / math.sqrt(2)))
    return w["down.weight"] @ (a * up if gated else a)


def place(kind, h, f, n1, n2, gate=1.0):
    """The stream after branch f under one placement; `gate` scales what is added."""
    if kind == "PreNorm":
        return h + gate * f(n1(h))
    if kind == "SandwichSum":
        return n2(h + gate * f(n1(h)))
    if kind == "PreAndBranch":
        return h + gate * n2(f(n1(h)))
    if kind == "BranchOnly":
        return h + gate * n2(f(h))
    if kind == "PostSum":
        return n2(h + gate * f(h))
    raise AssertionError(kind)


def time_code(x, freq_dim):
    """[cos | sin] of x at frequencies 10000^(-i / n), n = freq_dim / 2."""
    half = freq_dim // 2
    angles = [float(x) * 10000 ** (-i / half) for i in range(half)]
    return torch.tensor([math.cos(a) for a in angles] + [math.sin(a) for a in angles], dtype=torch.float64)


def time_mlp(x, w, name):
    """Linear, SiLU, Linear."""
    inner = w[f"{name}.0.weight"] @ x + w[f"{name}.0.bias"]
    inner = inner / (1 + torch.exp(-inner))
    return w[f"{name}.2.weight"] @ inner + w[f"{name}.2.bias"]
