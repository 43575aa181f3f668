"""Slow twin of the IFM ablation models, over tensors of the original's names. Imports nothing of looplab.

Executes the order of layers that the recipe describes, one state update at a time; what the files leave open is an
argument.
"""

import math

import torch
import torch.nn.functional as F


def logits(m, tensors, tokens, start=None, *, gate="fc1", rope="interleaved"):
    """Logits [rows, tokens, vocab]. `m`: settings; `start`: a random first state (or low state), as it is."""
    run = lambda first, last, x: _stack(m, tensors, range(first, last), x, gate, rope)  # noqa: E731
    e = tensors["embed.weight"][tokens]
    total = m["num_layers"]
    if m.get("arch") == "huginn":
        first = m["huginn_prelude_layers"]
        last = total - m["huginn_coda_layers"]
        x = run(last, total, _recur(m, tensors, run, run(0, first, e), start, first, last))
    else:
        first, last = m.get("loop_start_layer", 0), m.get("loop_end_layers") or total
        x = run(0, first, e)
        for _ in range(m.get("loop_times", 1)):
            if m.get("loop_input_injection", "none") != "none":
                x = _inject(m, tensors, "loop_input_injection_module", x, e)
            x = run(first, last, x)
        x = run(last, total, x)
    return _norm(m, x, tensors["output.final_norm.weight"]) @ tensors["output.output.weight"].T


def _recur(m, tensors, run, e, start, first, last):
    if "huginn_prelude_norm_module.weight" in tensors:
        e = _norm(m, e, tensors["huginn_prelude_norm_module.weight"])
    s = {"input": e, "normal": start, "zero": torch.zeros_like(e)}[m["huginn_state_init"]]
    kind = m.get("huginn_hierarchical_state", "none")

    def update(x, first, last):
        if m.get("huginn_input_injection", "diagonal") != "none":
            x = _inject(m, tensors, "input_injection", x, e)
        for _ in range(m.get("huginn_split_module_repeats", 1)):
            x = run(first, last, x)
        return x

    if kind == "none":
        for _ in range(m["loop_times"]):
            s = update(s, first, last)
            if m.get("huginn_recurrent_exit_norm", "none") != "none":
                s = s / torch.sqrt((s * s).mean(-1, keepdim=True) + 1e-6)
        return s
    half = (first + last) // 2
    high_layers, low_layers = ((first, half), (half, last)) if kind == "split_hl" else ((first, last), (first, last))
    low, high = s, e
    for _ in range(m.get("huginn_hierarchical_h_cycles", 2)):
        for _ in range(m.get("huginn_hierarchical_l_cycles", 3)):
            low = update(low + high, *low_layers)
        high = update(high + low, *high_layers)
    return high


def _inject(m, tensors, module, s, e):
    part = lambda name: tensors[f"{module}.{name}"]  # noqa: E731
    if f"{module}.adapter.weight" in tensors:
        return torch.cat([s, e], dim=-1) @ part("adapter.weight").T + part("adapter.bias")
    dt = torch.log(1 + torch.exp(part("dt_bias")))
    kept, new = torch.exp(-dt * torch.exp(part("A_log"))) * s, dt * (e @ part("input_adapter.weight").T)
    if m.get("huginn_prelude_orthogonal", False):
        kept = kept - (kept * new).sum(-1, keepdim=True) / ((new * new).sum(-1, keepdim=True) + 1e-6) * new
    return kept + new


def _norm(m, x, weight):
    return (1 + weight) * x / torch.sqrt((x * x).mean(-1, keepdim=True) + m.get("rmsnorm_eps", 1e-6))


def _stack(m, tensors, layers, x, gate, rope):
    for i in layers:
        part = lambda name, i=i: tensors[f"layers.{i}.{name}.weight"]  # noqa: E731
        x = x + _attention(m, part, _norm(m, x, part("attention.norm")), rope)
        y = _norm(m, x, part("nffn.norm"))
        up = "fc3" if gate == "fc1" else "fc1"
        x = x + (F.silu(y @ part(f"nffn.{gate}").T) * (y @ part(f"nffn.{up}").T)) @ part("nffn.fc2").T
    return x


def _attention(m, part, x, rope):
    heads, groups = m["num_heads"], m["num_heads"] // m["num_kv_heads"]
    split = lambda y: y.unflatten(-1, (-1, m["head_dim"])).transpose(1, 2)  # noqa: E731
    q, k, v = (split(x @ part(f"attention.w{name}").T) for name in "qkv")
    q, k = _rotate(m, q, rope), _rotate(m, k, rope)
    out = []
    for head in range(heads):
        score = q[:, head] @ k[:, head // groups].mT / math.sqrt(m["head_dim"])
        hidden = torch.ones_like(score, dtype=torch.bool).triu(1)
        out.append(torch.softmax(score.masked_fill(hidden, -math.inf), -1) @ v[:, head // groups])
    return torch.cat(out, dim=-1) @ part("attention.wo").T


def _rotate(m, x, rope):
    """Each pair of channels as a complex number times exp(i angle); angles have the precision of float32."""
    half = m["head_dim"] // 2
    at = torch.arange(x.shape[2], dtype=torch.float32)
    turns = torch.tensor([m["rope_base"] ** (-2 * j / m["head_dim"]) for j in range(half)], dtype=torch.float32)
    angle = (at[:, None] * turns).to(x.dtype)
    unit = torch.complex(angle.cos(), angle.sin())
    if rope == "interleaved":
        pairs = torch.view_as_complex(x.unflatten(-1, (half, 2)).contiguous())
        return torch.view_as_real(pairs * unit).flatten(-2)
    pairs = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * unit
    return torch.cat([pairs.real, pairs.imag], dim=-1)
