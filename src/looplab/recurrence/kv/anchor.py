"""Anchor: the first n iterations keep their own slots, all later ones share one.

    a query at iteration t < n reads KV[p, t], a later one the newest KV[p, t'] with t' >= n; if p stopped before there
    was one, its newest

It changes the model unless n + 1 is at least the number of iterations. Known as `compress-anchor` (n = 8) in Huginn's
code (arXiv:2502.05171).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from looplab._types import Float, Int
from looplab.recurrence.kv.base import Cache, KVRule
from looplab.recurrence.kv.newest import read_slot_or_newest


@dataclass(frozen=True, kw_only=True)
class Anchor(KVRule):
    """n + 1 slots per core layer."""

    n: int

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"Anchor.n must be at least 1. Got {self.n}. Use Single() for one slot.")

    @property
    def size(self) -> int:
        return self.n

    def cache(
        self,
        *,
        rows: int,
        capacity: int,
        iterations: Mapping[int, int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> "AnchorCache":
        return AnchorCache(self, rows=rows, capacity=capacity, iterations=iterations, dtype=dtype, device=device)


class AnchorCache(Cache):
    """Storage of `Anchor`."""

    rule: Anchor

    def slot(self, iteration: Any) -> Any:
        return iteration.clamp(max=self.rule.n) if isinstance(iteration, Tensor) else min(iteration, self.rule.n)

    def past(
        self, block: int, store: Tensor, iteration: Int[Tensor, " batch"], end: int
    ) -> Float[Tensor, "batch kv_heads visible head_dim"]:
        return read_slot_or_newest(self, block, store, iteration, end)
