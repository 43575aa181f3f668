"""Counts of models: dispatched operators, attention kernels, compiled graphs, rows of the head. Nothing is timed."""

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from looplab.models.base import PRESETS, build
from looplab.recurrence.loop import forward, new_cache
from looplab.recurrence.state import standard_noise


class Operators(TorchDispatchMode):
    """Counts what is dispatched inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


def ops_per_application(options: Any) -> list[dict[str, Any]]:
    """Operators of encode, step, coda and head do not depend on the number of tokens or rows."""
    rows = []
    for name in (name for name in PRESETS if name.startswith("tiny-")):
        model, found = build(PRESETS[name]()), []
        if model.spec.extras.get("puzzle_ids"):
            continue  # built for one length
        for batch, length in ((1, 5), (1, 30), (6, 5)):
            found.append(_operators(model, batch, length))
        assert found[0] == found[1] == found[2], f"{name}: {found}"
        rows.append({"case": name, **found[0]})
    return rows


def _operators(model: Any, batch: int, length: int) -> dict[str, int]:
    ids, spec, counts = torch.ones(batch, length, dtype=torch.long), model.spec, {}
    places = torch.arange(length).expand(batch, length)
    noise = standard_noise(0, range(batch), places, spec.noise_width) if spec.noise_width else None
    with torch.no_grad():
        with Operators() as seen:
            context = model.encode(ids)
        counts["encode"] = seen.count.total()
        state = model.init_state(context, noise)
        with Operators() as seen:
            state = model.step(state, context, 0, torch.zeros(batch, dtype=torch.long))
        counts["step"] = seen.count.total()
        with Operators() as seen:
            model.head(model.coda(state, context))
        counts["coda + head"] = seen.count.total()
    return counts


def attention_paths(options: Any) -> list[dict[str, Any]]:
    """Which kernel runs: plain causal without a mask, one new token without a mask, the rest with one."""
    model, rows = build(PRESETS["tiny-dense"]()), []
    ids = torch.ones(2, 12, dtype=torch.long)
    padded = torch.ones(2, 12, dtype=torch.bool)
    padded[0, :3] = False

    def called(**options: Any) -> tuple[bool, bool]:
        seen: list[tuple[bool, bool]] = []
        original = F.scaled_dot_product_attention

        def spy(*args: Any, attn_mask: Any = None, is_causal: bool = False, **kwargs: Any) -> Any:
            seen.append((attn_mask is not None, is_causal))
            return original(*args, attn_mask=attn_mask, is_causal=is_causal, **kwargs)

        F.scaled_dot_product_attention = spy  # type: ignore[assignment]
        try:
            with torch.no_grad():
                forward(model, **options)
        finally:
            F.scaled_dot_product_attention = original
        assert len(set(seen)) == 1
        return seen[0]

    def filled() -> Any:
        cache = new_cache(model.spec, rows=2, capacity=32)
        with torch.no_grad():
            forward(model, ids, cache=cache)
        return cache

    for case, options, expected in (
        ("no padding", {"tokens": ids}, (False, True)),
        ("padding", {"tokens": ids, "valid": padded}, (True, False)),
        ("one new token", {"tokens": ids[:, :1], "cache": filled()}, (False, False)),
        ("four new tokens after twelve", {"tokens": ids[:, :4], "cache": filled()}, (True, False)),
    ):
        found = called(**options)
        assert found == expected, f"{case}: {found}"
        rows.append({"case": case, "mask": found[0], "is_causal": found[1]})
    return rows


def compile_step(options: Any) -> list[dict[str, Any]]:
    """One graph of `step` serves depths 1 to 16, without a break."""
    rows = []
    for name in ("tiny-core", "tiny-no-envelope", "tiny-huginn"):
        torch._dynamo.reset()
        model, graphs = build(PRESETS[name]()), []

        def backend(graph: Any, inputs: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(graph)
            return graph.forward

        step = torch.compile(model.step, fullgraph=True, backend=backend)
        ids = torch.ones(2, 8, dtype=torch.long)
        with torch.no_grad():
            context = model.encode(ids)
            width = model.spec.noise_width
            for depth in range(1, 17):
                noise = standard_noise(0, range(2), context.positions, width) if width else None
                state = model.init_state(context, noise)
                for iteration in range(depth):
                    state = step(state, context, 0, torch.full((2,), iteration))
        assert len(graphs) == 1, f"{name}: {len(graphs)} graphs"
        rows.append({"case": name, "graphs": len(graphs), "recompiles": len(graphs) - 1})
    return rows


def head_chunks(options: Any) -> list[dict[str, Any]]:
    """Rows of logits: those that are kept, and one chunk at a time in training."""
    from looplab.objectives.readout import summed_readout

    model, ids = build(PRESETS["tiny-dense"]()), torch.ones(2, 64, dtype=torch.long)
    made: list[int] = []
    model.lm_head.register_forward_hook(lambda module, args, out: made.append(out.numel() // out.shape[-1]))  # type: ignore[operator]
    rows = []
    with torch.no_grad():
        for keep, expected in ((None, 128), (1, 2), (0, 0)):
            made.clear()
            forward(model, ids, logits_to_keep=keep)
            assert sum(made) == expected
            rows.append(
                {"case": f"logits_to_keep={keep}", "rows of logits": sum(made), "at once": max(made, default=0)}
            )
        made.clear()
        hidden = forward(model, ids, logits_to_keep=0).hidden

        def score(logits: Any, labels: Any) -> tuple[Any, ...]:
            return (F.cross_entropy(logits, labels, reduction="sum"),)

        made.clear()
        summed_readout(model, hidden, ids, score, chunk=16)
        assert sum(made) == 128 and max(made) == 16
        rows.append({"case": "chunk=16", "rows of logits": sum(made), "at once": max(made)})
    return rows


CASES = {
    "ops_per_application": ops_per_application,
    "attention_paths": attention_paths,
    "compile_step": compile_step,
    "head_chunks": head_chunks,
}
