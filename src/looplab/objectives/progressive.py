"""Progressive loss: iterations that begin at a state reached without a graph, so that no iteration count is special.

    n ~ U{0 .. m-1},   k ~ U{1 .. m-n},   m the drawn depth
    L = (1 - alpha) CE(h_m) + alpha CE(h_{n+k}),      h_n without gradient, then k more iterations with it

Both runs start from h_0. n and k are one draw per optimizer step. With alpha 0 or 1 the other pass is not run.

Reference: Bansal et al., "End-to-end algorithm synthesis with recurrent networks: logical extrapolation without
overthinking" (Deep Thinking), arXiv:2202.05826. alpha has no default: their papers tune it per task.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from looplab._types import Int
from looplab.objectives.base import (
    OBJECTIVES,
    LossParts,
    Objective,
    Outcome,
    Part,
    Pass,
    Rollout,
    labelled,
    scored_positions,
)
from looplab.objectives.readout import token_losses
from looplab.recurrence import state as states
from looplab.recurrence.loop import run_plan


@OBJECTIVES.register("progressive")
@dataclass(frozen=True, kw_only=True)
class Progressive(Objective):
    """Next-token loss at the drawn depth, and of a stretch of iterations that begins anywhere."""

    alpha: float
    """Share of the progressive pass, from 0 to 1."""
    chunk: int | None = None
    """Tokens per readout chunk; None: all logits at once."""

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"Progressive.alpha must be from 0 to 1. Got {self.alpha}.")
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"Progressive.chunk must be at least 1 token, or None. Got {self.chunk}.")

    def counts(self, labels: Int[Tensor, "batch seq *cells"], length: int = 1) -> dict[str, int]:
        """Positions with a label, for every part whose pass is run."""
        scored = labelled(self, labels)
        return {name: scored for name, weight in self._weights.items() if weight}

    @property
    def _weights(self) -> dict[str, float]:
        return {"full": 1 - self.alpha, "progressive": self.alpha}

    def run(self, given: Pass) -> Outcome:
        """The passes that count."""
        context = given.encode()
        first = given.model.init_state(context, given.noise)
        parts, last, ran = {}, first, given.plan
        if self.alpha < 1:
            last = self._run(given, context, first, 0, len(ran))
            parts["full"] = self._part(given, context, last, 1 - self.alpha)
        if self.alpha > 0:
            n, k = self.stretch(given)
            with torch.no_grad():
                start = self._run(given, context, first, 0, n) if n else first
            state = self._run(given, context, states.detach(start) if n else start, n, n + k)
            parts["progressive"] = self._part(given, context, state, self.alpha)
            if self.alpha == 1:
                last, ran = state, given.plan[: n + k]
        return Outcome(LossParts(parts), first, last, ran)

    def stretch(self, given: Pass) -> tuple[int, int]:
        """(n, k) of this step."""
        generator, depth = given.generator("progressive"), len(given.plan)
        n = int(torch.randint(depth, (), generator=generator))
        return n, 1 + int(torch.randint(depth - n, (), generator=generator))

    def _run(self, given: Pass, context: Any, state: Any, start: int, stop: int) -> Any:
        """The state after the applications start .. stop - 1."""
        return run_plan(
            given.model,
            given.plan[start:stop],
            context,
            state,
            gradient=given.gradient,
            recorder=given.recorder,
            ledger=given.ledger,
        )

    def _part(self, given: Pass, context: Any, state: Any, weight: float) -> Part:
        labels = given.batch.labels
        rollout = Rollout(given.model, context, given.plan, {0: state}, given.ledger)
        losses = token_losses(given.model, rollout.hidden(0), labels, chunk=self.chunk, ledger=given.ledger)
        return Part(losses.sum(), scored_positions(labels), weight)
