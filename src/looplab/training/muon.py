"""Muon: the momentum of a hidden matrix, made nearly orthogonal, is its update; AdamW has all other parameters.

    m = b m + (1 - b) g;   u = (1 - b) g + b m                                   Nesterov, b = 0.95
    X_0 = u / |u|_F;   X_{i+1} = 3.4445 X_i - 4.7750 (X X^T) X + 2.0315 (X X^T)^2 X          five times
    w <- w - lr (sqrt(max(1, rows / cols)) X_5 + weight_decay w)

A singular value of X_0 from 0.003 on ends in [0.68, 1.21]; smaller ones may stay small. Hidden matrices are weights of
linear maps in prelude, core and coda. AdamW has embeddings, heads, vectors, routers, gates with one number per head or
token, and what a module lists in `no_weight_decay`. A parameter that is several matrices in one (queries, keys and
values; experts) is split first: its module says so in `stacked`, parameter name -> number of matrices, which lie one
under another or along the first of three axes.

References: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (KellerJordan/Muon). Deviation: the
iteration runs in float32, not in bfloat16, so that equal runs have equal bits whatever the kernel of the product. A
matrix that is spread over processes is gathered alone, and all of them compute the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from looplab._types import Float
from looplab.training.optimizer import AdamW, Optimizer, decaying_parameters, groups_of
from looplab.training.spread import in_turns

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
STEPS = 5
NOT_HIDDEN = ("router", "value_gate", "q_head")
"""Names of modules whose linear maps choose or score, and do not make what the next layer reads."""


@dataclass(frozen=True, kw_only=True)
class Muon(Optimizer):
    """Orthogonal updates of hidden matrices, AdamW for the rest."""

    momentum: float = 0.95
    weight_decay: float = 0.01
    """Of hidden matrices, per step and unit of learning rate."""
    others: AdamW = field(default_factory=lambda: AdamW(lr=3e-4, weight_decay=0.01))
    """Of all other parameters; its learning rate follows the same schedule."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ValueError(f"Muon.momentum must be in [0, 1). Got {self.momentum}. 0.95 is usual.")
        if self.weight_decay < 0:
            raise ValueError(f"Muon.weight_decay must be at least 0. Got {self.weight_decay}.")
        if self.others.tables is not None:
            raise ValueError(f"Muon.others.tables must be None. Got {self.others.tables}. Set Muon.tables.")

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """Three groups: hidden matrices, and of the other parameters those that decay and those that do not."""
        matrices = hidden_matrices(model)
        groups = groups_of(model, self.others.weight_decay)
        hidden = [(p, matrices[name]) for name, p in model.named_parameters() if name in matrices]
        theirs = {id(p) for p, _ in hidden}
        for group in groups:
            group["params"] = [p for p in group["params"] if id(p) not in theirs]
        others = torch.optim.AdamW(groups, lr=self.others.lr, betas=self.others.betas, eps=self.others.eps)
        return _Muon(hidden, self, others)


PUBLISHED = Muon(lr=0.02)
"""The pair of rates and decays that KellerJordan/Muon gives for language models; the defaults of `Muon`."""


class _Muon(torch.optim.Optimizer):
    """Both optimizers as one: AdamW keeps its state and groups in here, after the group of matrices."""

    def __init__(self, matrices: list[tuple[nn.Parameter, int]], config: Muon, others: torch.optim.AdamW):
        group = {"params": [p for p, _ in matrices], "parts": [parts for _, parts in matrices]}
        super().__init__([group], {"lr": config.lr, "momentum": config.momentum, "weight_decay": config.weight_decay})
        for other in others.param_groups:
            other["share"] = config.others.lr / config.lr
        self._others = others
        self.param_groups.extend(others.param_groups)
        others.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        lr, beta = group["lr"], group["momentum"]
        moved = [(p, n) for p, n in zip(group["params"], group["parts"], strict=True) if p.grad is not None]

        def made(number: int, update: torch.Tensor) -> torch.Tensor:
            return orthogonal(update.view(moved[number][1], -1, update.shape[-1])).view_as(update)

        changes = in_turns((self._update(parameter, beta) for parameter, _ in moved), made)
        for (parameter, parts), change in zip(moved, changes, strict=True):
            rows, cols = parameter.numel() // parameter.shape[-1] // parts, parameter.shape[-1]
            parameter.mul_(1 - lr * group["weight_decay"])
            parameter.add_(change, alpha=-lr * max(1.0, rows / cols) ** 0.5)
        self._others.step()

    def _update(self, parameter: nn.Parameter, beta: float) -> torch.Tensor:
        """The gradient with momentum."""
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].lerp_(gradient, 1 - beta)
        return gradient.lerp(state["momentum"], beta)


def orthogonal(matrices: Float[torch.Tensor, "parts rows cols"]) -> Float[torch.Tensor, "parts rows cols"]:
    """Each matrix U S V^T as about U V^T; a matrix of zeros stays."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.to(torch.promote_types(matrices.dtype, torch.float32))
    x = x.mT if tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    a, b, c = NEWTON_SCHULZ
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).contiguous().to(matrices.dtype)


def hidden_matrices(model: nn.Module) -> dict[str, int]:
    """Name of every trained hidden matrix -> number of matrices that it holds.

    Raises:
        ValueError: A module's `stacked` names no parameter, or a number that does not divide its rows.
    """
    decaying, stacked = decaying_parameters(model), dict(_stacked(model))
    found = {}
    for prefix, module in model.named_modules():
        name = f"{prefix}.weight"
        of_linear = isinstance(module, nn.Linear) and not set(NOT_HIDDEN) & set(prefix.split("."))
        if of_linear and name in decaying and module.weight.shape[0] > 1:
            found[name] = stacked.pop(name, 1)
    return found | {name: parts for name, parts in stacked.items() if name in decaying}


def _stacked(model: nn.Module) -> Iterator[tuple[str, int]]:
    """What modules say about their parameters."""
    for prefix, module in model.named_modules():
        known = dict(module.named_parameters())
        for name, parts in getattr(module, "stacked", {}).items():
            path = f"{prefix}.{name}" if prefix else name
            if name not in known:
                raise ValueError(
                    f"{prefix or type(module).__name__}.stacked must name parameters of the module. Got {name!r}. "
                    f"Known: {', '.join(known) or 'none'}."
                )
            if known[name].shape[0] % parts:
                raise ValueError(
                    f"stacked: {path} must have a multiple of {parts} rows. Got {known[name].shape[0]}. "
                    "Give the number of matrices in it."
                )
            yield path, parts
