"""Anchor: the first n iterations keep their own slots, all later ones share one.

    a query at iteration t < n reads KV[p, t], a later one the newest KV[p, t'] with t' >= n; if p stopped before there
    was one, its newest

It changes the model unless n + 1 is at least the number of iterations. Known as `compress-anchor` (n = 8) in Huginn's
code (arXiv:2502.05171).
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from looplab._types import Float, Int
from looplab.recurrence.kv.base import Cache, KVRule
from looplab.recurrence.kv.newest import read_slot_or_newest


class AnchorCache(Cache):
    """Storage of `Anchor`."""

    rule: "Anchor"

    def slot(self, iteration: Any) -> Any:
        return iteration.clamp(max=self.rule.n) if isinstance(iteration, Tensor) else min(iteration, self.rule.n)

    def past(
        self, block: int, store: Tensor, iteration: Int[Tensor, " batch"], end: int
    ) -> Float[Tensor, "batch kv_heads visible head_dim"]:
        return read_slot_or_newest(self, block, store, iteration, end)


@dataclass(frozen=True, kw_only=True)
class Anchor(KVRule):
    """n + 1 slots per core layer."""

    cache_class = AnchorCache

    n: int

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"Anchor.n must be at least 1. Got {self.n}. Use Single() for one slot.")

    @property
    def size(self) -> int:
        return self.n
