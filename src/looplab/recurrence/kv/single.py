"""Single: one slot per layer, overwritten by every iteration.

    a query at iteration t reads KV[p, e(p) - 1] of a past token p, and its own call's tokens at t

It changes the model: cached decoding does not equal full recomputation, except for a plan of one iteration. Known as
terminal sharing (Ouro's authors, arXiv:2510.25741), and as `last_loop` in Dory.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from looplab._types import Float, Int
from looplab.recurrence.kv.base import Cache, KVRule


class SingleCache(Cache):
    """Storage of `Single`."""

    def slot(self, iteration: Any) -> Any:
        return iteration * 0

    def past(
        self, block: int, store: Tensor, iteration: Int[Tensor, " batch"], end: int
    ) -> Float[Tensor, "batch kv_heads visible head_dim"]:
        return store[0, :, :, :end]


@dataclass(frozen=True, kw_only=True)
class Single(KVRule):
    """One slot per core layer."""

    cache_class = SingleCache
