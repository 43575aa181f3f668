"""Modulo: m slots, shared by every m-th iteration.

    a query at iteration t reads the newest KV[p, t'] with t' = t mod m; if p stopped before there was one, its newest

It changes the model unless m is at least the number of iterations. Known as `compress-s(layers * m)` in Huginn's code
(arXiv:2502.05171).
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from looplab._types import Float, Int
from looplab.recurrence.kv.base import Cache, KVRule
from looplab.recurrence.kv.newest import read_slot_or_newest


class ModuloCache(Cache):
    """Storage of `Modulo`."""

    rule: "Modulo"

    def slot(self, iteration: Any) -> Any:
        return iteration % self.rule.m

    def past(
        self, block: int, store: Tensor, iteration: Int[Tensor, " batch"], end: int
    ) -> Float[Tensor, "batch kv_heads visible head_dim"]:
        return read_slot_or_newest(self, block, store, iteration, end)


@dataclass(frozen=True, kw_only=True)
class Modulo(KVRule):
    """m slots per core layer."""

    cache_class = ModuloCache

    m: int

    def __post_init__(self) -> None:
        if self.m < 1:
            raise ValueError(f"Modulo.m must be at least 1. Got {self.m}. Use Single() for one slot.")

    @property
    def size(self) -> int:
        return self.m
