"""DepthIndexed: one slot per (layer, iteration), as looped models are trained.

    a query at iteration t reads KV[p, t] of a past token p; if p stopped before (t >= e(p)), the `missing` rule decides

Exact: cached decoding equals full recomputation as long as nothing is missing. Known from Ouro (arXiv:2510.25741),
Huginn's full cache (arXiv:2502.05171; `CopyLast` is its `latest-m4`) and Dory's `per_loop`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from looplab._types import Bool, Float, Int
from looplab.recurrence.kv.base import Cache, KVRule
from looplab.recurrence.kv.newest import read_slot_or_newest


@dataclass(frozen=True)
class CopyLast:
    """Read the token's last entry, KV[p, e(p) - 1]."""


@dataclass(frozen=True)
class Skip:
    """Do not see the token at this iteration."""


@dataclass(frozen=True)
class Refuse:
    """Raise."""


class DepthIndexedCache(Cache):
    """Storage of `DepthIndexed`."""

    rule: "DepthIndexed"

    def slot(self, iteration: Any) -> Any:
        return iteration

    def past(
        self, block: int, store: Tensor, iteration: Int[Tensor, " batch"], end: int
    ) -> Float[Tensor, "batch kv_heads visible head_dim"]:
        if isinstance(self.rule.missing, CopyLast):
            return read_slot_or_newest(self, block, store, iteration, end)
        if self.uniform is not None:
            return store[self.uniform, :, :, :end]
        store = store[:, :, :, :end]
        return store[iteration, torch.arange(store.shape[1], device=store.device)]

    def missing(self, block: int, iteration: Int[Tensor, " batch"]) -> Bool[Tensor, "batch past"] | None:
        if isinstance(self.rule.missing, CopyLast):
            return super().missing(block, iteration)
        if not self._some_missing(block):
            return None
        absent = (iteration[:, None] >= self.executed[block][:, : self.length]) & self.valid[:, : self.length]
        if self._active is not None:  # what an inactive row would read is thrown away
            absent = absent & self._active[:, None]
        if isinstance(self.rule.missing, Refuse) and bool(absent.any()):
            row, token = (int(i) for i in absent.nonzero()[0])
            raise ValueError(
                f"cache: token {token} of row {row} ran {int(self.executed[block][row, token])} iterations; iteration "
                f"{int(iteration[row])} of block {block} is asked for. Use DepthIndexed(missing=CopyLast()) or Skip()."
            )
        return absent

    def _some_missing(self, block: int) -> bool:
        """False if no past token stopped before the iteration of this launch; True also where rows differ."""
        least = self.least(block)
        return self.length > 0 and (
            least <= self.uniform if self.uniform is not None else least < self.iterations[block]
        )


@dataclass(frozen=True, kw_only=True)
class DepthIndexed(KVRule):
    """One slot per iteration; `missing` says what stands in for an entry that was never written."""

    cache_class = DepthIndexedCache

    missing: CopyLast | Skip | Refuse = Refuse()

    @property
    def exact(self) -> bool:
        return isinstance(self.missing, Refuse)
