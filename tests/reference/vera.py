"""Slow twin of VERA (arXiv:2609.19934): one row, one token, one head at a time, on tensors under their original names.

Written from the equations of the paper's public model definition. Imports nothing of looplab.
"""

import math

import numpy as np
import torch


def rms_norm(x, weight, eps):
    return weight * x / torch.sqrt((x * x).sum() / len(x) + eps)


def silu(x):
    return x / (1 + torch.exp(-x))


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def softmax(scores):
    top = max(t.item() for t in scores)
    powers = [torch.exp(s - top) for s in scores]
    return [p / sum(powers) for p in powers]


def mean(vectors):
    return sum(vectors) / len(vectors)


def rotate(x, position, bases, weights):
    """One head's vector; a pair turns by the weighted mean of cosines and sines over the bases."""
    d, out = len(x), []
    for i in range(d // 2):
        angles = [float(np.float32(position) * np.float32(base ** (-2 * i / d))) for base in bases]
        c = sum(w * math.cos(a) for w, a in zip(weights, angles, strict=True))
        s = sum(w * math.sin(a) for w, a in zip(weights, angles, strict=True))
        out += [x[2 * i] * c - x[2 * i + 1] * s, x[2 * i] * s + x[2 * i + 1] * c]
    return torch.stack(out)


class Vera:
    """The whole model. `w`: original name -> tensor; `facts`: original settings; `hard`: routing of the branches."""

    def __init__(self, w, facts, hard):
        self.w, self.f, self.hard = w, facts, hard
        self.eps = facts["norm_eps"]

    def attention(self, name, queries, keys, values, positions, operator, visible):
        """What each slot reads; `visible(i, j)` tells whether slot i sees slot j."""
        f, w = self.f, self.w
        heads, kv_heads, d = f["n_heads"], f["n_kv_heads"], f["dim"] // f["n_heads"]
        logits = w[f"{name}.rope.mix_logits"]
        bases = (f["rope_thetas_lang"], f["rope_thetas_op"])
        group = heads // kv_heads

        def weights(stream, head):
            return softmax(list(logits[stream, head]))

        out = []
        for i in range(len(queries)):
            parts = []
            for head in range(heads):
                kv = head // group
                q = rotate(
                    queries[i][head * d : (head + 1) * d],
                    positions[i],
                    bases[operator[i]],
                    weights(operator[i], head),
                )
                seen = [j for j in range(len(keys)) if visible(i, j)]
                scores, read = [], []
                for j in seen:
                    shared = [weights(operator[j], h) for h in range(kv * group, (kv + 1) * group)]
                    mixed = [sum(one[b] for one in shared) / group for b in range(logits.shape[2])]
                    k = rotate(keys[j][kv * d : (kv + 1) * d], positions[j], bases[operator[j]], mixed)
                    scores.append((q * k).sum() / math.sqrt(d))
                    read.append(values[j][kv * d : (kv + 1) * d])
                parts.append(sum(p * v for p, v in zip(softmax(scores), read, strict=True)))
            out.append(w[f"{name}.wo.weight"] @ torch.cat(parts))
        return out

    def feed_forward(self, name, x):
        w = self.w
        return w[f"{name}.down.weight"] @ (silu(w[f"{name}.gate.weight"] @ x) * (w[f"{name}.up.weight"] @ x))

    def layer(self, name, u, keys, values, positions, operator, visible):
        """A layer of pre-norms; `keys` and `values` of the normed stream's slots."""
        y = [rms_norm(x, self.w[f"{name}.attn_norm.weight"], self.eps) for x in u]
        q = [self.w[f"{name}.attention.wq.weight"] @ x for x in y]
        read = self.attention(f"{name}.attention", q, keys(y), values(y), positions, operator, visible)
        h = [x + r for x, r in zip(u, read, strict=True)]
        return [
            x + self.feed_forward(f"{name}.ffn", rms_norm(x, self.w[f"{name}.ffn_norm.weight"], self.eps)) for x in h
        ]

    def run(self, tokens, operators, plan):
        """Logits per token, and after each number of applications: x, thoughts, energies, gated states, verifier."""
        f, w = self.f, self.w
        x = [w["tok_embeddings.weight"][t] for t in tokens]
        operator = [int(t in operators) for t in tokens]
        for i in range(f["n_perception_layers"]):
            name = f"perception_layers.{i}"

            def keys(y, name=name):
                return [w[f"{name}.attention.wk.weight"] @ v for v in y]

            def values(y, name=name):
                return [w[f"{name}.attention.wv.weight"] @ v for v in y]

            x = self.layer(name, x, keys, values, range(len(x)), operator, lambda i, j: j <= i)
        x = [rms_norm(v, w["mid_norm.weight"], self.eps) for v in x]
        count = f["n_thought_tokens"]
        thoughts = list(w["thought_tokens.thought_embeds"])
        energy = None
        gated = {b: [torch.zeros_like(x[0])] * (count + len(x)) for b in range(f["n_reasoning_blocks"])}
        trace = [self.snapshot(x, thoughts, energy, gated)]
        for block, iteration in plan:
            thoughts, branches = self.think(thoughts, f["max_reasoning_iters"] * block + iteration)
            x = self.bridge(thoughts, branches, x)
            u = [*thoughts, *x]
            u, energy, gated[block] = self.block(block, u, energy, gated[block], [0] * count + operator)
            thoughts, x = u[:count], u[count:]
            trace.append(self.snapshot(x, thoughts, energy, gated))
        final = [rms_norm(v, w["final_norm.weight"], self.eps) for v in x]
        return torch.stack([w["tok_embeddings.weight"] @ v for v in final]), trace

    def snapshot(self, x, thoughts, energy, gated):
        score = self.verify(thoughts, x) if self.f["use_verifier"] else None
        return {
            "x": torch.stack(x),
            "thoughts": torch.stack(thoughts),
            "energy": None if energy is None else torch.stack(energy),
            "gated": [torch.stack(gated[b]) for b in sorted(gated)],
            "score": score,
        }

    def think(self, thoughts, index):
        w, name = self.w, "thought_tokens.tree"
        r = [rms_norm(t, w["thought_tokens.thought_norm.weight"], 1e-6) for t in thoughts]
        r = [t + w["thought_tokens.iter_embeds"][index] for t in r]
        branches = []
        for i in range(self.f["n_branches"]):
            part = f"{name}.branch_proj.{i}"
            normed = [rms_norm(t, w[f"{part}.0.weight"], self.eps) for t in r]
            branches.append(
                [t + w[f"{part}.3.weight"] @ silu(w[f"{part}.1.weight"] @ n) for t, n in zip(r, normed, strict=True)]
            )
        everything = mean([t for branch in branches for t in branch])
        scores = w[f"{name}.router.2.weight"] @ silu(w[f"{name}.router.0.weight"] @ everything)
        scores = list(scores + w[f"{name}.router.2.bias"])
        if self.hard:
            return branches[max(range(len(scores)), key=lambda i: scores[i].item())], branches
        weights = softmax(scores)
        merged = [sum(p * b[n] for p, b in zip(weights, branches, strict=True)) for n in range(len(thoughts))]
        return merged, branches

    def bridge(self, thoughts, branches, x):
        w, name = self.w, "thought_bridge"
        out = []
        for i in range(len(x)):
            prefix = mean(x[: i + 1])
            read = torch.cat([mean(thoughts), prefix])
            scores = w[f"{name}.pos_router.2.weight"] @ silu(w[f"{name}.pos_router.0.weight"] @ read)
            weights = softmax(list(scores + w[f"{name}.pos_router.2.bias"]))
            thought = sum(p * mean(b) for p, b in zip(weights, branches, strict=True))
            told = w[f"{name}.thought_proj.weight"] @ thought + w[f"{name}.prefix_proj.weight"] @ prefix
            out.append(x[i] + w[f"{name}.out_proj.weight"] @ told)
        return out

    def block(self, block, u, before, gated, operator):
        w, name = self.w, f"reasoning_blocks.{block}"
        melt, net, count = f"{name}.melt_kv", f"{name}.halt.energy_net", self.f["n_thought_tokens"]
        fresh = []
        for x, h in zip(u, gated, strict=True):
            y = rms_norm(x, w[f"{name}.attn_norm.weight"], self.eps)
            z = sigmoid(w[f"{melt}.W_z.weight"] @ y + w[f"{melt}.U_z.weight"] @ h + w[f"{melt}.b_z"])
            fresh.append(z * h + (1 - z) * torch.tanh(w[f"{melt}.W_h.weight"] @ y))

        def visible(i, j):
            if i < count or j < count:
                return i < count and j < count
            return j <= i

        h = self.layer(
            name,
            u,
            lambda y: [w[f"{melt}.W_k.weight"] @ s for s in fresh],
            lambda y: [w[f"{melt}.W_v.weight"] @ s for s in fresh],
            range(len(u)),
            operator,
            visible,
        )
        energies, out = [], []
        for i in range(len(u)):
            inner = silu(w[f"{net}.0.weight"] @ torch.cat([u[i], h[i]]))
            energy = (w[f"{net}.2.weight"] @ inner + w[f"{net}.2.bias"])[0]
            change = 0 if before is None else abs(energy - before[i])
            gate = sigmoid(-(energy + change / 2) / self.f["energy_temperature"])
            energies.append(energy)
            out.append(gate * h[i] + (1 - gate) * u[i])
        return out, energies, fresh

    def verify(self, thoughts, x):
        w = self.w
        told = w["thought_bridge.verifier_proj.weight"] @ mean(x)
        pooled = mean([rms_norm(t + told, w["verifier.norm.weight"], self.eps) for t in thoughts])
        return (w["verifier.net.2.weight"] @ silu(w["verifier.net.0.weight"] @ pooled) + w["verifier.net.2.bias"])[0]
