"""Where a loss or gradient stopped being finite: the first tensor, in the order of the computation.

A state that grows is found as RMS(h_T) > 1000 RMS(h_0).
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from looplab.records import Finding, Level
from looplab.recurrence.trace import Recorder
from looplab.training.spread import own_piece

LARGEST_GROWTH = 1e3


class DivergedError(RuntimeError):
    """Training stopped because too many steps in a row gave no finite loss or gradient."""


def growth(first: float, last: float, *, step: int) -> Finding | None:
    """What to say of the RMS of the state before and after the loop; nothing where it starts at 0."""
    if not first > 0 or not last > LARGEST_GROWTH * first:
        return None
    return Finding(
        kind="training.state_grows",
        level=Level.WARNING,
        message=f"step {step}: state grows. RMS(h_T) is {last:.3g}, {last / first:,.0f} times RMS(h_0).",
        remedy="EndNorm sets the RMS of the state back at the end of every iteration (boundary=EndNorm(..)).",
        value=last / first,
        threshold=LARGEST_GROWTH,
        where={"step": step},
    )


class _Counter(Recorder):
    """Counts applications. It keeps the states, which some losses read of the recorder that they are handed."""

    def __init__(self) -> None:
        super().__init__(max_bytes=sys.maxsize)
        self.done = -1

    def start(self, state: Any) -> None:
        super().start(state)
        self.done = 0

    def applied(self, state: Any, record: dict[str, Any] | None) -> None:
        super().applied(state, record)
        self.done += 1


def first_non_finite(
    model: nn.Module,
    rerun: Callable[[Recorder], Any],
    applications: int,
    *,
    agree: Callable[[str | None], str | None] = lambda found: found,
) -> str:
    """The name of the first tensor that is not finite, and the iteration in which it arises.

    Parameters come first, then outputs of modules in a second forward pass, then gradients.

    Args:
        rerun: Does the forward pass again with the recorder it is handed.
        applications: Length of the plan.
        agree: What one of several processes has found -> what all say; each has its own rows, or pieces.
    """
    parameters = {f"parameter {name}": p for name, p in model.named_parameters()}
    gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return (
        agree(_first_of(parameters))
        or agree(_first_output(model, rerun, applications))
        or agree(_first_of(gradients))
        or "none (the sum overflowed)"
    )


def _first_of(tensors: Mapping[str, Tensor]) -> str | None:
    return next((name for name, tensor in tensors.items() if not _finite(own_piece(tensor))), None)


def _first_output(model: nn.Module, rerun: Callable[[Recorder], Any], applications: int) -> str | None:
    counter = _Counter()
    found: list[tuple[str, int]] = []

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if not found and isinstance(output, Tensor) and not _finite(output):
                found.append((name, counter.done))

        return hook

    hooks = [module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad():
            rerun(counter)
    finally:
        for hook in hooks:
            hook.remove()
    if not found:
        return None
    name, done = found[0]
    if done < 0:
        return f"{name} before the loop"
    return f"{name} at iteration {done + 1} of {applications}" if done < applications else f"{name} after the loop"


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
