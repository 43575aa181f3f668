"""The contract of a gradient strategy: a walk over a plan that decides where the graph is cut.

A segment is a stretch of applications; the state is detached between segments, and a segment without gradient runs
under `no_grad`. The depth law says how many applications run; the strategy alone owns the window.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from looplab._registry import Registry
from looplab.recurrence import state as states
from looplab.recurrence.plan import Application, Plan

GRADIENT_STRATEGIES: Registry[type["GradientStrategy"]] = Registry(
    "gradient strategy", package="looplab.recurrence.gradient"
)

Step = Callable[[Any, tuple[Application, ...]], Any]
"""(state, unit) -> state, where a unit is what `units` cuts off: usually one application."""


@dataclass(frozen=True)
class Segment:
    """Applications start .. stop - 1 of a plan."""

    start: int
    stop: int
    gradient: bool


@dataclass(frozen=True)
class Move:
    """One unit of a walk, and what happens around it."""

    unit: tuple[Application, ...]
    """Empty in a segment without applications."""
    gradient: bool
    cut: bool
    """Whether the state is detached before it."""
    end: int | None
    """Applications so far, where a segment that carries gradient ends after it."""


class GradientStrategy(ABC):
    """Which applications carry gradient."""

    @abstractmethod
    def segments(self, length: int) -> tuple[Segment, ...]:
        """The cuts for a plan of `length` applications; together the segments cover it once."""

    def at(self, step: int) -> "GradientStrategy":
        """The strategy at an optimizer step, of those that move along a run."""
        return self

    @property
    def recomputes(self) -> bool:
        """True where applications inside the window are run again during the backward pass."""
        return False

    def wrap(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        """Hook around one unit (state, context, ...) -> outputs, for recomputation."""
        return apply

    def units(self, applications: Iterable[Application]) -> Iterator[tuple[Application, ...]]:
        """The applications of one segment, in the stretches that `wrap` surrounds; by default each one alone."""
        return ((application,) for application in applications)

    def gradient_count(self, length: int) -> int:
        """Applications that carry gradient; the rest run without."""
        return sum(segment.stop - segment.start for segment in self.segments(length) if segment.gradient)

    def walk(
        self,
        plan: Plan,
        step: Step,
        state: Any,
        on_segment_end: Callable[[Any, int], None] | None = None,
    ) -> Any:
        """Runs `step` along `plan` from `state`.

        Args:
            on_segment_end: Called with (state, number of applications so far) at the end of every segment that carries
                gradient, before the state is detached: the place for that segment's loss.
        Returns:
            The last state, with the graph of the last segment.
        """
        return self.follow(self.moves(plan), step, state, on_segment_end)

    def moves(self, plan: Plan) -> list[Move]:
        """The walk over a plan, unit by unit."""
        entries, moves = list(plan), []
        for index, segment in enumerate(self.segments(len(entries))):
            units = list(self.units(entries[segment.start : segment.stop])) or [()]
            for number, unit in enumerate(units, 1):
                ends = segment.gradient and number == len(units)
                cut = index > 0 and number == 1
                moves.append(Move(unit, segment.gradient, cut, segment.stop if ends else None))
        return moves

    def follow(
        self,
        moves: Iterable[Move],
        step: Step,
        state: Any,
        on_segment_end: Callable[[Any, int], None] | None = None,
    ) -> Any:
        """Does a stretch of a walk; arguments and result are those of `walk`."""
        for move in moves:
            if move.cut:
                state = states.detach(state)
            if move.unit:
                with torch.set_grad_enabled(torch.is_grad_enabled() and move.gradient):
                    state = step(state, move.unit)
            if move.end is not None and on_segment_end is not None:
                on_segment_end(state, move.end)
        return state
