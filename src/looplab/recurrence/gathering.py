"""What a model asks of the loop whose parameters are spread over processes: to run in stretches.

    state = along(stretch, state, context, moves)          parameters are brought together once per stretch

A stretch is the walk over some applications in a row (all of them, or those of one block), the part without gradient
and the part with. Nothing in the loop depends on where the parameters are; it only calls `stretch` when it is told to.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from looplab.recurrence.gradient.base import GradientStrategy, Move

Stretch = Callable[[Any, Any, Any, Sequence[Move]], Any]
"""(model, state, context, moves) -> state."""


class Gathering(ABC):
    """Stands for a model in `run_plan` and `run_aligned`."""

    @abstractmethod
    def along(self, stretch: Stretch, state: Any, context: Any, moves: Sequence[Move]) -> Any:
        """The state after all moves; `stretch` gets them in order, with the model whose parameters are there."""


def moves_of(strategy: GradientStrategy, plan: Any) -> list[Move]:
    """The walk of a strategy in pieces.

    Raises:
        ValueError: A strategy that does more than to cut the graph, whose walk cannot be taken apart.
    """
    if type(strategy).walk is not GradientStrategy.walk:
        raise ValueError(
            f"A model in pieces needs a gradient strategy that cuts the graph only. Got {type(strategy).__name__}. "
            "Use TruncatedBPTT."
        )
    return strategy.moves(plan)
