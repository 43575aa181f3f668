"""One training step up to its loss, as one `nn.Module.forward`, so that wrappers of modules see a single call.

T ~ trained_depth  (one draw per optimizer step)      plan = plan(T), or prefix(T) of the full plan
context = encode(rows);  s_0 = init_state(context, noise);  s_K under the gradient strategy;  parts = objective
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from looplab._types import Float, Int
from looplab.data.packing import Batch
from looplab.models.base import LoopedLM
from looplab.objectives.base import LossParts, Objective, Pass, scored_positions
from looplab.recurrence import state as states
from looplab.recurrence.gathering import Gathering
from looplab.recurrence.gradient.base import GradientStrategy
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.philox import stream_key
from looplab.recurrence.plan import Plan
from looplab.recurrence.spec import LoopSpec
from looplab.recurrence.trace import Recorder

_TENSORS = ("tokens", "labels", "positions", "document_ids", "rows")

Precision = Literal["fp32", "bf16"]
DepthPer = Literal["batch", "micro_batch", "sequence"]


class StepOutput(NamedTuple):
    """What the forward of a step returns."""

    share: Float[Tensor, ""]
    """This micro-batch's share of the loss of the global batch; the tensor to differentiate."""
    parts: LossParts
    """Detached."""
    first_squares: Float[Tensor, ""]
    last_squares: Float[Tensor, ""]
    """Mean square of the state before and after the loop, times the rows."""
    plan: Plan
    """The applications that ran."""
    carry: dict[str, Tensor]
    """What the objective keeps for the next step."""
    free: int
    """Applications before those that the gradient strategy is about, without a gradient."""


class At(NamedTuple):
    """Where in a run a step is."""

    step: int = 0
    steps: int = 1
    seed: int = 0
    carry: Mapping[str, Tensor] = MappingProxyType({})
    fetch: Callable[[int, Sequence[int]], Batch] | None = None
    """See `objectives.base.Pass`, of this and the next three."""
    depths: Int[Tensor, " batch"] | None = None
    row_bucket: int = 1
    all_rows: int | None = None


class TrainingStep(nn.Module):
    """A model, an objective and a gradient strategy.

    Attributes:
        beside: What the objective trains beside a finished model, in whose place it is optimized and kept; None for
            objectives that train the model.
        split: Stands for the model while its parameters are spread over processes (`training.units`), ..
        units: .. whose modules it has here, so that whoever wraps this module finds them.
    """

    split: Gathering | None = None
    units: nn.ModuleDict

    def __init__(
        self, model: LoopedLM, objective: Objective, gradient: GradientStrategy, *, precision: Precision = "fp32"
    ):
        super().__init__()
        self.model, self.objective, self.gradient, self.precision = model, objective, gradient, precision
        self.beside = objective.beside(model)
        self.units = nn.ModuleDict()

    def forward(
        self,
        batch: Batch,
        plan: Plan,
        noise: Float[Tensor, "batch seq noise"] | None,
        counts: dict[str, int],
        *,
        at: At | None = None,
        ledger: Ledger | None = None,
        recorder: Recorder | None = None,
    ) -> StepOutput:
        """The loss of one micro-batch.

        Args:
            counts: Scored terms of the global batch, per part.
            at: Where in the run this is, for objectives that depend on it; default: its first step.
            ledger: Receives the counts of what ran.
            recorder: Watches the applications; needed by nobody but a search for a fault.
        """
        at = at or At()
        given = Pass(
            model=self.split or self.model,
            batch=batch,
            plan=plan,
            noise=noise,
            depths=at.depths,
            row_bucket=at.row_bucket,
            all_rows=at.all_rows,
            gradient=self.gradient.at(at.step),
            step=at.step,
            steps=at.steps,
            seed=at.seed,
            carry=at.carry,
            fetch=at.fetch,
            beside=self.beside,
            ledger=ledger,
            recorder=recorder,
        )
        with autocast(self.precision, batch.tokens.device.type):
            parts, first, last, ran, carry, free = self.objective.run(given)
        return StepOutput(parts.share(counts), parts.detach(), _squares(first), _squares(last), ran, carry, free)


def draw_depth(spec: LoopSpec, seed: int, step: int) -> tuple[int, Plan]:
    """The depth of an optimizer step (from 0), the same for all its rows, and the plan that it means."""
    law = spec.trained_depth
    depth = int(law.draw(stream_key(seed, "depth"), step, np.zeros(1, np.int64))[0])  # type: ignore[attr-defined]
    return depth, depth_plan(spec, depth)


