"""The contract of a training objective: a rollout and labels in, named parts of a loss out.

    value_i = sum_i / count_i           count_i: scored terms of the *global* batch
    total   = sum over parts of weight_i * value_i

Sums and counts travel apart. Micro-batches (and ranks) add their sums before anything is divided, so a batch that is
cut differently gives the same loss and the same gradient up to rounding.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from looplab._registry import Registry
from looplab._types import Float, Int
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.plan import Plan

OBJECTIVES: Registry[type["Objective"]] = Registry("objective", package="looplab.objectives")

IGNORED = -100
"""Label of a position that is not scored."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What an objective reads. The trainer keeps and computes nothing else."""

    states: Literal["last", "every"] = "last"
    """The states it scores: after the last application, or before the first and after every one."""


@dataclass(frozen=True)
class Part:
    """One term of a loss, not yet divided."""

    sum: Float[Tensor, ""]
    """Over the scored terms."""
    count: int
    """Number of scored terms."""
    weight: float
    """Factor of the mean in the total."""


class LossParts(Mapping[str, Part]):
    """Parts by name, in order. `a + b` joins the parts of two micro-batches."""

    def __init__(self, parts: Mapping[str, Part]):
        self._parts = dict(parts)

    def __getitem__(self, name: str) -> Part:
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __add__(self, other: "LossParts") -> "LossParts":
        if list(self) != list(other):
            raise ValueError(f"LossParts must have the same parts to be added. Got {list(self)} and {list(other)}.")
        return LossParts(
            {name: Part(a.sum + other[name].sum, a.count + other[name].count, a.weight) for name, a in self.items()}
        )

    def detach(self) -> "LossParts":
        """The same numbers without a graph."""
        return LossParts({name: replace(part, sum=part.sum.detach()) for name, part in self.items()})

    def share(self, counts: Mapping[str, int]) -> Float[Tensor, ""]:
        """These parts' share of the total of a global batch with `counts` scored terms; what is differentiated."""
        terms = [part.weight / counts[name] * part.sum for name, part in self.items()]
        return torch.stack(terms).sum()

    def means(self) -> dict[str, float]:
        """Mean of every part, in float64."""
        return {name: float(part.sum.detach()) / part.count for name, part in self.items()}

    @property
    def total(self) -> float:
        """Sum of weight * value, in float64."""
        return sum(self[name].weight * value for name, value in self.means().items())


@dataclass
class Rollout:
    """One pass through the loop, as an objective sees it."""

    model: Any
    context: Any
    plan: Plan
    states: Mapping[int, Any]
    """Number of applications so far -> state; holds what the objective's `needs` name."""
    ledger: Ledger | None = None

    def hidden(self, applications: int) -> Float[Tensor, "batch seq dim"]:
        """What the head reads after that many applications."""
        hidden = self.model.coda(self.states[applications], self.context)
        if self.ledger is not None:
            rows, tokens = hidden.shape[:2]
            self.ledger.count_coda(self.model.spec, rows=rows, tokens=tokens, gradient=torch.is_grad_enabled())
        return hidden


class Objective(ABC):
    """What a training step minimises."""

    needs: ClassVar[Needs] = Needs()

    @abstractmethod
    def counts(self, labels: Int[Tensor, "batch seq"]) -> dict[str, int]:
        """Scored terms per part. It reads labels only: the whole batch is counted before its first micro-batch runs.

        Raises:
            ValueError: Nothing is scored.
        """

    @abstractmethod
    def loss(self, rollout: Rollout, labels: Int[Tensor, "batch seq"]) -> LossParts:
        """The parts over the rows of `rollout`; `labels` are the targets of these rows, IGNORED where unscored."""
