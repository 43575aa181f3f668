"""States: what the core maps to itself. A tensor, or a NamedTuple of tensors, whose first axis is the row.

`standard_noise` is the one source of initial noise: a function of (seed, item, position, channel) and of nothing else,
so a result never depends on the row's place, its neighbours, its length or how a prompt was cut.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from looplab._types import Bool, Float, Int
from looplab.recurrence.philox import philox

State = Tensor | tuple
"""`Float[Tensor, "batch seq dim_state"]`, or a NamedTuple whose fields are such tensors (or None)."""


def map(function: Callable[..., Any], *states: Any) -> Any:
    """`function` over corresponding leaves of one or more states (or contexts); None and plain values stay."""
    first = states[0]
    if isinstance(first, Tensor):
        return function(*states)
    if isinstance(first, tuple):
        mapped = (map(function, *parts) for parts in zip(*states, strict=True))
        return type(first)(*mapped) if hasattr(first, "_fields") else type(first)(mapped)
    return first


def leaves(state: Any) -> list[Tensor]:
    """All tensors of a state, in field order."""
    found: list[Tensor] = []
    map(found.append, state)
    return found


def select(state: Any, rows: Any) -> Any:
    """The given rows (an index, slice, list or mask) of every tensor."""
    return map(lambda leaf: leaf[rows], state)


def where(rows: Bool[Tensor, " batch"], yes: Any, no: Any) -> Any:
    """Rows of `yes` where the mask is True, of `no` elsewhere."""
    return map(lambda a, b: torch.where(rows.view(-1, *[1] * (a.dim() - 1)), a, b), yes, no)


def stack(states: Sequence[Any]) -> Any:
    """The rows of several states, one after another."""
    return map(lambda *parts: torch.cat(parts), *states)


def detach(state: Any) -> Any:
    """The same values without a graph."""
    return map(lambda leaf: leaf.detach(), state)


def nbytes(state: Any) -> int:
    """Bytes of all tensors."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(state))


def component(state: Any, name: str) -> Tensor:
    """The tensor of one state field; a state that is a tensor has the single field "state"."""
    return state if isinstance(state, Tensor) else getattr(state, name)


def item_of(*parts: str | bytes | int) -> int:
    """A 64-bit item number: the first 8 bytes of SHA-256 over the parts joined by ":"."""
    joined = b":".join(part if isinstance(part, bytes) else str(part).encode() for part in parts)
    return int.from_bytes(hashlib.sha256(joined).digest()[:8], "big")


def standard_noise(
    seed: int, items: Sequence[int], positions: Int[Tensor, "batch seq"], width: int
) -> Float[Tensor, "batch seq noise"]:
    """Standard normal numbers, float32 on the CPU, as a pure function of (seed, item, position, channel).

    Args:
        seed: 64-bit key.
        items: One 64-bit number per row.
        positions: Position of every token in its row.
        width: Channels per token.
    Source: Philox4x32-10 with counter (channel // 4, position, item low, item high); 24-bit uniforms; Box-Muller in
        float64.
    """
    if len(items) != positions.shape[0]:
        raise ValueError(f"standard_noise: items must have one entry per row ({positions.shape[0]}). Got {len(items)}.")
    batch, seq = positions.shape
    groups = -(-width // 4)
    counter = np.empty((batch, seq, groups, 4), np.uint64)
    counter[..., 0] = np.arange(groups, dtype=np.uint64)
    counter[..., 1] = positions.cpu().numpy().astype(np.uint64)[..., None]
    item = np.array([i & 0xFFFFFFFFFFFFFFFF for i in items], np.uint64)[:, None, None]
    counter[..., 2], counter[..., 3] = item & np.uint64(0xFFFFFFFF), item >> np.uint64(32)
    words = philox(counter, seed)
    uniform = ((words >> np.uint64(8)).astype(np.float64) + 0.5) * 2.0**-24
    radius = np.sqrt(-2.0 * np.log(uniform[..., 0::2]))
    angle = 2.0 * np.pi * uniform[..., 1::2]
    normal = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1)
    return torch.from_numpy(normal.reshape(batch, seq, groups * 4)[..., :width].astype(np.float32))
