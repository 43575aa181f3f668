"""Slow twin of attention: one query, one head, one key at a time, from the equations. Imports nothing of looplab."""

import math

import numpy as np
import torch


def rope_frequency(base, i, head_dim, llama3=None):
    """Radians per position of pair i; `llama3` = (factor, low, high, original length), as in the Llama 3.1 report."""
    f = base ** (-2 * i / head_dim)
    if llama3 is None:
        return f
    factor, low, high, original = llama3
    wavelength = 2 * math.pi / f
    if wavelength > original / low:
        return f / factor
    if wavelength < original / high:
        return f
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * f / factor + smooth * f


def rotate(x, position, base, pairing, llama3=None):
    """One head's vector, turned pair by pair; the angle is a float32 number."""
    d = len(x)
    out = [None] * d
    for i in range(d // 2):
        a, b = (i, i + d // 2) if pairing == "half" else (2 * i, 2 * i + 1)
        angle = float(np.float32(position) * np.float32(rope_frequency(base, i, d, llama3)))
        c, s = math.cos(angle), math.sin(angle)
        out[a] = x[a] * c - x[b] * s
        out[b] = x[a] * s + x[b] * c
    return torch.stack(out)


def rms(x, eps, weight=None):
    """x / sqrt(mean(x^2) + eps), times the weight."""
    y = x / torch.sqrt((x * x).mean() + eps)
    return y if weight is None else y * weight


def alibi_slopes(heads):
    """Press et al., 2022: powers of 2^(-8/n); between powers of two, every other one of the next power's."""
    if math.log2(heads).is_integer():
        return [2 ** (-8 * (i + 1) / heads) for i in range(heads)]
    power = 2 ** math.floor(math.log2(heads))
    return alibi_slopes(power) + alibi_slopes(2 * power)[0::2][: heads - power]


def attention(
    x,
    w,
    positions,
    *,
    heads,
    kv_heads,
    head_dim,
    rope=None,
    rope_first=True,
    norm=None,
    bias=None,
    window=None,
    softcap=None,
    causal=True,
    valid=None,
    documents=None,
    value_embeds=None,
    low_rank=None,
):
    """Outputs B T D.

    `w`: tensors named as parameters of the module ("q.weight", ...). `rope` = (base, pairing, llama3 or None); `norm` =
    (over, eps); `bias(h, distance)` = number; `low_rank[name]` = (a, b) per row.
    """
    batch, seq, _ = x.shape
    group = heads // kv_heads

    def linear(name, b, u):
        y = w[f"{name}.weight"] @ u
        if f"{name}.bias" in w:
            y = y + w[f"{name}.bias"]
        if low_rank is not None and name in low_rank:
            down, up = low_rank[name]
            y = y + up[b] @ (down[b] @ u)
        return y

    def prepared(name, b, t, count):
        y = linear(name, b, x[b, t])
        parts = [y[h * head_dim : (h + 1) * head_dim] for h in range(count)]
        if "qk_bias" in w:
            parts = [p + w["qk_bias"][0 if name == "q" else 1, h] for h, p in enumerate(parts)]
        for step in ("rope", "norm") if rope_first else ("norm", "rope"):
            if step == "rope" and rope is not None:
                parts = [rotate(p, int(positions[b, t]), *rope) for p in parts]
            if step == "norm" and norm is not None:
                over, eps = norm
                weight = w.get(f"{name}_norm.weight")
                if over == "head":
                    parts = [rms(p, eps, weight) for p in parts]
                else:
                    whole = rms(torch.cat(parts), eps, weight)
                    parts = [whole[h * head_dim : (h + 1) * head_dim] for h in range(count)]
        return parts

    rows = []
    for b in range(batch):
        q = [prepared("q", b, t, heads) for t in range(seq)]
        k = [prepared("k", b, t, kv_heads) for t in range(seq)]
        v = []
        for t in range(seq):
            y = linear("v", b, x[b, t])
            parts = [y[h * head_dim : (h + 1) * head_dim] for h in range(kv_heads)]
            if value_embeds is not None:
                gate = w["value_gate.weight"] @ x[b, t, : w["value_gate.weight"].shape[1]]
                for h in range(kv_heads):
                    part = value_embeds[b, t, h * head_dim : (h + 1) * head_dim]
                    parts[h] = parts[h] + 2 / (1 + torch.exp(-gate[h])) * part
            v.append(parts)
        outputs = []
        for t in range(seq):
            distance = [int(positions[b, t] - positions[b, j]) for j in range(seq)]
            seen = [
                j
                for j in range(seq)
                if (not causal or j <= t)
                and (window is None or abs(distance[j]) < window)
                and (documents is None or documents[b, t] == documents[b, j])
                and (valid is None or valid[b, j])
            ] or [t]
            mixed = []
            for h in range(heads):
                scores = []
                for j in seen:
                    score = (q[t][h] * k[j][h // group]).sum() / math.sqrt(head_dim)
                    if softcap is not None:
                        score = softcap * torch.tanh(score / softcap)
                    if bias is not None:
                        score = score + bias(h, distance[j])
                    scores.append(score)
                top = max(s.item() for s in scores)
                powers = [torch.exp(s - top) for s in scores]
                total = sum(powers)
                mixed.append(sum(p / total * v[j][h // group] for p, j in zip(powers, seen, strict=True)))
            y = torch.cat(mixed)
            if "g.weight" in w:
                y = y / (1 + torch.exp(-linear("g", b, x[b, t])))
            outputs.append(linear("o", b, y))
        rows.append(torch.stack(outputs))
    return torch.stack(rows)
