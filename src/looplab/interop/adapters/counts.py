"""Exact counts of somebody else's model: what its modules hold and what its attention reads.

matmul = entries of all weight matrices below a module: linear layers, and the transposed ones of GPT-2
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from looplab.nn.cost import Group, Pairs, attention_pairs


@dataclass(frozen=True, kw_only=True)
class MixedGroup(Group):
    """Layers that run together and whose windows differ: `widths` has (heads * head_dim, window) per layer."""

    widths: tuple[tuple[int, int | None], ...] = ()

    def forward(self, *, tokens: int, past: int = 0, rows: int = 1, pairs: Pairs = "causal") -> int:
        matrices = 2 * self.matmul * tokens + 2 * self.matmul_per_row
        seen = (w * attention_pairs(tokens, past=past, pairs=pairs, window=window) for w, window in self.widths)
        return rows * (matrices + 4 * sum(seen))


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Heads of one layer."""

    width: int
    """heads * head_dim."""
    kv_width: int
    """2 * kv_heads * head_dim."""
    window: int | None = None
    """Keys a query may see, itself included; None: all."""


def attention_of(config: Any, layer: int) -> AttentionShape:
    """The attention of one layer, read from a configuration of the library."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    types = getattr(config, "layer_types", None)
    slides = types is None or types[layer] == "sliding_attention"
    window = getattr(config, "sliding_window", None) if slides else None
    return AttentionShape(width=heads * head_dim, kv_width=2 * kv_heads * head_dim, window=window)


def group(layers: Iterable[nn.Module], shapes: Sequence[AttentionShape], *, extra: int = 0, per_row: int = 0) -> Group:
    """The cost of layers that run together.

    Args:
        shapes: One per layer.
        extra: Matrix entries per token that are no linear layer's.
        per_row: Matrix entries per row and execution.
    """
    facts = {
        "matmul": matrix_entries(layers) + extra,
        "matmul_per_row": per_row,
        "attention_width": sum(shape.width for shape in shapes),
        "layers": len(shapes),
        "kv_width": sum(shape.kv_width for shape in shapes),
    }
    windows = {shape.window for shape in shapes}
    if len(windows) <= 1:
        return Group(**facts, window=next(iter(windows), None))
    return MixedGroup(**facts, widths=tuple((shape.width, shape.window) for shape in shapes))


def matrix_entries(modules: Iterable[nn.Module]) -> int:
    """Entries of the weight matrices below these modules that one token is multiplied with."""
    inner = (inside for module in modules for inside in module.modules())
    return sum(m.weight.numel() for m in inner if isinstance(m, (nn.Linear, Conv1D)))
