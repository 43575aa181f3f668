"""Implicit differentiation: the loop has come to a fixed point, and the gradient is that of the fixed point.

    forward     h = f(h, e), after all applications of the plan                      |f(h) - h| <= tol |f(h)|
    backward    u = v + J^T u,   J = df/dh at h;   parameters and context get u^T df       |change of u| <= tol |u|
    solver      iteration: u <- v + J^T u        anderson: combined from the last `memory` iterates by least squares

Only the last application keeps activations, whatever the depth. Every iteration of the solver is one more product with
J^T through it. What `tol` refuses is an error, or counts as `LastStep` where `otherwise` says so.

Reference: deep equilibrium models, arXiv:1909.01377.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from looplab.recurrence import state as states
from looplab.recurrence.gradient.base import GRADIENT_STRATEGIES, GradientStrategy, Segment, Step
from looplab.recurrence.gradient.truncated import TruncatedBPTT
from looplab.recurrence.plan import Plan


class NotConverged(RuntimeError):
    """The loop did not settle, or the backward equation could not be solved."""


@GRADIENT_STRATEGIES.register("implicit")
@dataclass(frozen=True, kw_only=True)
class Implicit(GradientStrategy):
    """The gradient of a fixed point."""

    solver: Literal["iteration", "anderson"] = "anderson"
    tol: float = 1e-3
    """Largest relative residual, forward and backward."""
    max_iter: int = 50
    """Iterations of the solver."""
    memory: int = 5
    """Iterates that "anderson" combines."""
    otherwise: Literal["error", "last_step"] = "error"
    """What to do where `tol` is missed."""

    def __post_init__(self) -> None:
        for name in ("max_iter", "memory"):
            if getattr(self, name) < 1:
                raise ValueError(f"Implicit.{name} must be at least 1. Got {getattr(self, name)}.")
        if not self.tol > 0:
            raise ValueError(f"Implicit.tol must be positive. Got {self.tol}.")

    def segments(self, length: int) -> tuple[Segment, ...]:
        return TruncatedBPTT(window=1).segments(length)

    def walk(
        self,
        plan: Plan,
        step: Step,
        state: Any,
        on_segment_end: Callable[[Any, int], None] | None = None,
    ) -> Any:
        before: list[Any] = []

        def noted(state: Any, unit: Any) -> Any:
            if not torch.is_grad_enabled():
                return step(state, unit)
            before.append(states.map(lambda leaf: leaf.detach().requires_grad_(), state))
            return step(before[0], unit)

        last = super().walk(plan, noted, state)
        if before:
            last = self._solved(before[0], last)
        if on_segment_end is not None:
            on_segment_end(last, len(plan))
        return last

    def _solved(self, before: Any, after: Any) -> Any:
        """`after`, whose gradient is solved for on the way back."""
        starts, ends = states.leaves(before), states.leaves(after)
        residual = _ratio(_flat(ends) - _flat(starts), _flat(ends))
        if residual > self.tol:
            self._miss(
                f"the loop has a relative residual of {residual:.3g} after its last application", "Run it deeper"
            )
            return after
        solved = iter(_Solve.apply(lambda *slopes: self._solve(starts, ends, slopes), *ends))
        return states.map(lambda _: next(solved), after)

    def _solve(self, starts: list[Tensor], ends: list[Tensor], slopes: tuple[Tensor, ...]) -> list[Tensor]:
        """u of the backward equation; `slopes` is v."""
        v = _flat(slopes)

        def advance(u: Tensor) -> Tensor:
            shaped = [part.view_as(end) for part, end in zip(u.split([e.numel() for e in ends]), ends, strict=True)]
            reached = [(e, p) for e, p in zip(ends, shaped, strict=True) if e.requires_grad]
            found = torch.autograd.grad(
                [e for e, _ in reached],
                starts,
                [p for _, p in reached],
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            return v + _flat(found)

        u, residual = fixed_point(
            advance, v, tol=self.tol, max_iter=self.max_iter, memory=1 if self.solver == "iteration" else self.memory
        )
        if residual > self.tol:
            self._miss(f"the backward equation has a relative residual of {residual:.3g}", "Raise max_iter")
            u = v
        return [part.view_as(end) for part, end in zip(u.split([e.numel() for e in ends]), ends, strict=True)]

    def _miss(self, what: str, remedy: str) -> None:
        if self.otherwise == "error":
            raise NotConverged(
                f"Implicit(tol={self.tol:g}, max_iter={self.max_iter}): {what}. {remedy}, keep the core contracting, "
                "or set otherwise='last_step'."
            )


def fixed_point(
    advance: Callable[[Tensor], Tensor], start: Tensor, *, tol: float, max_iter: int, memory: int
) -> tuple[Tensor, float]:
    """u with u = advance(u), and its relative residual |advance(u) - u| / |advance(u)|.

    The next u is the combination of the last `memory` advanced ones whose residuals, combined alike with weights that
    sum to 1, are least; with a memory of 1 it is the last one.
    """
    tried: list[Tensor] = []
    advanced: list[Tensor] = []
    u, residual = start, float("inf")
    for _ in range(max_iter):
        new = advance(u)
        residual = _ratio(new - u, new)
        if residual <= tol:
            return new, residual
        tried, advanced = [*tried, u][-memory:], [*advanced, new][-memory:]
        u = _combined(tried, advanced)
    return u, residual


def _combined(tried: list[Tensor], advanced: list[Tensor]) -> Tensor:
    last = advanced[-1]
    if len(advanced) == 1:
        return last
    residuals = torch.stack([g - u for u, g in zip(tried, advanced, strict=True)], dim=1)
    changes = residuals[:, 1:] - residuals[:, :-1]
    # Singular where a direction is exhausted, so by the pseudo-inverse.
    weights = torch.linalg.pinv(changes) @ residuals[:, -1:]
    steps = torch.stack(advanced[1:], dim=1) - torch.stack(advanced[:-1], dim=1)
    return last - (steps @ weights)[:, 0]


class _Solve(torch.autograd.Function):
    """The identity; going back, `solve` turns the incoming gradient into the outgoing one."""

    @staticmethod
    def forward(ctx: Any, solve: Callable[..., list[Tensor]], *ends: Tensor) -> tuple[Tensor, ...]:
        ctx.solve = solve
        ctx.set_materialize_grads(True)
        return tuple(end.view_as(end) for end in ends)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        with torch.enable_grad():
            return (None, *ctx.solve(*slopes))


def _flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def _ratio(change: Tensor, size: Tensor) -> float:
    return float(change.norm() / size.norm().clamp(min=torch.finfo(size.dtype).tiny))
