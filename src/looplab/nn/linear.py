"""Weight matrices: how they start, and low-rank changes of them that differ from row to row."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from looplab._types import Float


@dataclass(frozen=True, kw_only=True)
class Init:
    """Normal starts of weight matrices and embeddings. Biases start at 0, norm weights at 1."""

    std: float = 0.02
    """Standard deviation of every matrix without another one."""
    out_std: float | None = None
    """Standard deviation of the matrices that write into the stream (`o`, `down`); None: `std`."""
    embed_std: float | None = None
    """Standard deviation of the tables of tokens and positions; None: `std`."""
    cut: float | None = None
    """Truncation, in standard deviations; None: no truncation."""

    def __post_init__(self):
        for name in ("std", "out_std", "embed_std", "cut"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"Init.{name} must be at least 0. Got {value}. Give a standard deviation or None.")

    def matrix_(self, weight: Tensor) -> None:
        """Fills `weight` in place."""
        self._fill(weight, self.std)

    def embedding_(self, table: Tensor) -> None:
        """Fills a table of tokens or positions."""
        self._fill(table, self.std if self.embed_std is None else self.embed_std)

    def output_(self, weight: Tensor) -> None:
        """Fills a matrix that writes into the stream."""
        self._fill(weight, self.std if self.out_std is None else self.out_std)

    def _fill(self, weight: Tensor, std: float) -> None:
        if weight.is_meta:  # nothing to fill; torch would import its compiler, of 80 MB, to find that out
            return
        if self.cut is None or std == 0:
            nn.init.normal_(weight, std=std)
        else:
            nn.init.trunc_normal_(weight, std=std, a=-self.cut * std, b=self.cut * std)


class LowRank(NamedTuple):
    """A change b a of a weight matrix, one per row of the batch."""

    a: Float[Tensor, "batch rank in"]
    b: Float[Tensor, "batch out rank"]


Deltas = Mapping[str, LowRank]
"""Name of a linear map of the layer (q k v o gate up down) -> its change."""


def linear(inputs: int, outputs: int, *, init: Init, bias: bool = False, output: bool = False) -> nn.Linear:
    """A linear map that starts as `init` says; `output` marks the ones that write into the stream."""
    made = nn.Linear(inputs, outputs, bias=bias)
    (init.output_ if output else init.matrix_)(made.weight)
    if bias:
        nn.init.zeros_(made.bias)
    return made


def project(
    weight: nn.Module, x: Float[Tensor, "batch seq in"], delta: LowRank | None = None
) -> Float[Tensor, "batch seq out"]:
    """W x, or (W + b a) x with the row's own b and a. `weight` is an `nn.Linear`, or what somebody put around one."""
    y = weight(x)
    if delta is None:
        return y
    return y + (x @ delta.a.mT) @ delta.b.mT
