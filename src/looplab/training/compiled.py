"""Compiled parts of a model: encode, step, coda and head, each by itself; the loop over them stays Python.

A compiled loop would be another graph at every depth. A compiled step is at most three per block, whatever is drawn:
without gradient, where it is handed detached tensors; the first application with gradient, whose state needs none; the
others.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from looplab.models.base import LoopedLM

PARTS = ("encode", "step", "coda", "head")
GRAPHS_PER_BLOCK = 3


def wanted(choice: Literal["auto"] | bool, *, device: str, twice: bool) -> bool:
    """Whether a run compiles its model.

    Args:
        choice: "auto": on accelerators, where it can.
        twice: Whether the loss differentiates a step twice, which compiled code cannot do.
    """
    return torch.device(device).type != "cpu" and not twice if choice == "auto" else choice


class CompiledParts:
    """Puts compiled parts in place of a model's own."""

    def __init__(self, model: LoopedLM, *, backend: str | Callable[..., Any] = "inductor"):
        # All blocks run the code of one method, whose graphs count together.
        graphs = (1 + GRAPHS_PER_BLOCK) * len(model.spec.blocks)
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, graphs)
        self._model = model
        self._parts = {name: _detaching(torch.compile(getattr(model, name), backend=backend)) for name in PARTS}
        self._put()

    @contextmanager
    def eager(self) -> Iterator[None]:
        """The model with its own parts, for a look inside: hooks on modules do not run in compiled code."""
        for name in PARTS:
            delattr(self._model, name)
        try:
            yield
        finally:
            self._put()

    def _put(self) -> None:
        for name, part in self._parts.items():
            setattr(self._model, name, part)


def _detaching(part: Callable[..., Any]) -> Callable[..., Any]:
    """Without gradient, a context that has one and a context that has none are to be one graph."""

    @functools.wraps(part)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            args = tree_map_only(Tensor, Tensor.detach, args)
        return part(*args, **kwargs)

    return call
