"""Average: one slot per layer, which keeps the mean over a token's iterations.

    a query at iteration t reads mean over t' < e(p) of KV[p, t'], of a past token p, and its own call's tokens at t

Keys and values are averaged each for themselves, in float32 (float64 for float64 models). It changes the model and
exists for study: Ouro's authors measured it (arXiv:2510.25741).

During a call the slot holds the call's own tokens at the current iteration, where their queries look for them; the sum
over iterations waits beside it, and its mean takes the place when the call ends.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from looplab._types import Bool, Int
from looplab.recurrence.kv.base import KVRule
from looplab.recurrence.kv.single import SingleCache


class AverageCache(SingleCache):
    """Storage of `Average`."""

    gathers = True

    def gather(
        self,
        before: Tensor | None,
        new: Tensor,
        iteration: Int[Tensor, " batch"],
        active: Bool[Tensor, " batch"] | None,
    ) -> Tensor:
        wide = new.to(torch.promote_types(new.dtype, torch.float32))
        if active is not None:
            wide = torch.where(active.view(-1, 1, 1, 1), wide, torch.zeros_like(wide))
        return wide.clone() if before is None else before + wide

    def kept(self, gathered: Tensor, executed: Int[Tensor, "batch seq"]) -> Tensor:
        return gathered / executed.clamp(min=1)[:, None, :, None]


@dataclass(frozen=True, kw_only=True)
class Average(KVRule):
    """One slot per core layer, the mean of all iterations."""

    cache_class = AverageCache
