"""Which parameters are gathered together, and for how long (FSDP2).

    prelude      what `encode` alone reads                          gathered for the call, and again going back
    loop         what applications alone read                       once for the whole loop, and once going back
    block b      the same per block, where its applications stand in a row (layer loops)
    coda, head   what `coda`, what `head` alone reads               once, at the first readout, until the backward pass
    root         all else: tied tables, what two of these read      once, for the whole step

A unit is a small module whose forward is the whole call; the parameters stay where they are in the model and keep
their names. With the block itself as the unit, parameters would be gathered for every application of the loop and again
for every one of the backward pass: with the loop as the unit it is one all-gather forward, one backward and one
reduce-scatter per step, whatever the depth and the window. Which parameters a call reads is found by watching it read.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from looplab._types import Float
from looplab.data.packing import Batch
from looplab.models.base import LoopedLM
from looplab.objectives.base import encode
from looplab.recurrence.gathering import Gathering, Stretch
from looplab.recurrence.gradient.base import Move
from looplab.recurrence.plan import Plan

PRELUDE, CODA, HEAD, LOOP = "prelude", "coda", "head", "loop"


class Unit(nn.Module):
    """Modules whose parameters are gathered together, for a call that reads them."""

    def __init__(self, parts: Sequence[nn.Module]):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The call."""
        return call(*args, **kwargs)


class SplitModel(Gathering):
    """A model as objectives see it while its parameters are spread: every call goes through its unit.

    `encode`, `step`, `coda` and `head` have the arguments and results of `LoopedLM`.
    """

    def __init__(self, model: LoopedLM, units: Mapping[str, nn.Module]):
        self.model, self.units, self.spec = model, dict(units), model.spec

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's."""
        return self._within(PRELUDE, self.model.encode, *args, **kwargs)

    def init_state(self, *args: Any) -> Any:
        """As the model's."""
        return self.model.init_state(*args)

    def step(self, state: Any, context: Any, block: int, *args: Any, **kwargs: Any) -> Any:
        """As the model's; an application on its own is gathered for on its own."""
        return self._within(self._of_block(block), self.model.step, state, context, block, *args, **kwargs)

    def coda(self, *args: Any) -> Any:
        """As the model's."""
        return self._within(CODA, self.model.coda, *args)

    def head(self, hidden: Float[torch.Tensor, "*batch dim"]) -> Float[torch.Tensor, "*batch vocab"]:
        """As the model's."""
        return self._within(HEAD, self.model.head, hidden)

    def halt(self, state: Any) -> torch.Tensor:
        """As the model's."""
        return self.model.halt(state)

    def along(self, stretch: Stretch, state: Any, context: Any, moves: Sequence[Move]) -> Any:
        def unit_of(move: Move) -> str:
            return self._of_block(move.unit[0].block) if move.unit else LOOP

        for name, some in itertools.groupby(moves, unit_of):
            state = self._within(name, stretch, self.model, state, context, list(some))
        return state

    def _of_block(self, block: int) -> str:
        return LOOP if LOOP in self.units else block_unit(block)

    def _within(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        unit = self.units.get(name)
        return call(*args, **kwargs) if unit is None else unit(call, *args, **kwargs)


def block_unit(block: int) -> str:
    """Name of the unit of one block."""
    return f"block {block}"


def unit_parts(
    model: LoopedLM, batch: Batch, noise: Float[torch.Tensor, "batch seq noise"] | None
) -> dict[str, list[nn.Module]]:
    """Unit -> the largest modules all of whose parameters it alone reads; units without a matrix are left out.

    Args:
        batch: Some rows, which are run once at the model's own depth.
    """
    readers = _readers(model, batch, noise)
    whole = not _in_a_row(model.spec.plan())

    def unit_of(names: frozenset[str]) -> str | None:
        if whole and names and all(name.startswith("block ") for name in names):
            return LOOP
        return next(iter(names)) if len(names) == 1 else None

    parts: dict[str, list[nn.Module]] = {}

    def descend(module: nn.Module) -> None:
        found = {unit_of(readers[id(p)]) for p in module.parameters()}
        if len(found) == 1 and (unit := found.pop()) is not None:
            parts.setdefault(unit, []).append(module)
            return
        for child in module.children():
            descend(child)

    descend(model)
    return {name: mine for name, mine in parts.items() if any(p.dim() > 1 for m in mine for p in m.parameters())}


def _in_a_row(plan: Plan) -> bool:
    """Whether several blocks come one after another, each with all its applications."""
    stretches = [block for block, _ in itertools.groupby(plan, key=lambda application: application.block)]
    return len(stretches) > 1 and len(set(stretches)) == len(stretches)


def _readers(model: LoopedLM, batch: Batch, noise: torch.Tensor | None) -> dict[int, frozenset[str]]:
    """id of every parameter -> the calls that read it; none where a call outside the units does."""
    outside = ("init_state", "halt")
    watch = {name: _Reads(model) for name in (PRELUDE, CODA, HEAD, *outside)}
    with torch.no_grad():
        with watch[PRELUDE]:
            context = encode(model, batch)
        with watch["init_state"]:
            state = model.init_state(context, noise)
        for block, iteration in model.spec.plan():
            index = torch.full((len(batch.tokens),), iteration, dtype=torch.long)
            with watch.setdefault(block_unit(block), _Reads(model)):
                state = model.step(state, context, block, index)
        with watch[CODA]:
            hidden = model.coda(state, context)
        with watch[HEAD]:
            model.head(hidden)
        if model.spec.halt is not None:
            with watch["halt"]:
                model.halt(state)
    found = {id(p): frozenset(name for name, reads in watch.items() if id(p) in reads.seen) for p in model.parameters()}
    return {key: names if names.isdisjoint(outside) else frozenset() for key, names in found.items()}


class _Reads(TorchDispatchMode):
    """Notes which parameters of a model are arguments of an operation."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self._known, self.seen = {id(p) for p in model.parameters()}, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= self._known & {id(leaf) for leaf in tree_leaves((args, kwargs or {}))}
        return func(*args, **(kwargs or {}))
