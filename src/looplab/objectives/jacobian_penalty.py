"""Penalty on the Jacobian of the core where the loop ended, so that the map contracts there.

    h* = sg(h_T),   J = d step(h*, context) / d h*          the last application's block and iteration, once more
    v_1 ~ N(0, I) per row, normalised;   u_i = J^T v_i;   v_{i+1} = sg(u_i / |u_i|)
    L = (1 - w) CE(h_T) + w mean over rows of |u_p|^2        w = weight from `warmup_steps` on, 0 before

p = `power_iterations`. With one, the expectation over v is |J|_F^2 / dim, dim the entries of a row's state. With more,
and a normal J, it goes to the squared spectral radius; it is not the largest singular value.

The graph through u needs second derivatives, which fused attention kernels do not have: the extra application runs
with plain attention, whatever the others use. Reference: STARS, arXiv:2605.26733. Ours: v is normalised per row, so
that rows stay independent of one another, and is drawn by the noise law of the package.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from looplab._types import Float, Int
from looplab.objectives.base import (
    OBJECTIVES,
    LossParts,
    Objective,
    Outcome,
    Part,
    Pass,
    Rollout,
    labelled,
    roll,
    scored_positions,
)
from looplab.objectives.readout import token_losses
from looplab.recurrence import state as states
from looplab.recurrence.philox import stream_key


@OBJECTIVES.register("jacobian_penalty")
@dataclass(frozen=True, kw_only=True)
class JacobianPenalty(Objective):
    """Next-token loss at the drawn depth, and the squared size of a random product with the Jacobian there."""

    inner_gradient: ClassVar[bool] = True

    weight: float = 0.1
    """w; the cross-entropy has 1 - w."""
    warmup_steps: int = 0
    """Optimizer steps without the penalty."""
    power_iterations: int = 1
    """Products with the transposed Jacobian."""
    chunk: int | None = None
    """Tokens per readout chunk; None: all logits at once."""

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= 1:
            raise ValueError(f"JacobianPenalty.weight must be from 0 to 1. Got {self.weight}.")
        if self.warmup_steps < 0:
            raise ValueError(f"JacobianPenalty.warmup_steps must be at least 0. Got {self.warmup_steps}.")
        for name in ("power_iterations", "chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"JacobianPenalty.{name} must be at least 1. Got {value}.")

    def check(self, model: Any) -> None:
        """One block: of several in turn, no single application is the map that repeats."""
        if len(model.spec.blocks) != 1:
            raise ValueError(
                f"JacobianPenalty needs a loop of one block, whose application is the map that repeats. "
                f"{model.spec.name!r} has {len(model.spec.blocks)} blocks. Use TerminalFixedPoint."
            )

    def counts(self, labels: Int[Tensor, "batch seq *cells"], length: int = 1) -> dict[str, int]:
        """Positions with a label, and rows."""
        return {"ce": labelled(self, labels), "jacobian": labels.shape[0]}

    def run(self, given: Pass) -> Outcome:
        """The pass, and one application more for the penalty."""
        length, labels = len(given.plan), given.batch.labels
        rollout, first, last = roll(given, (length,))
        losses = token_losses(given.model, rollout.hidden(length), labels, chunk=self.chunk, ledger=given.ledger)
        active = given.step >= self.warmup_steps and self.weight > 0
        ce = Part(losses.sum(), scored_positions(labels), 1 - self.weight if active else 1.0)
        if not active:
            return Outcome(LossParts({"ce": ce}), first, last, given.plan)
        sizes = self.sizes(given, rollout, last)
        return Outcome(
            LossParts({"ce": ce, "jacobian": Part(sizes.sum(), len(sizes), self.weight)}), first, last, given.plan
        )

    def sizes(self, given: Pass, rollout: Rollout, last: Any) -> Float[Tensor, " batch"]:
        """|u_p|^2 of every row."""
        block, iteration = given.plan[-1]
        start = states.map(lambda leaf: leaf.detach().requires_grad_(), last)
        inputs = states.leaves(start)
        with sdpa_kernel(SDPBackend.MATH):
            index = torch.full(given.batch.rows.shape, iteration, device=inputs[0].device)
            outputs = states.leaves(given.model.step(start, rollout.context, block, index))
        v = _normalised(self._directions(given, inputs))
        for left in reversed(range(self.power_iterations)):
            u = torch.autograd.grad(
                outputs, inputs, v, create_graph=not left, retain_graph=True, materialize_grads=True
            )
            v = _normalised([part.detach() for part in u])
        self._count(given, block)
        return _squares(u)

    def _directions(self, given: Pass, inputs: list[Tensor]) -> list[Tensor]:
        """One direction per row, in the shape of the state."""
        items = [states.item_of(given.step, int(row)) for row in given.batch.rows]
        drawn = []
        for number, leaf in enumerate(inputs):
            key = stream_key(given.seed, f"jacobian:{number}")
            wide = leaf.reshape(leaf.shape[0], leaf.shape[1], -1)
            places = torch.arange(wide.shape[1]).expand(wide.shape[:2])
            drawn.append(states.standard_noise(key, items, places, wide.shape[2]).view(leaf.shape).to(leaf))
        return drawn

    def _count(self, given: Pass, block: int) -> None:
        """One application forward; a backward per product, and one through the last of them."""
        if given.ledger is None:
            return
        rows, tokens = given.batch.tokens.shape
        before = given.ledger.flops_backward
        given.ledger.count_step(given.model.spec, block, rows=rows, tokens=tokens, gradient=True)
        given.ledger.flops_backward += (given.ledger.flops_backward - before) * self.power_iterations


def _squares(parts: Any) -> Float[Tensor, " batch"]:
    """Squared norm of every row, over all tensors of a state."""
    return torch.stack([part.flatten(1).square().sum(1) for part in parts]).sum(0)


def _normalised(parts: list[Tensor]) -> list[Tensor]:
    """Rows of norm 1; a row of zeros stays."""
    size = _squares(parts).sqrt().clamp(min=torch.finfo(parts[0].dtype).tiny)
    return [part / size.view(-1, *[1] * (part.dim() - 1)) for part in parts]
