"""How many bytes of tensors are alive, and how many were at most, counted at every operation.

A storage counts from the operation whose result first lies in it until nothing holds it any more. Views and changes in
place add nothing. The count is that of torch's allocator without its rounding and without what an operation takes and
gives back inside itself; it is the same on every run, and the same on fake tensors, which have no memory to measure.
The resident size of a process is neither: the C library keeps freed pages, and libraries have scratch of their own.
"""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts inside a `with` block, backward passes included.

    Attributes:
        now: Bytes of the storages that came inside the block and are alive.
        most: The largest `now` so far.
    """

    def __init__(self, known: Iterable[Tensor] = ()):
        """Storages of `known` were there before, and count 0."""
        super().__init__()
        self.now = self.most = 0
        self._alive: dict[int, weakref.ref[Any]] = {}
        for tensor in known:
            self._watch(tensor, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._watch(leaf, leaf.untyped_storage().nbytes())
        self.most = max(self.most, self.now)
        return result

    def _watch(self, tensor: Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return

        def gone(_: Any) -> None:
            del self._alive[key]  # the address may be used again
            self.now -= size

        self._alive[key] = weakref.ref(storage, gone)
        self.now += size