class Drawn(NamedTuple):
    """The depth of the rows of a micro-batch."""

    depth: int | float
    """As drawn; of rows with depths of their own their mean."""
    plan: Plan
    """Of the deepest row."""
    depths: Int[Tensor, " batch"] | None = None
    """Of every row, where they have their own."""

    def lengths(self, ran: Plan) -> list[int]:
        """Applications of the rows, of which `ran` is the longest run."""
        return [len(ran)] if self.depths is None else self.depths.tolist()


def draw_depths(
    spec: LoopSpec, seed: int, step: int, rows: Sequence[Int[Tensor, " piece"]], per: DepthPer, law: Any = None
) -> list[Drawn]:
    """The depths of an optimizer step, for every micro-batch.

    Args:
        rows: Numbers of the rows of each micro-batch in the global batch.
        per: One depth for all rows of the step, for those of a micro-batch, or for each.
        law: What has become of a learned law; None: the model's own.
    """
    law, key, one = law or spec.trained_depth, stream_key(seed, "depth"), np.zeros(1, np.int64)
    if per == "sequence":
        drawn = [torch.from_numpy(law.draw(key, step, piece.cpu().numpy())) for piece in rows]
        return [Drawn(float(d.double().mean()), depth_plan(spec, int(d.max())), d) for d in drawn]
    numbers = range(len(rows)) if per == "micro_batch" else [0] * len(rows)
    depths = [int(law.draw(key, step, one, number)[0]) for number in numbers]
    return [Drawn(depth, depth_plan(spec, depth)) for depth in depths]


def depth_plan(spec: LoopSpec, depth: int) -> Plan:
    """The plan that a draw means: of `depth` steps, or of the first `depth` applications under PrefixDepth."""
    prefix = spec.trained_depth.of_prefix  # type: ignore[attr-defined]
    return spec.plan()[:depth] if prefix else spec.plan(depth)


def draw_noise(spec: LoopSpec, seed: int, step: int, batch: Batch) -> Float[Tensor, "batch seq noise"] | None:
    """The starting noise of some rows of a step's global batch; None for models that draw none."""
    if spec.noise_width == 0:
        return None
    items = [states.item_of(step, int(row)) for row in batch.rows]
    places = torch.arange(batch.tokens.shape[1]).expand(batch.tokens.shape)
    return states.standard_noise(stream_key(seed, "noise"), items, places, spec.noise_width).to(batch.tokens.device)


def scored_counts(objective: Objective, pieces: Sequence[Batch], drawn: Sequence[Drawn]) -> dict[str, int]:
    """Scored terms of these rows, whose micro-batches may have depths of their own.

    Raises:
        ValueError: None is scored.
    """
    lengths = {len(d.plan) for d in drawn if d.depths is None}
    if len(lengths) < 2:
        return objective.counts(torch.cat([piece.labels for piece in pieces]), max(len(d.plan) for d in drawn))
    total: dict[str, int] = {}
    for piece, (_, plan, _) in zip(pieces, drawn, strict=True):
        if scored_positions(piece.labels):
            for name, count in objective.counts(piece.labels, len(plan)).items():
                total[name] = total.get(name, 0) + count
    return total or objective.counts(pieces[0].labels)


def split(batch: Batch, pieces: int) -> list[Batch]:
    """Micro-batches: consecutive rows, in equal numbers."""

    def rows(tensor: Int[Tensor, "*any"] | None) -> list[Any]:
        return [None] * pieces if tensor is None else list(tensor.chunk(pieces))

    columns = [rows(getattr(batch, name)) for name in _TENSORS]
    return [
        dataclasses.replace(batch, **dict(zip(_TENSORS, piece, strict=True))) for piece in zip(*columns, strict=True)
    ]


def to_device(batch: Batch, device: str) -> Batch:
    """The same batch on a device."""
    tensors = {name: getattr(batch, name) for name in _TENSORS}
    moved: dict[str, Any] = {n: None if t is None else t.to(device) for n, t in tensors.items()}
    return dataclasses.replace(batch, **moved)


def autocast(precision: Precision, device: str) -> AbstractContextManager[Any]:
    """Autocast to bfloat16, or nothing."""
    return torch.autocast(device, dtype=torch.bfloat16, enabled=precision == "bf16")


def _squares(state: Any) -> Float[Tensor, ""]:
    with torch.no_grad():
        leaves = states.leaves(state)
        # One mean over all fields; in float32 at least.
        wide = torch.cat([leaf.flatten(1).to(torch.promote_types(leaf.dtype, torch.float32)) for leaf in leaves], dim=1)
        return wide.square().mean() * wide.shape[0]
