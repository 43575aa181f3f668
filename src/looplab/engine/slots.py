"""Paged keys and values behind the cache contract of `recurrence.kv`, with slots that differ from row to row.

    entry of token p, slot s, one cache layer:  pool[s * N + page(p), p mod page_tokens]      N pages, one table per row

Every (block, layer) has a pool of `slots` times N pages, and one page number stands for the same tokens in all of them,
so a row has one table. The slot is an offset into the pool: rows of one launch may be at any iterations, under every
rule. A row writes its own entry, then reads; of a past token p that ran d iterations it reads, at iteration t,

    depth_indexed           slot t                          every token must have run that far
    last_exited             slot min(t, d - 1)              DepthIndexed(missing=CopyLast())
    first                   slot 0, written at t = 0        its own token at t, as within a call of the plain cache
    single                  slot 0, written at every t
    first_then_shared(s)    slot min(t, s - 1, d - 1)       Anchor(n=s - 1)

`last_exited` redirects the read instead of copying the last entry into the deeper slots. d is kept per position of a
page; it counts the iterations begun, so the token under way reads what it has just written.

Page 0 takes what padding writes. A page is filled with zeros when its first token is written, and past its last token a
row reads its own first page instead: nothing that a former owner left, not a number it may be, reaches a sum.

Source: paged attention, arXiv:2309.06180; slots as offsets are ours. Deviation from the usual: layers gather their
pages into one scratch buffer and use the model's own attention.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from looplab._types import Bool, Float, Int
from looplab.nn.cost import KV_SLOTS, CostSpec
from looplab.recurrence import state as states
from looplab.recurrence.kv.anchor import Anchor
from looplab.recurrence.kv.base import Cache, KVRule
from looplab.recurrence.kv.depth_indexed import CopyLast, DepthIndexed, Refuse
from looplab.recurrence.kv.first import First
from looplab.recurrence.kv.single import Single
from looplab.recurrence.plan import CODA, PRELUDE

SERVED: dict[str, KVRule] = {
    "depth_indexed": DepthIndexed(),
    "last_exited": DepthIndexed(missing=CopyLast()),
    "single": Single(),
    "first": First(),
}
"""Command-line names of the rules without a number."""

Shapes = dict[tuple[int, int], tuple[int, int]]
"""(block, layer) -> (kv_heads, head_dim) of a cache layer; block may be `plan.PRELUDE` or `plan.CODA`."""


def rule_of(name: str) -> KVRule:
    """The rule that a command-line name means, such as `last_exited` or `first_then_shared(4)`.

    Raises:
        ValueError: No served rule has this name.
    """
    if name in SERVED:
        return SERVED[name]
    anchor = re.fullmatch(r"first_then_shared\((\d+)\)", name)
    if anchor is None or int(anchor[1]) < 2:
        known = ", ".join([*SERVED, "first_then_shared(2), (3), .."])
        raise ValueError(f"kv_rule must be one of {known}. Got {name!r}. Choose one")
    return Anchor(n=int(anchor[1]) - 1)


def name_of(rule: KVRule) -> str:
    """The command-line name of a rule.

    Raises:
        ValueError: The engine does not serve it.
    """
    if isinstance(rule, Anchor):
        return f"first_then_shared({rule.n + 1})"
    for name, known in SERVED.items():
        if rule == known:
            return name
    raise ValueError(f"the engine must keep keys and values by one of {', '.join(SERVED)}. Got {rule}. Set kv_rule")


def depth_causal(rule: KVRule) -> bool:
    """Whether tokens that walk the iterations together read what they would have read one by one.

    Not so under `first`: the tokens of a call read each other at their own iteration, later ones read what they wrote
    at iteration 0. So where a prompt is cut matters.
    """
    return isinstance(rule, DepthIndexed)


def refuses_exits(rule: KVRule) -> bool:
    """Whether every token must run as deep as its readers."""
    return isinstance(rule, DepthIndexed) and isinstance(rule.missing, Refuse)


def shapes_of(model: Any) -> Shapes:
    """The cache layers of a model, found by running one token."""
    weight = next(model.parameters())
    blocks = range(len(model.spec.blocks))
    cache = Single().cache(
        rows=1, capacity=1, iterations=dict.fromkeys(blocks, 1), dtype=weight.dtype, device=weight.device
    )
    noise = weight.new_zeros(1, 1, model.spec.noise_width) if model.spec.noise_width else None
    with torch.no_grad():
        context = model.encode(torch.zeros(1, 1, dtype=torch.long, device=weight.device), cache)
        state = model.init_state(context, noise)
        for block in blocks:
            state = model.step(state, context, block, torch.zeros(1, dtype=torch.long, device=weight.device), cache)
        model.coda(state, context, cache)
    found: Shapes = {}
    for block in (PRELUDE, *blocks, CODA):
        for layer in count():
            pair = cache.slots_of(block, layer)
            if pair is None:
                break
            found[block, layer] = (pair[0].shape[2], pair[0].shape[4])
    return found


def slots_of(rule: KVRule, block: int, iterations: Mapping[int, int]) -> int:
    """Slots of the layers of a block; one outside the loop."""
    return KV_SLOTS[type(rule).__name__](iterations[block], rule.size) if block >= 0 else 1


def bytes_per_token(shapes: Shapes, rule: KVRule, iterations: Mapping[int, int], dtype: torch.dtype) -> int:
    """2 * H_kv * D * itemsize, over all slots of all cache layers."""
    numbers = sum(
        2 * heads * width * slots_of(rule, block, iterations) for (block, _), (heads, width) in shapes.items()
    )
    return numbers * dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Order of the cache layers of one looped block, as published: prelude, then the core slot by slot, then coda."""

    prelude: tuple[int, ...]
    core: tuple[tuple[int, ...], ...]
    """Per iteration, the cache layer that each layer of the core uses."""
    coda: tuple[int, ...]
    layers: int
    """Cache layers in all."""


