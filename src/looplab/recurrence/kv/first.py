"""First: one slot per layer, which keeps what iteration 0 wrote.

    a query at iteration t reads KV[p, 0] of a past token p, and its own call's tokens at t

It changes the model: cached decoding does not equal full recomputation, except for a plan of one iteration. Known as
first-loop sharing (measured by Ouro's authors, arXiv:2510.25741, at a quarter of the accuracy).

During a call the slot holds the call's own tokens at the current iteration, where their queries look for them; what
iteration 0 wrote waits beside it and takes the place when the call ends.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from looplab._types import Bool, Int
from looplab.recurrence.kv.base import KVRule
from looplab.recurrence.kv.single import SingleCache


class FirstCache(SingleCache):
    """Storage of `First`."""

    gathers = True

    def gather(
        self,
        before: Tensor | None,
        new: Tensor,
        iteration: Int[Tensor, " batch"],
        active: Bool[Tensor, " batch"] | None,
    ) -> Tensor:
        if before is None:
            return new.clone()
        if self.uniform is not None and self.uniform > 0:
            return before
        starts = iteration == 0 if active is None else (iteration == 0) & active
        return torch.where(starts.view(-1, 1, 1, 1), new, before)

    def kept(self, gathered: Tensor, executed: Int[Tensor, "batch seq"]) -> Tensor:
        return gathered


@dataclass(frozen=True, kw_only=True)
class First(KVRule):
    """One slot per core layer, written at iteration 0."""

    cache_class = FirstCache
