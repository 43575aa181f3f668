"""Optimizers: which parameters decay, and the state of an optimizer as named tensors.

    m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
    AdamW        w -= lr (m^ / (sqrt(v^) + eps) + weight_decay w)
    AdamATan2    w -= lr (atan2(m^, sqrt(v^)) + weight_decay w)                  no eps, and no other constants (ours)
    SignSGD      w -= lr (sign(g) + weight_decay w)                              of rows of puzzle tables that were read

Weight decay acts on matrices only: not on norms, biases or scalars, and not on what a module lists in its
`no_weight_decay` (names of its parameters, such as the decays of an injection).

References: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv:1711.05101; Everett et al., "Scaling
Exponents Across Parameterizations and Optimizers", arXiv:2407.05872 (atan2); HRM, arXiv:2506.21734 (tables by sign).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from looplab.models.puzzle import PuzzleTable
from looplab.training.spread import as_placed


@dataclass(frozen=True, kw_only=True)
class SignSGD:
    """Puzzle tables, whose rows are seen rarely: a step of fixed size against the sign of the gradient.

    A row that the batch did not read has no gradient, and stays as it is.
    """

    lr: float
    """Peak learning rate; the schedule scales it."""
    weight_decay: float = 0.1
    """Of rows that were read, per step and unit of learning rate."""

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"SignSGD.lr must be positive. Got {self.lr}.")
        if self.weight_decay < 0:
            raise ValueError(f"SignSGD.weight_decay must be at least 0. Got {self.weight_decay}.")

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """An optimizer of the model's puzzle tables, which require grad from now on. It has no state.

        Raises:
            ValueError: The model has none.
        """
        tables = [module.table.requires_grad_() for module in model.modules() if isinstance(module, PuzzleTable)]
        if not tables:
            raise ValueError("SignSGD trains puzzle tables. Got a model without one. Set Optimizer.tables=None.")
        return _Sign(tables, {"lr": self.lr, "weight_decay": self.weight_decay})


@dataclass(frozen=True, kw_only=True)
class Optimizer(ABC):
    """How gradients become updates."""

    lr: float
    """Peak learning rate; the schedule scales it."""
    tables: SignSGD | None = None
    """Of puzzle tables, which are no parameters; None: they stay as they are."""

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"{type(self).__name__}.lr must be positive. Got {self.lr}.")

    @abstractmethod
    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """An optimizer of the parameters that require grad, as groups; every group follows the schedule."""


@dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    """Of matrices, per step and unit of learning rate."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"AdamW.betas must be in [0, 1). Got {self.betas}.")
        if self.weight_decay < 0:
            raise ValueError(f"AdamW.weight_decay must be at least 0. Got {self.weight_decay}.")

    def build(self, model: nn.Module) -> torch.optim.AdamW:
        """Two groups: parameters that decay, and the others."""
        return torch.optim.AdamW(groups_of(model, self.weight_decay), lr=self.lr, betas=self.betas, eps=self.eps)


@dataclass(frozen=True, kw_only=True)
class AdamATan2(Optimizer):
    """Adam whose division is an arc tangent: at most pi / 2 per step, whatever the scale of the gradient."""

    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    """Of matrices, per step and unit of learning rate."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"AdamATan2.betas must be in [0, 1). Got {self.betas}.")
        if self.weight_decay < 0:
            raise ValueError(f"AdamATan2.weight_decay must be at least 0. Got {self.weight_decay}.")

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """Two groups: parameters that decay, and the others."""
        return _ATan2(groups_of(model, self.weight_decay), {"lr": self.lr, "betas": self.betas})


class _ATan2(torch.optim.Optimizer):
    """One update at a time, in plain operations."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (b1, b2), lr = group["betas"], group["lr"]
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                state = self.state[parameter]
                if not state:
                    zero = torch.zeros_like(parameter)
                    state.update(step=torch.zeros(()), exp_avg=zero, exp_avg_sq=zero.clone())
                state["step"] += 1
                first, second, count = state["exp_avg"], state["exp_avg_sq"], float(state["step"])
                first.lerp_(gradient, 1 - b1)
                second.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
                size = (second / (1 - b2**count)).sqrt_()
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.add_(torch.atan2(first / (1 - b1**count), size), alpha=-lr)


class _Sign(torch.optim.Optimizer):
    """Without momentum."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for table in group["params"]:
                if table.grad is None:
                    continue
                read = (table.grad != 0).any(1)
                kept = table[read] * (1 - group["lr"] * group["weight_decay"])
                table[read] = kept - group["lr"] * table.grad[read].sign()


def groups_of(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameters that decay, and the others. Empty groups stay: the group's place is its meaning."""
    decaying = decaying_parameters(model)
    return [
        {"params": [p for name, p in trained(model) if (name in decaying) is decays], "weight_decay": decay}
        for decays, decay in ((True, weight_decay), (False, 0.0))
    ]


def trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, parameter) of all that require grad; tied ones once, under their first name."""
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


def decaying_parameters(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that weight decay acts on.

    Raises:
        ValueError: A module's `no_weight_decay` names something that is not a parameter of it.
    """
    kept: set[int] = set()
    for prefix, module in model.named_modules():
        own = dict(module.named_parameters())
        for name in getattr(module, "no_weight_decay", ()):
            if name not in own:
                raise ValueError(
                    f"{prefix or type(module).__name__}.no_weight_decay must name parameters of the module. "
                    f"Got {name!r}. Known: {', '.join(own) or 'none'}."
                )
            kept.add(id(own[name]))
    return frozenset(name for name, p in trained(model) if p.dim() >= 2 and id(p) not in kept)


def state_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimizer's state as `parameter/key` -> tensor; a parameter that was never updated has none."""
    return {
        f"{name}/{key}": value
        for name, parameter in trained(model)
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_state(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Puts back what `state_tensors` gave.

    Raises:
        KeyError: State of a parameter that the model does not have.
    """
    parameters = dict(trained(model))
    optimizer.state.clear()
    for entry, tensor in tensors.items():
        name, key = entry.rsplit("/", 1)
        parameter = parameters[name]
        # Counters have no axis and stay on the CPU, as the optimizer made them.
        optimizer.state[parameter][key] = as_placed(tensor, parameter) if tensor.dim() else tensor
