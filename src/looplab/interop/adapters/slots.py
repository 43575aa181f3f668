"""One application of one layer, seen through our cache, in the shape the transformers library expects of a cache.

The library's layers say which of *their* layers writes; a slot here belongs to (block, layer, iteration) instead. So
the layer index is ignored, and whoever replays a layer says whose turn it is.
"""

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache as LibraryCache

from looplab.recurrence.kv.base import Cache, KVView


class SlotCache(LibraryCache):
    """A cache of the library that reads and writes one `KVView`.

    Without a view it only knows lengths, which is all that masks and positions are made from.
    """

    def __init__(self, cache: Cache, view: KVView | None = None):
        super().__init__(layers=[])
        self.cache, self.view = cache, view

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        assert self.view is not None, "layers run only when replayed"
        keys, values, _ = self.view.append(key_states, value_states)  # who may read what is in the layer's own mask
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.cache.length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.cache.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.cache.length + query_length, 0

    @property
    def is_initialized(self) -> bool:
        """Whether there are past tokens."""
        return self.cache.length > 0
