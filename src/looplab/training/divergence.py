"""Where a loss or gradient stopped being finite: the first tensor, in the order of the computation."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from looplab.recurrence.trace import Recorder


class DivergedError(RuntimeError):
    """Training stopped because too many steps in a row gave no finite loss or gradient."""


class _Counter(Recorder):
    """Counts applications, keeps nothing."""

    def __init__(self) -> None:
        super().__init__(keep_states=False)
        self.done = -1

    def start(self, state: Any) -> None:
        self.done = 0

    def applied(self, state: Any, record: dict[str, Any] | None) -> None:
        self.done += 1


def first_non_finite(model: nn.Module, rerun: Callable[[Recorder], Any], applications: int) -> str:
    """The name of the first tensor that is not finite, and the iteration in which it arises.

    Parameters come first, then outputs of modules in a second forward pass, then gradients.

    Args:
        rerun: Does the forward pass again with the recorder it is handed.
        applications: Length of the plan.
    """
    for name, parameter in model.named_parameters():
        if not _finite(parameter):
            return f"parameter {name}"
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
    if found:
        name, done = found[0]
        if done < 0:
            return f"{name} before the loop"
        return f"{name} at iteration {done + 1} of {applications}" if done < applications else f"{name} after the loop"
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not _finite(parameter.grad):
            return f"gradient of {name}"
    return "none (the sum overflowed)"


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
