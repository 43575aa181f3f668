"""Held-out loss at several depths, from one rollout per batch.

The rollout runs the longest plan once; every depth is a prefix of it, so a depth of k is k applications. For a model of
one block that is num_steps. Held-out batches and noise have streams of their own, so a run with evaluation and one
without have the same weights to the bit.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from looplab.data.packing import Batch, PackedLoader
from looplab.models.base import LoopedLM
from looplab.objectives.base import Rollout
from looplab.objectives.next_token import NextToken
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.loop import walk
from looplab.recurrence.philox import stream_key
from looplab.recurrence.plan import Plan, PlanNode, Sequential
from looplab.recurrence.spec import LoopSpec, Refuse
from looplab.recurrence import state as states
from looplab.training.step import Precision, autocast, encode


@dataclass
class HeldOut:
    """A fixed set of held-out batches."""

    loader: PackedLoader
    num_batches: int
    depths: tuple[int, ...]
    """Applications, ascending."""
    plan: Plan
    """Runs the deepest of them."""
    precision: Precision
    device: str = "cpu"

    @cached_property
    def batches(self) -> list[Batch]:
        """The batches, read once."""
        return [self.loader.batch(index) for index in range(self.num_batches)]

    def losses(self, model: LoopedLM, *, ledger: Ledger | None = None) -> dict[int, float]:
        """Applications -> nats per token over all batches."""
        objective = NextToken()
        sums = dict.fromkeys(self.depths, 0.0)
        count = 0
        with torch.no_grad(), autocast(self.precision, self.device):
            for batch in self.batches:
                count += objective.counts(batch.labels)["ce"]
                for depth, part in self._rollout(model, batch.to(self.device), objective, ledger).items():
                    sums[depth] += part
        return {depth: total / count for depth, total in sums.items()}

    def _rollout(
        self, model: LoopedLM, batch: Batch, objective: NextToken, ledger: Ledger | None
    ) -> dict[int, float]:
        context = encode(model, batch, ledger=ledger)
        noise = evaluation_noise(model.spec, batch)
        found: dict[int, float] = {}

        def visit(node: PlanNode, state: object) -> None:
            depth = int(node.wanted[0])
            rollout = Rollout(
                model=model, context=context, plan=self.plan[:depth], states={depth: state}, ledger=ledger
            )
            found[depth] = float(objective.loss(rollout, batch.labels)["ce"].sum)

        walk(model, context, model.init_state(context, noise), _chain(self.plan, self.depths), visit, ledger=ledger)
        return found
