"""What rules of several slots share: a token that never reached a slot is read at the newest entry it has.

    slot read of a past token p at iteration t = min(slot(t), e(p) - 1)

which holds for every rule whose slots 0 .. k are filled in this order before any is overwritten.
"""

import torch
from torch import Tensor

from looplab._types import Float, Int
from looplab.recurrence.kv.base import Cache


def read_slot_or_newest(
    cache: Cache, block: int, store: Tensor, iteration: Int[Tensor, " batch"], end: int
) -> Float[Tensor, "batch kv_heads visible head_dim"]:
    """Tokens 0 .. end of `store` [slots, rows, kv_heads, capacity, head_dim], each row at its own iteration.

    A slice where all rows are at one iteration and every past token reached its slot, otherwise a gather.
    """
    store = store[:, :, :, :end]
    rows = torch.arange(store.shape[1], device=store.device)
    highest = store.shape[0] - 1 if cache.uniform is None else int(cache.slot(cache.uniform))
    if cache.length == 0 or cache.least(block) > highest:
        return store[highest] if cache.uniform is not None else store[cache.slot(iteration), rows]
    newest = cache.executed[block][:, : cache.length] - 1
    slot = cache.slot(iteration)[:, None].expand(-1, end).clone()
    slot[:, : cache.length] = torch.minimum(slot[:, : cache.length], newest.clamp(min=0))
    index = slot[None, :, None, :, None].expand(1, -1, store.shape[2], -1, store.shape[4])
    return store.gather(0, index)[0]
