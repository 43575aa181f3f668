"""LoopCache: our key-value cache in the shape that `generate` of the transformers library hands around.

    slots      prelude layers | block 0: iteration 0 (layer 0, 1, ..), iteration 1, .. | block 1 .. | coda layers
    core       the cache of recurrence/kv, which owns all storage and knows what a query may read
    items      per row the number its starting noise is drawn by, settled at the first call

The library makes one cache layer per stored layer, which is too few where layers run several times. So a model that is
given an empty cache of the library returns a LoopCache of its own, which takes the other's place from then on.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache as LibraryCache
from transformers.cache_utils import CacheLayerMixin, DynamicCache

from looplab._types import Int
from looplab.recurrence.kv.base import Cache, KVRule
from looplab.recurrence.loop import new_cache
from looplab.recurrence.plan import CODA, PRELUDE, Steps
from looplab.recurrence.spec import LoopSpec

ROOM = 64
"""Tokens of room beyond the first call; after that the room doubles whenever it is used up."""


class LoopCache(LibraryCache):
    """Keys and values of every slot. Empty until a model has run with it, and then bound to that model's shape."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.core: Cache | None = None
        self.items: list[int] | None = None

    def make_room(
        self,
        spec: LoopSpec,
        *,
        rows: int,
        tokens: int,
        num_steps: Steps | None,
        rule: KVRule | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Cache:
        """The core, made at the first call and enlarged at later ones, with room for `tokens` more tokens.

        Raises:
            ValueError: Another rule than that of the tokens held, or what `new_cache` refuses.
        """
        if self.core is None:
            self.core = new_cache(
                spec, rows=rows, capacity=tokens + ROOM, num_steps=num_steps, rule=rule, dtype=dtype, device=device
            )
            self.layers = [*_slots(self, self.core, spec)]
        elif rule is not None and rule != self.core.rule:
            raise ValueError(
                f"kv_rule must be that of the cache, {self.core.rule}. Got {rule}. Start from an empty cache"
            )
        self.core.fits(rows, 0)
        if self.core.length + tokens > self.core.capacity:
            self.core.grow(max(self.core.length + tokens, 2 * self.core.capacity))
        return self.core

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens held."""
        return 0 if self.core is None else self.core.length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Place of the next token."""
        return self.get_seq_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Visible keys, and the place of the first of them."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: it grows."""
        return -1

    get_max_cache_shape = get_max_length  # its name before 5.24

    def reorder_cache(self, beam_idx: Int[Tensor, " rows"]) -> None:
        """Replaces the rows by these, as beam search asks for."""
        if self.core is not None:
            self.core.reorder(beam_idx.to(self.core.valid.device))
        if self.items is not None:
            self.items = [self.items[row] for row in beam_idx.tolist()]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, side by side."""
        self.reorder_cache(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these rows; an index or a mask."""
        self.reorder_cache(torch.arange(self.batch_size)[indices.cpu()])

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last -tokens_to_remove tokens; a positive number is the length to keep, as in older versions."""
        if self.core is not None and tokens_to_remove:
            kept = self.core.length + tokens_to_remove if tokens_to_remove < 0 else tokens_to_remove
            self.core.crop(min(kept, self.core.length))

    def reset(self) -> None:
        """Forgets everything, its shape included."""
        self.core, self.items, self.layers = None, None, []

    @property
    def batch_size(self) -> int:
        """Rows held; -1 before the first call."""
        return -1 if self.core is None else self.core.rows

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` leaves no trace."""
        return True

    def __repr__(self) -> str:
        rule = (
            "empty" if self.core is None else f"{self.core.rule}, {len(self.layers)} slots, {self.core.length} tokens"
        )
        return f"LoopCache({rule})"


class SlotLayer(CacheLayerMixin):
    """One slot of a `LoopCache`, to be looked at: (block, layer, slot of the rule)."""

    is_croppable = True
    is_sliding = False

    def __init__(self, owner: LoopCache, block: int, layer: int, slot: int):
        self.owner, self.block, self.layer, self.slot = owner, block, layer, slot

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """Keys [batch kv_heads seq head_dim], after rotary and QK-norm; None before anything was written."""
        return self._held(0)

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """Values of the same shape."""
        return self._held(1)

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """Whether there is storage."""
        return self.keys is not None

    def get_seq_length(self) -> int:
        """Tokens held."""
        return self.owner.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Visible keys, and the place of the first of them."""
        return self.owner.get_mask_sizes(query_length)

    def get_max_length(self) -> int:
        """-1: it grows."""
        return -1

    get_max_cache_shape = get_max_length

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the core makes its storage when it is first written."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refuses: which past entries a query reads is not a matter of one slot."""
        raise ValueError("LoopCache: a slot is written by its model only. Got update(). Call the model with this cache")

    def _held(self, which: int) -> Tensor | None:
        core = self.owner.core
        pair = None if core is None else core.slots_of(self.block, self.layer)
        return None if pair is None or core is None else pair[which][self.slot, :, :, : core.length]


def own_cache(given: Any) -> LoopCache:
    """The cache to use where `given` is handed in: itself, or a new one for an empty cache of the library.

    Raises:
        ValueError: A cache of another kind, or one that already holds tokens of somebody else's making.
    """
    if isinstance(given, LoopCache):
        return given
    if given is None:
        return LoopCache()
    kind = type(given).__name__
    held = int(given.get_seq_length()) if isinstance(given, LibraryCache) else 0
    if held:
        raise ValueError(f"cache of type {kind} holds {held} tokens; start from an empty cache")
    if type(given) is not DynamicCache or given.offloading:
        raise ValueError(
            f"cache must be a LoopCache, or an empty DynamicCache, which it replaces. Got {kind}. Leave "
            "cache_implementation out"
        )
    return LoopCache()


def _slots(owner: LoopCache, core: Cache, spec: LoopSpec) -> list[SlotLayer]:
    def outside(block: int, layers: int) -> Sequence[SlotLayer]:
        return [SlotLayer(owner, block, layer, 0) for layer in range(layers)]

    inside = [
        SlotLayer(owner, block, layer, slot)
        for block, count in core.iterations.items()
        for slot in range(core.rule.slots(count))
        for layer in range(spec.cost.blocks[block].layers)
    ]
    return [*outside(PRELUDE, spec.cost.prelude.layers), *inside, *outside(CODA, spec.cost.coda.layers)]