def layout(cost: CostSpec, rule: KVRule, iterations: int) -> Layout:
    """The numbering of cache layers that other engines use for a model of one looped block.

    Source: continuous depth batching, arXiv:2608.09444.
    """
    before, after = cost.prelude.layers, cost.coda.layers
    width, slots = cost.blocks[0].layers, KV_SLOTS[type(rule).__name__](iterations, rule.size)
    taken = [min(t, slots - 1) for t in range(iterations)]
    core = tuple(tuple(before + slot * width + layer for layer in range(width)) for slot in taken)
    first = before + slots * width
    return Layout(
        prelude=tuple(range(before)), core=core, coda=tuple(range(first, first + after)), layers=first + after
    )


class Rows(NamedTuple):
    """The rows of a launch, as tensors whose first axis is the row."""

    positions: Int[Tensor, "batch seq"]
    write: Int[Tensor, "batch seq"]
    """Where in a slot each token's entry goes: page * page_tokens + offset."""
    read: Int[Tensor, "batch visible"]
    """Where in a slot the row's entries lie, in order of position."""
    allowed: Bool[Tensor, "batch 1 seq visible"] | None
    """None: every token sees all that its row reads."""
    own: Bool[Tensor, "batch seq"] | None
    """False on padding; None: there is none."""


