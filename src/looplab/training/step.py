"""One training step up to its loss, as one `nn.Module.forward`, so that wrappers of modules see a single call.

T ~ trained_depth  (one draw per optimizer step)      plan = plan(T), or prefix(T) of the full plan
context = encode(rows);  s_0 = init_state(context, noise);  s_K under the gradient strategy;  parts = objective
"""

import dataclasses
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from looplab._types import Float, Int
from looplab.data.packing import Batch
from looplab.models.base import LoopedLM
from looplab.objectives.base import LossParts, Objective, Rollout
from looplab.recurrence import state as states
from looplab.recurrence.gradient.base import GradientStrategy
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.loop import run_plan
from looplab.recurrence.philox import stream_key
from looplab.recurrence.plan import Plan
from looplab.recurrence.spec import LoopSpec
from looplab.recurrence.trace import Recorder

_TENSORS = ("tokens", "labels", "positions", "document_ids", "rows")

Precision = Literal["fp32", "bf16"]


class StepOutput(NamedTuple):
    """What the forward of a step returns."""

    share: Float[Tensor, ""]
    """This micro-batch's share of the loss of the global batch; the tensor to differentiate."""
    parts: LossParts
    """Detached."""
    first_squares: Float[Tensor, ""]
    last_squares: Float[Tensor, ""]
    """Mean square of the state before and after the loop, times the rows."""


class TrainingStep(nn.Module):
    """A model, an objective and a gradient strategy."""

    def __init__(
        self, model: LoopedLM, objective: Objective, gradient: GradientStrategy, *, precision: Precision = "fp32"
    ):
        super().__init__()
        self.model, self.objective, self.gradient, self.precision = model, objective, gradient, precision

    def forward(
        self,
        batch: Batch,
        plan: Plan,
        noise: Float[Tensor, "batch seq noise"] | None,
        counts: dict[str, int],
        *,
        ledger: Ledger | None = None,
        recorder: Recorder | None = None,
    ) -> StepOutput:
        """The loss of one micro-batch.

        Args:
            counts: Scored terms of the global batch, per part.
            ledger: Receives the counts of what ran.
            recorder: Watches the applications; needed by nobody but a search for a fault.
        """
        model, every = self.model, self.objective.needs.states == "every"
        recorder = recorder or (Recorder() if every else None)
        with autocast(self.precision, batch.tokens.device.type):
            context = encode(model, batch, ledger=ledger)
            first = model.init_state(context, noise)
            last = run_plan(model, plan, context, first, gradient=self.gradient, ledger=ledger, recorder=recorder)
            kept = dict(enumerate(recorder.states)) if every and recorder is not None else {len(plan): last}
            rollout = Rollout(model=model, context=context, plan=plan, states=kept, ledger=ledger)
            parts = self.objective.loss(rollout, batch.labels)
        return StepOutput(parts.share(counts), parts.detach(), _squares(first), _squares(last))


def encode(model: LoopedLM, batch: Batch, *, ledger: Ledger | None = None) -> Any:
    """The context of a batch, counted."""
    extras = None if batch.document_ids is None else {"document_ids": batch.document_ids}
    context = model.encode(batch.tokens, positions=batch.positions, extras=extras)
    if ledger is not None:
        rows, tokens = batch.tokens.shape
        ledger.count_encode(model.spec, rows=rows, tokens=tokens, gradient=torch.is_grad_enabled())
    return context


def draw_depth(spec: LoopSpec, seed: int, step: int) -> tuple[int, Plan]:
    """The depth of an optimizer step (from 0), the same for all its rows, and the plan that it means."""
    law = spec.trained_depth
    depth = int(law.draw(stream_key(seed, "depth"), step, np.zeros(1, np.int64))[0])  # type: ignore[attr-defined]
    return depth, spec.plan()[:depth] if law.of_prefix else spec.plan(depth)  # type: ignore[attr-defined]


def draw_noise(spec: LoopSpec, seed: int, step: int, batch: Batch) -> Float[Tensor, "batch seq noise"] | None:
    """The starting noise of some rows of a step's global batch; None for models that draw none."""
    if spec.noise_width == 0:
        return None
    items = [states.item_of(step, int(row)) for row in batch.rows]
    places = torch.arange(batch.tokens.shape[1]).expand(batch.tokens.shape)
    return states.standard_noise(stream_key(seed, "noise"), items, places, spec.noise_width).to(batch.tokens.device)


def split(batch: Batch, pieces: int) -> list[Batch]:
    """Micro-batches: consecutive rows, in equal numbers."""

    def rows(tensor: Int[Tensor, " *any"] | None) -> list[Any]:
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
