"""Sizes of gradients: of the parameters before, in and after the loop, and of the states along it.

    |g|_part = sqrt(sum of squares over the parameters of a part)       part: prelude, core, coda
    |dL/dh_k|                                                           over all rows of the global batch

A parameter that two parts share (a tied embedding and head) counts in the first.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn

from looplab.recurrence import state as states
from looplab.recurrence.trace import Recorder
from looplab.training.spread import norm

PRELUDE = ("embedding", "position_weight", "embed_norm", "value_tables", "prelude", "prelude_norm", "mid_norm")
CODA = ("project", "coda_layers", "final_norm", "lm_head", "q_head", "gate", "verifier")
"""Where parameters of models stand; all others belong to the loop."""


def part_of(name: str) -> str:
    """Part of the model that a parameter belongs to: prelude, core or coda."""
    top = name.split(".", 1)[0]
    return "prelude" if top in PRELUDE else "coda" if top in CODA else "core"


def part_norms(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, float]:
    """Norm of the gradient of each part; 0 where it has none."""
    gradients: dict[str, list[Tensor]] = {"prelude": [], "core": [], "coda": []}
    for name, parameter in parameters:
        if parameter.grad is not None:
            gradients[part_of(name)].append(parameter.grad)
    return {part: norm(found) for part, found in gradients.items()}


class StateGradients(Recorder):
    """Collects |dL/dh_k| while the backward pass runs; one for all micro-batches of a step.

    k counts within a pass through the loop. Where an objective makes several passes, their squares are added.
    """

    def __init__(self) -> None:
        super().__init__(max_bytes=sys.maxsize)
        self._squares: defaultdict[int, float] = defaultdict(float)
        self._number = -1

    def start(self, state: Any) -> None:
        self._number = -1
        super().start(state)

    def _keep_state(self, state: Any) -> None:
        super()._keep_state(state)
        self._number += 1
        for leaf in states.leaves(state):
            if leaf.requires_grad:
                leaf.register_hook(partial(self._add, self._number))

    def _add(self, number: int, gradient: Tensor) -> None:
        self._squares[number] += float(gradient.double().square().sum())

    def norms(self) -> dict[str, float]:
        """k -> norm, for the states that carry gradient."""
        return {str(number): math.sqrt(square) for number, square in sorted(self._squares.items())}
