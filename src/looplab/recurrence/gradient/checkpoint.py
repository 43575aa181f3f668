"""Checkpointing: keep the state before each unit of applications, run the unit again going back.

    CheckpointApplication    every application is a unit: (applications in the window) * state + one application
    CheckpointUnit           all applications of one stored layer in a row are: stored layers * state + R applications

With the per-layer unit a layer loop keeps as many boundaries as a stack without loops has. Both compose with any
strategy. Models draw no random numbers, so recomputation needs no saved generator and gives the same bits.
Reference: the unit of all R applications of a stored layer is Loopie's, arXiv:2607.16051.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from looplab.recurrence.gradient.base import GRADIENT_STRATEGIES, GradientStrategy, Segment
from looplab.recurrence.gradient.full import FullBPTT
from looplab.recurrence.plan import Application


@GRADIENT_STRATEGIES.register("checkpoint")
@dataclass(frozen=True, kw_only=True)
class CheckpointApplication(GradientStrategy):
    """`inner`, with every application that carries gradient recomputed in the backward pass."""

    inner: GradientStrategy = field(default_factory=FullBPTT)

    def __post_init__(self) -> None:
        if self.inner.recomputes:
            own, other = type(self).__name__, type(self.inner).__name__
            raise ValueError(f"{own}.inner must be another strategy. Got {other}.")
        if type(self.inner).walk is not GradientStrategy.walk:
            own, other = type(self).__name__, type(self.inner).__name__
            raise ValueError(f"{own}.inner must be a strategy that cuts the graph only. Got {other}. Use it alone.")

    def segments(self, length: int) -> tuple[Segment, ...]:
        return self.inner.segments(length)

    def at(self, step: int) -> GradientStrategy:
        return replace(self, inner=self.inner.at(step))

    @property
    def recomputes(self) -> bool:
        return True

    def wrap(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        def recomputed(*args: Any) -> Any:
            if not torch.is_grad_enabled():
                return apply(*args)
            # Tensors inside states and contexts become arguments of their own, so that autograd keeps them like others.
            leaves, layout = tree_flatten(args)

            def again(*leaves: Any) -> Any:
                return apply(*tree_unflatten(leaves, layout))

            return checkpoint(again, *leaves, use_reentrant=False, preserve_rng_state=False)

        return recomputed


@GRADIENT_STRATEGIES.register("checkpoint_unit")
@dataclass(frozen=True, kw_only=True)
class CheckpointUnit(CheckpointApplication):
    """`inner`, with all applications of one block in a row recomputed together in the backward pass.

    Meant for `LayerLoop`, whose blocks are the stored layers. A block that runs again later is another unit, and a
    window that begins inside a unit shortens it.
    """

    def units(self, applications: Iterable[Application]) -> Iterator[tuple[Application, ...]]:
        for _, unit in itertools.groupby(applications, key=lambda application: application[0]):
            yield tuple(unit)