class PagedCache(Cache):
    """Keys and values of all residents. A launch is announced by `begin`; `launch` says at which iterations it is."""

    def __init__(
        self,
        shapes: Shapes,
        rule: KVRule,
        *,
        iterations: Mapping[int, int],
        pages: int,
        page_tokens: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        contiguous: bool = False,
    ):
        """Allocates the pools.

        Args:
            iterations: Block -> the most iterations a token may run.
            pages: Pages of the pool, page 0 included.
            contiguous: Hand out keys and values in the order in which plain matrix products want them.
        """
        self.rule, self.iterations = rule, dict(iterations)
        self.pages, self.page_tokens, self.contiguous = pages, page_tokens, contiguous
        self.length, self.padded = 0, False
        """For models, which add it to positions that they are not given; here they always are."""
        self.device = torch.device(device)
        self.redirects = isinstance(rule, Anchor) or (isinstance(rule, DepthIndexed) and rule == SERVED["last_exited"])
        self.pools: dict[tuple[int, int], Tensor] = {}
        self.widths = {layer: shape[1] for layer, shape in shapes.items()}
        for (block, layer), (heads, width) in shapes.items():
            held = slots_of(rule, block, iterations) * pages * page_tokens
            # Not zeros: what is never used then takes no memory.
            self.pools[block, layer] = torch.empty(2, held, heads * width, dtype=dtype, device=device)
        self.ran = {block: torch.zeros(pages * page_tokens, dtype=torch.long, device=device) for block in iterations}
        """Block -> iterations begun, of the token at every place of a page."""
        self.slots = {block: slots_of(rule, block, iterations) for block in (PRELUDE, CODA, *iterations)}
        self._scratch: dict[int, Tensor] = {}
        self._offsets = torch.arange(page_tokens, device=device)
        self.fresh([0])

    @property
    def rows(self) -> int:
        """Rows of the launch."""
        return self._rows.positions.shape[0]

    def begin(
        self,
        tables: Int[Tensor, "batch pages"],
        positions: Int[Tensor, "batch seq"],
        own: Bool[Tensor, "batch seq"] | None = None,
        *,
        visible: int | None = None,
        equal: bool = False,
    ) -> Rows:
        """Announces the rows of a launch.

        Args:
            tables: Page numbers of every row, up to the page of its last token at least; what lies beyond is not read.
            positions: Where every token stands in its text.
            own: False on padding, which is written to page 0.
            visible: Entries that the longest row reads; None: whole pages.
            equal: Whether every row is one token that reads all of them, so that nothing has to be masked.
        """
        size, batch = self.page_tokens, tables.shape[0]
        page = torch.arange(tables.shape[1], device=self.device)
        tables = torch.where(page <= positions.amax(dim=1, keepdim=True) // size, tables, tables[:, :1])
        write = tables.gather(1, positions // size) * size + positions % size
        if own is not None:
            write = torch.where(own, write, positions % size)
        read = (tables[:, :, None] * size + self._offsets).view(batch, -1)
        read = read[:, :visible]
        allowed = None
        if not equal:
            index = torch.arange(read.shape[1], device=self.device)
            allowed = (index <= positions[..., None])[:, None]
        return self.resume(Rows(positions, write, read, allowed, own))

    @property
    def rows_of_launch(self) -> Rows:
        """What `begin` announced, or what is left of it."""
        return self._rows

    def resume(self, rows: Rows) -> Rows:
        """Goes on with these rows."""
        self._rows = rows
        self._place: dict[bool, tuple[Tensor, Tensor]] = {False: (rows.write.reshape(-1), rows.read.reshape(-1))}
        batch, visible = rows.read.shape
        self._into = None
        if isinstance(self.rule, First):
            starts = torch.arange(batch, device=self.device)[:, None] * visible
            self._into = starts + rows.positions
        return rows

    def narrow(self, rows: Int[Tensor, " kept"]) -> Rows:
        """Goes on with some of the rows of the launch."""
        return self.resume(states.select(self._rows, rows))

    def launch(self, block: int, iteration: Int[Tensor, " batch"]) -> None:  # type: ignore[override]
        """Announces the next application of these rows.

        Args:
            iteration: How many iterations of the block each row has behind it.
        """
        write, read = self._rows.write, self._rows.read
        plane = self.pages * self.page_tokens
        if self.redirects:
            self.ran[block].index_copy_(0, write.reshape(-1), (iteration + 1)[:, None].expand_as(write).reshape(-1))
        if isinstance(self.rule, First):
            # Later iterations write to the sink: the slot keeps what iteration 0 wrote.
            write = torch.where((iteration == 0)[:, None], write, write % self.page_tokens)
        elif self.slots[block] > 1:
            slot = self.slot(iteration)[:, None]
            reached = slot
            if self.redirects:
                reached = torch.minimum(slot, (self.ran[block][read] - 1).clamp(min=0))
            write, read = write + slot * plane, read + reached * plane
        self._place[True] = (write.reshape(-1), read.reshape(-1))

    def slot(self, iteration: Any) -> Any:
        if isinstance(self.rule, Anchor):
            return iteration.clamp(max=self.rule.n) if isinstance(iteration, Tensor) else min(iteration, self.rule.n)
        return iteration if isinstance(self.rule, DepthIndexed) else iteration * 0

    def fits(self, rows: int, tokens: int) -> None:
        """Refuses a call that is not the launch announced."""
        if self._rows.positions.shape != (rows, tokens):
            raise ValueError(
                f"cache: a call must have the shape announced by begin, {tuple(self._rows.positions.shape)}. "
                f"Got {(rows, tokens)}. Announce it first"
            )

    def stage(self, positions: Int[Tensor, "batch seq"], valid: Bool[Tensor, "batch seq"] | None) -> None:
        """Nothing is left to announce: `begin` has been told."""

    def view(self, block: int, layer: int, iteration: Int[Tensor, " batch"] | None) -> "PagedView":  # type: ignore[override]
        """One cache layer at the slots that `launch` announced."""
        return PagedView(self, block, layer)

    def past(
        self, block: int, store: Tensor, iteration: Any, end: int
    ) -> Float[Tensor, "batch kv_heads visible head_dim"]:
        """All entries in `store` [slots * tokens, kv_heads * head_dim] that the rows of the launch read, gathered."""
        raise TypeError("PagedCache reads through its views. Got a call of past. Use view(...).append(...)")

    def fresh(self, pages: Sequence[int]) -> None:
        """Fills pages with zeros, in all layers and slots: before their first token is written."""
        index = torch.tensor(pages, dtype=torch.long, device=self.device)
        for pool in self.pools.values():
            pool.view(2, -1, self.pages, self.page_tokens * pool.shape[2]).index_fill_(2, index, 0)
        for ran in self.ran.values():
            ran.view(self.pages, -1).index_fill_(0, index, 0)

    def invent(self, pages: int) -> None:
        """Fills the first pages with numbers of order 1, as of tokens that ran every iteration: a past for a probe."""
        for pool in self.pools.values():
            every = pool.view(2, -1, self.pages, self.page_tokens * pool.shape[2])[:, :, :pages]
            every.copy_(torch.arange(every[0, 0].numel(), device=self.device).view(every.shape[2:]).sin())
        for block, ran in self.ran.items():
            ran[: pages * self.page_tokens] = self.iterations[block]

    def copy_page(self, source: int, target: int) -> None:
        """Copies all entries of a page, in all layers and slots."""
        for pool in self.pools.values():
            every = pool.view(2, -1, self.pages, self.page_tokens * pool.shape[2])
            every[:, :, target] = every[:, :, source]
        for ran in self.ran.values():
            every = ran.view(self.pages, -1)
            every[target] = every[source]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, used or not."""
        return sum(pool.numel() * pool.element_size() for pool in self.pools.values())

    def scratch(self, which: int, tokens: int, like: Tensor) -> Tensor:
        """A buffer of `tokens` entries: fresh memory for every gather would cost more than the gather."""
        needed = tokens * like.shape[1]
        held = self._scratch.get(which)
        if held is None or held.numel() < needed or held.dtype != like.dtype:
            held = self._scratch[which] = torch.empty(needed, dtype=like.dtype, device=like.device)
        return held[:needed].view(tokens, like.shape[1])


class PagedView:
    """One cache layer, at one application of the rows of a launch."""

    def __init__(self, cache: PagedCache, block: int, layer: int):
        self.cache, self.block, self.layer = cache, block, layer

    @property
    def positions(self) -> Int[Tensor, "batch visible"]:
        """Positions of all visible keys: the order in which a table lists them."""
        read = self.cache._rows.read
        return torch.arange(read.shape[1], device=read.device).expand(read.shape)

    def append(
        self,
        keys: Float[Tensor, "batch kv_heads seq head_dim"],
        values: Float[Tensor, "batch kv_heads seq head_dim"],
    ) -> tuple[
        Float[Tensor, "batch kv_heads visible head_dim"],
        Float[Tensor, "batch kv_heads visible head_dim"],
        Bool[Tensor, "batch 1 seq visible"] | None,
    ]:
        """Stores the new keys and values; returns all visible ones, in buffers that the next layer uses again."""
        cache = self.cache
        pool = cache.pools[self.block, self.layer]
        write, read = cache._place[self.block >= 0]
        parts = []
        for which, new in enumerate((keys, values)):
            own = new.transpose(1, 2).reshape(write.shape[0], pool.shape[2])
            own = own if own.dtype == pool.dtype else own.to(pool.dtype)
            pool[which].index_copy_(0, write, own)
            seen = torch.index_select(pool[which], 0, read, out=cache.scratch(which, read.shape[0], own))
            if cache._into is not None and self.block >= 0:
                self._overlay(seen, own)
            seen = seen.view(*cache._rows.read.shape, keys.shape[1], keys.shape[3]).transpose(1, 2)
            parts.append(seen.contiguous() if cache.contiguous else seen)
        return parts[0], parts[1], cache._rows.allowed

    def _overlay(self, seen: Tensor, new: Tensor) -> None:
        """The call's own tokens as they are now, where their slot holds what an earlier iteration wrote."""
        into, own = self.cache._into.reshape(-1), self.cache._rows.own  # type: ignore[union-attr]
        if own is not None:
            into, new = into[own.reshape(-1)], new[own.reshape(-1)]
        seen.index_copy_(0, into, new)
