"""Held-out loss at several depths, from one rollout per batch.

The rollout runs the longest plan once; every depth is a prefix of it, so a depth of k is k applications. For a model of
one block that is num_steps. Held-out batches and noise have streams of their own, so a run with evaluation and one
without have the same weights to the bit.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from looplab._types import Float
from looplab.data.packing import Batch, PackedLoader
from looplab.models.base import LoopedLM
from looplab.objectives.base import Rollout, encode
from looplab.objectives.next_token import NextToken
from looplab.recurrence import state as states
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.loop import walk
from looplab.recurrence.philox import stream_key
from looplab.recurrence.plan import Plan, PlanNode
from looplab.recurrence.spec import LoopSpec, Refuse
from looplab.training.step import Precision, autocast, to_device


class DepthError(ValueError):
    """A depth at which the model cannot be evaluated."""


class Scores(NamedTuple):
    """What an evaluation found."""

    loss: float
    """The one number of the run."""
    record: dict[str, Any]
    """For the metrics."""
    line: str
    """For the reader."""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """A fixed set of held-out batches, and the depths at which they are scored."""

    loader: PackedLoader
    num_batches: int
    depths: tuple[int, ...]
    """Applications, ascending; the last is the length of the plan."""
    plan: Plan
    precision: Precision = "fp32"
    device: str = "cpu"

    @property
    def hash(self) -> str:
        """Of the text."""
        return self.loader.hash

    def evaluate(self, model: LoopedLM, *, ledger: Ledger | None = None) -> "Scores":
        """The losses, and that of the full plan as the one number of the run."""
        losses = self.losses(model, ledger=ledger)
        row = "  ".join(f"{depth}: {loss:.4f}" for depth, loss in losses.items())
        return Scores(losses[len(model.spec.plan())], {"losses": losses}, f"held-out loss by applications  {row}")

    def losses(self, model: LoopedLM, *, ledger: Ledger | None = None) -> dict[int, float]:
        """Applications -> nats per token over all batches."""
        objective = NextToken()
        sums, count = dict.fromkeys(self.depths, 0.0), 0
        with torch.no_grad(), autocast(self.precision, self.device):
            for index in range(self.num_batches):
                batch = to_device(self.loader.batch(index), self.device)
                count += objective.counts(batch.labels)["ce"]
                noise = evaluation_noise(model.spec, batch, index)
                for depth, loss in self._rollout(model, batch, noise, objective, ledger).items():
                    sums[depth] += loss
        return {depth: total / count for depth, total in sums.items()}

    def _rollout(
        self,
        model: LoopedLM,
        batch: Batch,
        noise: Float[torch.Tensor, "batch seq noise"] | None,
        objective: NextToken,
        ledger: Ledger | None,
    ) -> dict[int, float]:
        context = encode(model, batch, ledger=ledger)
        found: dict[int, float] = {}

        def visit(node: PlanNode, state: object) -> None:
            depth = int(node.wanted[0])
            plan = self.plan[:depth]
            rollout = Rollout(model=model, context=context, plan=plan, states={depth: state}, ledger=ledger)
            found[depth] = float(objective.loss(rollout, batch.labels)["ce"].sum)

        walk(model, context, model.init_state(context, noise), _chain(self.plan, self.depths), visit, ledger=ledger)
        return found


def choose_depths(spec: LoopSpec, asked: tuple[int, ...] | None) -> tuple[tuple[int, ...], Plan]:
    """The depths to score, in applications, and the plan that runs the deepest.

    Beyond its full plan only a model of one block can be run, as far as it has parameters for the iteration. The length
    of the full plan is always among the depths.

    Args:
        asked: Depths that the user wants; None: 1, 2, T/2, T, 2T and 4T of the full plan of length T; of a dense model
            T alone, since its shorter prefixes were never meant to be read.
    Raises:
        DepthError: A depth that the model does not have.
    """
    full = len(spec.plan())
    deepest = full
    if len(spec.blocks) == 1:
        bounded = spec.max_iteration is not None and isinstance(spec.beyond, Refuse)
        deepest = max(full, spec.max_iteration or 0) if bounded else 4 * max(full, *(asked or (0,)))
    if asked is not None and max(asked) > deepest:
        raise DepthError(
            f"Evaluation.depths must be at most {deepest} for this model. Got {max(asked)}. It has no such application."
        )
    wanted = {1, 2, full // 2, full, 2 * full, 4 * full} if asked is None else set(asked)
    if asked is None and all(count == 1 for count in spec.plan().iterations().values()):
        wanted = {full}
    depths = tuple(sorted(d for d in wanted | {full} if 1 <= d <= deepest))
    return depths, spec.plan(depths[-1]) if depths[-1] > full else spec.plan()[: depths[-1]]


def evaluation_noise(spec: LoopSpec, batch: Batch, index: int) -> Float[torch.Tensor, "batch seq noise"] | None:
    """Starting noise of a held-out batch: the same in every run."""
    if spec.noise_width == 0:
        return None
    items = [states.item_of("eval", index, int(row)) for row in batch.rows]
    places = torch.arange(batch.tokens.shape[1]).expand(batch.tokens.shape)
    return states.standard_noise(stream_key(0, "eval"), items, places, spec.noise_width).to(batch.tokens.device)


def _chain(plan: Plan, depths: tuple[int, ...]) -> PlanNode:
    """The trie of the prefixes of one plan."""
    root = node = PlanNode(None)
    for depth, application in enumerate(plan, 1):
        child = PlanNode(application, wanted=[str(depth)] if depth in depths else [])
        node.children.append(child)
        node = child
    return root
