"""Learned halting for progress-aligned recurrence: the state also says whether its word has been read to its beginning.

    l_jk = sigmoid(gate(h_k[j])),   d_jk = 1[k >= j]           position j ends a word of j operations
    L = ProgressAligned + weight * mean over k, j of BCE(l_jk, d_jk)                 stop at the first l > 1/2
    hazard: the BCE terms with d_{j,k-1} = 0 only, which sum to -log p_j of the exit law p_k = l_k prod_{i<k} (1 - l_i)

Every prefix is a word of its own, so all positions are scored. d follows a local rule like the values themselves,
d[j, k] = d[j - 1, k - 1] with d[0] = 1, and travels with replayed states. The gradient goes into the states: a state
that holds only a product of operations does not say whether it is the whole one.

Source: halting of progress-aligned recurrence as reported (1[k >= n], threshold 1/2); all positions and replayed marks
are ours. The plain form trains a `QHead`, the hazard form a `HazardGate`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from looplab._types import Bool, Int
from looplab.objectives.base import OBJECTIVES, Part, Pass, needs_gate
from looplab.objectives.progress_aligned import ProgressAligned

DONE = "done"


@OBJECTIVES.register("halting")
@dataclass(frozen=True, kw_only=True)
class Halting(ProgressAligned):
    """Progress-aligned recurrence with a trained stopping score."""

    weight: float = 1.0
    """Of the stopping score."""
    hazard: bool = False
    """Train the probability of stopping now, given that nothing stopped before, instead of that of being done."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight < 0:
            raise ValueError(f"Halting.weight must be at least 0. Got {self.weight}.")

    def check(self, model: Any) -> None:
        """Needs the score that it trains."""
        halt = model.spec.halt
        if self.hazard or halt is None:
            needs_gate(self, model)
        elif (halt.layout, halt.per) != ("q_halt", "token"):
            raise ValueError(
                f"Halting(hazard=False) needs a score per token that says whether it is done. That of "
                f"{model.spec.name!r} is {halt.layout} per {halt.per}. Build the model with halt=QHead(), or set "
                "hazard=True."
            )

    def counts(self, labels: Int[Tensor, "batch seq *cells"], length: int = 1) -> dict[str, int]:
        """Those of progress, and all (iteration, position) pairs."""
        pairs = min(self.iterations, length) * labels.shape[0] * labels.shape[1]
        return super().counts(labels, length) | {"halting": pairs}

    def _more(
        self, given: Pass, scored: Sequence[Any], free: int, replayed: Mapping[str, Tensor]
    ) -> tuple[dict[str, Part], dict[str, Tensor]]:
        rows, seq = given.batch.tokens.shape
        done = torch.arange(seq, device=given.batch.tokens.device).expand(rows, seq) <= free
        if replayed:
            done = replayed[DONE].to(done)
        terms = []
        for state in scored:
            before, done = done, advanced(done)
            score = given.model.halt(state)
            losses = functional.binary_cross_entropy_with_logits(score, done.to(score), reduction="none")
            terms.append(losses[~before].sum() if self.hazard else losses.sum())
        part = Part(torch.stack(terms).sum(), len(scored) * rows * seq, self.weight)
        return {"halting": part}, {DONE: done.to(torch.uint8)}


def advanced(done: Bool[Tensor, "batch seq"]) -> Bool[Tensor, "batch seq"]:
    """Which positions hold a whole word one iteration later."""
    return torch.cat([torch.ones_like(done[:, :1]), done[:, :-1]], dim=1)
