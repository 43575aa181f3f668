"""The cache contract: slots belong to (block, layer, iteration), never to weights.

    view(block, layer, iteration)    a window on one slot, whose append(keys, values) returns what queries may read
    advance(T, executed)             once per forward, by the loop: the call's tokens become past tokens
    readonly()                       this call's entries are visible to this call and then dropped

Ranges of the storage of one (block, layer), per row:

    0 ............ length ............ length + T ............ capacity
    past tokens    tokens of this call                unused

A call writes only at `length` and beyond, so not advancing is all it takes to drop its entries. Inside one call a query
sees the call's own tokens at the same application under every rule; rules differ in what they read of past tokens.
KV[p, t] is the entry that token p wrote at iteration t; e(p) is the number of iterations p ran.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from looplab._types import Bool, Float, Int
from looplab.nn.cost import KV_SLOTS
from looplab.recurrence.plan import Plan

Slots = dict[tuple[int, int], tuple[Tensor, Tensor]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVRule(ABC):
    """What a query at iteration t reads of a past token. A declared policy object; `cache` makes its storage."""

    cache_class: ClassVar[type["Cache"]]
    """What keeps the entries of this rule."""

    def allows(self, rule: "KVRule") -> bool:
        """Whether a model that supports this rule supports `rule`: the same, or the same with another number."""
        return rule == self or (type(rule) is type(self) and self.size > 0)

    @property
    def size(self) -> int:
        """The rule's own number, where it has one."""
        return 0

    @property
    def exact(self) -> bool:
        """True where cached decoding equals full recomputation."""
        return False

    def slots(self, iterations: int) -> int:
        """Slots per core layer for a block that runs `iterations` iterations."""
        return KV_SLOTS[type(self).__name__](iterations, self.size)

    def cache(
        self,
        *,
        rows: int,
        capacity: int,
        iterations: Mapping[int, int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> "Cache":
        """An empty cache for `rows` rows of at most `capacity` tokens.

        Args:
            iterations: Block -> iterations it will run at most (`plan.iterations()`).
        """
        return self.cache_class(self, rows=rows, capacity=capacity, iterations=iterations, dtype=dtype, device=device)

    def __str__(self) -> str:
        fields = (repr(getattr(self, f.name)) for f in dataclasses.fields(self))
        return f"{type(self).__name__}({', '.join(fields)})"


class Cache(ABC):
    """Keys and values of past tokens. Rows, capacity and the largest iteration per block are fixed when it is made."""

    rule: KVRule

    def __init__(
        self,
        rule: KVRule,
        *,
        rows: int,
        capacity: int,
        iterations: Mapping[int, int],
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        self.rule = rule
        self.capacity = capacity
        self.iterations = dict(iterations)
        self.first: dict[int, int] = {}
        """Block -> its first iteration, where that is not 0: a coarser grid of step sizes has ids of its own."""
        self.length = 0
        self.valid = torch.zeros(rows, capacity, dtype=torch.bool, device=device)
        self.positions = torch.zeros(rows, capacity, dtype=torch.long, device=device)
        self._hold(torch.zeros(len(self.iterations), rows, capacity, dtype=torch.long, device=device))
        self._dtype = dtype
        self._slots: Slots = {}
        self._gathered: Slots = {}
        self.padded = False
        self._least = dict.fromkeys(self.iterations, 2**31)
        self.uniform: int | None = None
        self._active: Tensor | None = None
        self._order: Tensor | None = None
        self._readonly = False

    def _hold(self, executed: Int[Tensor, "blocks batch capacity"]) -> None:
        """One tensor for all blocks, which run the same more often than not, and its part of every block."""
        self._executed = executed
        self.executed: dict[int, Tensor] = dict(zip(self.iterations, executed, strict=True))

    @property
    def rows(self) -> int:
        """Rows held."""
        return self.valid.shape[0]

    def fits(self, rows: int, tokens: int) -> None:
        """Refuses a call of this shape if it has another number of rows, or more tokens than there is room for."""
        if rows != self.rows:
            raise ValueError(f"cache has {self.rows} rows, tokens have {rows}. Use cache.select(rows)")
        if self.length + tokens > self.capacity:
            raise ValueError(f"cache: {self.length + tokens} tokens exceed capacity {self.capacity}")

    def stage(self, positions: Int[Tensor, "batch seq"], valid: Bool[Tensor, "batch seq"] | None) -> None:
        """Announces the tokens of this call; `encode` does it before the first layer runs."""
        span = slice(self.length, self.length + positions.shape[1])
        self.positions[:, span] = positions
        self.valid[:, span] = True if valid is None else valid
        self.padded = self.padded or valid is not None
        self._gathered.clear()  # of a call that never ended
        self._order = None

    def check(self, plan: Plan) -> None:
        """Refuses a plan that this cache cannot follow.

        Raises:
            ValueError: An iteration that has no slot here, or a block whose iterations are not 0, 1, .. (from `first`
                on) in order: e(p) would then not say which entries a token has.
        """
        for block, indices in plan.indices().items():
            held, first, iterations = self.iterations.get(block, 0), self.first.get(block, 0), len(set(indices))
            if iterations > held:
                raise ValueError(
                    f"cache holds {held} iterations of block {block}, the plan runs {iterations}. "
                    "Make it with new_cache(num_steps=...) of the deepest plan"
                )
            if indices != tuple(range(first, first + iterations)):
                raise ValueError(
                    f"plan under a cache must run the iterations {first}, {first + 1}, .. of every block in order. "
                    f"Got {plan}. Run it with cache=None"
                )

    def ordinal(self, block: int, iteration: Any) -> Any:
        """Which iteration of a block's own an iteration index is: an int, or one per row."""
        first = self.first.get(block, 0)
        return iteration - first if first else iteration

    def launch(self, iteration: int | None, active: Bool[Tensor, " batch"] | None = None) -> None:
        """The loop's announcement of the next application.

        Args:
            iteration: What every row runs (`ordinal`), so that a read is a slice; None: rows differ, a read gathers
                over slots.
            active: Rows outside it write nothing.
        """
        self.uniform, self._active = iteration, active

    def view(self, block: int, layer: int, iteration: Int[Tensor, " batch"] | None) -> "KVView":
        """The slot of one application of one layer; rows that `launch` called inactive write nothing.

        Args:
            block: Index of the block, or `plan.PRELUDE` / `plan.CODA`, whose layers have one slot.
            layer: Which layer of the block.
            iteration: One index per row; None outside the loop.
        """
        if block < 0:
            return KVView(self, block, layer, None, None)
        return KVView(self, block, layer, self.ordinal(block, iteration), self._active)

    def advance(self, tokens: int, executed: Mapping[int, int | Int[Tensor, "batch seq"]]) -> None:
        """The call's tokens become past tokens. Called once per forward, by the loop.

        Args:
            executed: Block -> iterations that each token ran, e(p), an int where all ran the same; a block that is not
                named ran none.
        """
        if self._readonly:
            return
        span = slice(self.length, self.length + tokens)
        counts = [executed.get(block, 0) for block in self.executed]
        whole = all(isinstance(count, int) for count in counts)
        if whole:  # all blocks in one go
            self._executed[:, :, span].copy_(torch.tensor(counts, device=self.valid.device)[:, None, None])
        for (block, held), count in zip(self.executed.items(), counts, strict=True):
            if not whole:
                held[:, span] = count
            if isinstance(count, int) and not self.padded:  # nothing to look up
                self._least[block] = min(self._least[block], count)
                continue
            seen = held[:, span][self.valid[:, span]]
            if seen.numel():
                self._least[block] = min(self._least[block], int(seen.min()))
        for (block, layer), pair in self._gathered.items():
            for store, gathered in zip(self._slots[block, layer], pair, strict=True):
                store[0, :, :, span] = self.kept(gathered, self.executed[block][:, span]).to(store.dtype)
        self._gathered.clear()
        self.length += tokens

    @contextmanager
    def readonly(self) -> Iterator["Cache"]:
        """Inside it, `advance` does nothing: the call's entries are dropped and the cache is left as it was."""
        before, self._readonly = (self.padded, self._readonly), True
        try:
            yield self
        finally:
            self.padded, self._readonly = before

    def select(self, rows: Sequence[int] | Int[Tensor, " rows"]) -> "Cache":
        """A new cache with copies of these rows, in this order; a row may occur several times (beams)."""
        index = torch.as_tensor(rows, dtype=torch.long, device=self.valid.device)
        picked = self.rule.cache(
            rows=len(index),
            capacity=self.capacity,
            iterations=self.iterations,
            dtype=self._dtype,
            device=self.valid.device,
        )
        picked.length, picked.padded, picked._least = self.length, self.padded, dict(self._least)
        picked.first = dict(self.first)
        picked.valid, picked.positions = self.valid[index], self.positions[index]
        picked._hold(self._executed[:, index])
        picked._slots = {name: (keys[:, index], values[:, index]) for name, (keys, values) in self._slots.items()}
        return picked

    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        """Replaces the rows in place by these (beam search)."""
        readonly = self._readonly
        self.__dict__.update(self.select(rows).__dict__)
        self._readonly = readonly

    def crop(self, length: int) -> None:
        """Forgets all tokens from `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cache.crop: length must be 0..{self.length}. Got {length}.")
        self.length = length

    def grow(self, capacity: int) -> None:
        """Makes room for `capacity` tokens in place; what is held stays."""
        more = capacity - self.capacity
        if more < 0:
            raise ValueError(f"cache.grow: capacity must be at least {self.capacity}. Got {capacity}.")
        pad = torch.nn.functional.pad
        self.capacity = capacity
        self.valid, self.positions = pad(self.valid, (0, more)), pad(self.positions, (0, more))
        self._hold(pad(self._executed, (0, more)))
        self._slots = {
            name: (pad(keys, (0, 0, 0, more)), pad(values, (0, 0, 0, more)))
            for name, (keys, values) in self._slots.items()
        }

    def least(self, block: int) -> int:
        """No past token ran fewer iterations of the block than this."""
        return self._least.get(block, 0)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values of the tokens held; allocated but empty room is not counted."""
        return sum(2 * keys[:, :, :, : self.length].numel() * keys.element_size() for keys, _ in self._slots.values())

    def slots_of(self, block: int, layer: int) -> tuple[Tensor, Tensor] | None:
        """Keys and values [slots, rows, kv_heads, capacity, head_dim] of one layer; None before its first use."""
        return self._slots.get((block, layer))

    def storage(self, block: int, layer: int, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [slots, rows, kv_heads, capacity, head_dim] of one layer, made at first use."""
        if (block, layer) not in self._slots:
            slots = self.rule.slots(self.iterations[block]) if block >= 0 else 1
            shape = (slots, self.rows, keys.shape[1], self.capacity, keys.shape[3])
            # Zeros, not empty memory: a masked NaN would still poison an attention sum.
            self._slots[block, layer] = (
                torch.zeros(shape, dtype=self._dtype, device=keys.device),
                torch.zeros(shape, dtype=self._dtype, device=keys.device),
            )
        return self._slots[block, layer]

    @abstractmethod
    def slot(self, iteration: Any) -> Any:
        """Slot that is written (and the call's own tokens read from) at an iteration: an int, or a tensor per row."""

    @abstractmethod
    def past(
        self, block: int, store: Tensor, iteration: Int[Tensor, " batch"], end: int
    ) -> Float[Tensor, "batch kv_heads visible head_dim"]:
        """What each row reads of tokens 0 .. end: past tokens by the rule, its own from the slot it wrote."""

    gathers: ClassVar[bool] = False
    """Whether the rule keeps more of the call's tokens than their slot (`gather`)."""

    def gather(
        self,
        before: Tensor | None,
        new: Tensor,
        iteration: Int[Tensor, " batch"],
        active: Bool[Tensor, " batch"] | None,
    ) -> Tensor:
        """What a rule that `gathers` keeps of the call's tokens beside their slot, for one layer's keys or values.

        Args:
            before: What it kept after the application before; None at the first one of the call.
            new: What this application wrote, [rows, kv_heads, seq, head_dim].
            active: Rows that take part; None: all.
        """
        raise TypeError(f"{type(self).__name__} gathers, and so needs a method gather.")

    def kept(self, gathered: Tensor, executed: Int[Tensor, "batch seq"]) -> Tensor:
        """What takes the place in the slot when the call ends, of what `gather` kept.

        Args:
            executed: Iterations that each token of the call ran.
        """
        return gathered

    def missing(self, block: int, iteration: Int[Tensor, " batch"]) -> Bool[Tensor, "batch past"] | None:
        """Past tokens that have nothing to read at this iteration; None where every one has.

        By default those that ran no iteration at all, and so left no entry.
        """
        if self.length == 0 or self._least[block] > 0:
            return None
        return self.executed[block][:, : self.length] == 0

    def in_order(self, start: int, end: int) -> Bool[Tensor, "batch 1 seq visible"]:
        """Who sees whom where nothing is missing: valid tokens up to the own one. The same for all layers of a call."""
        if self._order is None or self._order.shape[2:] != (end - start, end):
            index = torch.arange(end, device=self.valid.device)
            own = index[start:, None]
            self._order = ((self.valid[:, None, :end] & (index <= own)) | (index == own))[:, None]
        return self._order


@dataclasses.dataclass
class KVView:
    """One application of one layer, seen through a cache."""

    cache: Cache
    block: int
    layer: int
    iteration: Int[Tensor, " batch"] | None
    active: Bool[Tensor, " batch"] | None

    def append(
        self,
        keys: Float[Tensor, "batch kv_heads seq head_dim"],
        values: Float[Tensor, "batch kv_heads seq head_dim"],
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Stores this call's keys (after rotary and QK-norm) and values; returns all that is visible.

        Returns:
            keys and values Float[batch kv_heads visible head_dim], and Bool[batch 1 seq visible] of what each query may
            read, or None where every query may read every key. A query of padding reads itself.
        """
        if torch.is_grad_enabled() and keys.requires_grad:
            raise ValueError("cache: keys must not carry a gradient. Got a graph. Decode under torch.no_grad().")
        cache, start = self.cache, self.cache.length
        end = start + keys.shape[2]
        stores = cache.storage(self.block, self.layer, keys)
        self._end = end
        self._write(stores[0], keys, start, end)
        self._write(stores[1], values, start, end)
        if cache.gathers and self.iteration is not None:
            self._gather(keys, values)
        seen_keys, seen_values = self._read(stores[0], end), self._read(stores[1], end)
        if seen_keys.dtype != keys.dtype:
            seen_keys, seen_values = seen_keys.to(keys.dtype), seen_values.to(keys.dtype)
        return seen_keys, seen_values, self._allowed(start, end)

    @property
    def positions(self) -> Int[Tensor, "batch visible"]:
        """Positions of all visible keys, those of this call included."""
        return self.cache.positions[:, : self._end]

    _end: int = 0

    def _write(self, store: Tensor, new: Tensor, start: int, end: int) -> None:
        if self.active is not None:
            new = torch.where(self.active.view(-1, 1, 1, 1), new.to(store.dtype), self._own(store, start, end))
        if self.iteration is None:
            store[0, :, :, start:end] = new
        elif self.cache.uniform is not None:
            store[self.cache.slot(self.cache.uniform), :, :, start:end] = new
        else:
            rows = torch.arange(new.shape[0], device=new.device)
            store[:, :, :, start:end][self.cache.slot(self.iteration), rows] = new.to(store.dtype)

    def _gather(self, keys: Tensor, values: Tensor) -> None:
        assert self.iteration is not None
        before = self.cache._gathered.get((self.block, self.layer), (None, None))
        self.cache._gathered[self.block, self.layer] = (
            self.cache.gather(before[0], keys, self.iteration, self.active),
            self.cache.gather(before[1], values, self.iteration, self.active),
        )

    def _own(self, store: Tensor, start: int, end: int) -> Tensor:
        if self.iteration is None:
            return store[0, :, :, start:end]
        rows = torch.arange(store.shape[1], device=store.device)
        return store[:, :, :, start:end][self.cache.slot(self.iteration), rows]

    def _read(self, store: Tensor, end: int) -> Tensor:
        if self.iteration is None:
            return store[0, :, :, :end]
        return self.cache.past(self.block, store, self.iteration, end)

    def _allowed(self, start: int, end: int) -> Tensor | None:
        cache = self.cache
        absent = None if self.iteration is None else cache.missing(self.block, self.iteration)
        if end - start == 1 and absent is None and not cache.padded:
            return None
        allowed = cache.in_order(start, end)
        if absent is not None:
            allowed = allowed.clone()
            allowed[..., :start] &= ~absent[:, None, None]
        return allowed
