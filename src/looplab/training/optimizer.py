"""Optimizers: which parameters decay, and the state of an optimizer as named tensors.

    m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  w -= lr (m^ / (sqrt(v^) + eps) + weight_decay w)

Weight decay acts on matrices only: not on norms, biases or scalars, and not on what a module lists in its
`no_weight_decay` (names of its own parameters, such as the decays of an injection).

Reference: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv:1711.05101.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Optimizer(ABC):
    """How gradients become updates."""

    lr: float
    """Peak learning rate; the schedule scales it."""

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
        decaying = decaying_parameters(model)
        groups = [
            {"params": [p for name, p in trained(model) if (name in decaying) is decays], "weight_decay": decay}
            for decays, decay in ((True, self.weight_decay), (False, 0.0))
        ]
        # Empty groups stay: the group's place is its meaning.
        return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps)


def trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, parameter) of all that require grad; tied ones once, under their first name."""
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


def decaying_parameters(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that weight decay acts on.

    Raises:
        ValueError: A module's `no_weight_decay` names something that is not a parameter of its own.
    """
    kept: set[int] = set()
    for prefix, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
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
        optimizer.state[parameter][key] = tensor.to(parameter.device) if tensor.dim() else tensor
