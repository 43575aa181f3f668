"""The contract of an injection: u = inject(s, e), what the block's layers read.

    s   the state before the application, e the context (what the prelude made, or the embeddings)

`When` says at which iterations it acts; elsewhere u = s. Rows of one launch may be at different iterations.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from looplab._registry import Registry
from looplab._types import Float, Int
from looplab.nn.linear import Init

INJECTIONS: Registry[type["Injection"]] = Registry("injection", package="looplab.recurrence.injection")


@dataclass(frozen=True, kw_only=True)
class When(ABC):
    """The iterations at which an injection acts."""

    @abstractmethod
    def operator_class(self, iteration: int) -> int:
        """Equal for iterations at which it does the same."""

    @abstractmethod
    def choose(self, iteration: Int[Tensor, " batch"], injected: Tensor, state: Tensor) -> Tensor:
        """Per row, the injected state where the injection acts and the state itself elsewhere."""


@dataclass(frozen=True, kw_only=True)
class Every(When):
    """At all iterations."""

    def operator_class(self, iteration: int) -> int:
        """Equal for iterations at which it does the same."""
        return 0

    def choose(self, iteration: Int[Tensor, " batch"], injected: Tensor, state: Tensor) -> Tensor:
        """The injected state."""
        return injected


@dataclass(frozen=True, kw_only=True)
class FirstOnly(When):
    """At iteration 0 only."""

    def operator_class(self, iteration: int) -> int:
        """Equal for iterations at which it does the same."""
        return min(iteration, 1)

    def choose(self, iteration: Int[Tensor, " batch"], injected: Tensor, state: Tensor) -> Tensor:
        """The injected state in rows at iteration 0."""
        return torch.where((iteration == 0)[:, None, None], injected, state)


@dataclass(frozen=True, kw_only=True)
class SkipFirst(When):
    """At all iterations but 0, for states that start as the context itself (arXiv:2511.07384, "skip-adapter")."""

    def operator_class(self, iteration: int) -> int:
        """Equal for iterations at which it does the same."""
        return min(iteration, 1)

    def choose(self, iteration: Int[Tensor, " batch"], injected: Tensor, state: Tensor) -> Tensor:
        """The injected state in rows past iteration 0."""
        return torch.where((iteration > 0)[:, None, None], injected, state)


@dataclass(frozen=True, kw_only=True)
class Injection(ABC):
    """How the context enters an application."""

    @abstractmethod
    def build(self, state_dim: int, embed_dim: int, init: Init) -> nn.Module | None:
        """The module (state, embeds, iteration) -> u, or None where u = s."""

    @abstractmethod
    def matmul_params(self, state_dim: int, embed_dim: int) -> int:
        """Entries of the matrices that one token is multiplied with."""

    @abstractmethod
    def operator_class(self, iteration: int) -> int:
        """Equal values: the same function of (state, context)."""


@dataclass(frozen=True, kw_only=True)
class Reinjection(Injection):
    """An injection that reads the context."""

    when: When = Every()
    source: Literal["prelude", "embeds"] = "prelude"
    """What the context is: the prelude's output, or the embeddings."""
    shared_over_blocks: bool = True
    """Whether all blocks use one set of parameters."""

    def __post_init__(self):
        if self.source not in ("prelude", "embeds"):
            raise ValueError(
                f"{type(self).__name__}.source must be 'prelude' or 'embeds'. Got {self.source!r}. Choose one of them."
            )

    def operator_class(self, iteration: int) -> int:
        """Equal values: the same function of (state, context)."""
        return self.when.operator_class(iteration)

    def build(self, state_dim: int, embed_dim: int, init: Init) -> "ReinjectionModule":
        """The module (state, embeds, iteration) -> u."""
        return ReinjectionModule(self.when, self.rule(state_dim, embed_dim, init))

    @abstractmethod
    def rule(self, state_dim: int, embed_dim: int, init: Init) -> nn.Module:
        """The module (state, embeds, iteration) -> u of an iteration at which the injection acts."""

    def _equal_widths(self, state_dim: int, embed_dim: int) -> None:
        if state_dim != embed_dim:
            raise ValueError(
                f"{type(self).__name__} needs equal widths. Got state {state_dim}, embeds {embed_dim}. "
                "Use Concat(init='normal')"
            )


class ReinjectionModule(nn.Module):
    """A rule, at the iterations at which it acts."""

    def __init__(self, when: When, rule: nn.Module):
        super().__init__()
        self.when = when
        self.rule = rule

    @property
    def no_weight_decay(self) -> tuple[str, ...]:
        """Names of own parameters that an optimizer must not decay."""
        return tuple(f"rule.{name}" for name in getattr(self.rule, "no_weight_decay", ()))

    def forward(
        self,
        state: Float[Tensor, "batch seq state_dim"],
        embeds: Float[Tensor, "batch seq embed_dim"],
        iteration: Int[Tensor, " batch"],
    ) -> Float[Tensor, "batch seq state_dim"]:
        """u, what the block's layers read."""
        return self.when.choose(iteration, self.rule(state, embeds, iteration), state)
