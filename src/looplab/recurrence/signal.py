"""What tells a block which iteration it is at.

    StepEmbedding     u + E[t]
    AdaLN             c = MLP_t(code(time)) + MLP_dt(code(dt));  (g1, g2, k1, k2) = W silu(c) + b  per layer;
                      h += g1 o attn(n(h) o (1 + k1));  h += g2 o ffn(n(h) o (1 + k2))    LoopFormer, arXiv:2602.11451
    PerIterationLoRA  W_t = W + B_t A_t for the named maps of every layer, B = 0 at the start

code(x) = [cos | sin] of x * 10000^(-i / n), n = freq_dim / 2. `time` is the sum of earlier step sizes. Rows of one
launch may be at different iterations: whatever depends on the index is gathered, one indexed read per application.

A signal has a part for the whole model (`build`) and a part for each layer (`build_layer`); either may be None.
Deviation: LoopFormer writes a zero start for W and b that its own weight initialisation overwrites; ours starts as its
runs did, W normal and b = 0.
"""

import math
from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from looplab._registry import did_you_mean
from looplab._types import Float, Int
from looplab.nn.layer import Modulation
from looplab.nn.linear import Init, LowRank, linear

Linears = Mapping[str, tuple[int, int]]
"""Name of each large linear map of a layer -> (inputs, outputs), as of `Layer.linears`."""


class Signal(ABC):
    """How a block learns the iteration index."""

    @property
    def index_part(self) -> str | None:
        """Its name among the index parts of a LoopSpec; None: nothing depends on the index."""
        return None

    @property
    def limit(self) -> int | None:
        """Iterations below it have own parameters; None: no such bound."""
        return None

    def build(self, dim: int, init: Init) -> nn.Module | None:
        """The part that the whole model shares."""
        return None

    def build_layer(self, dim: int, linears: Linears, init: Init) -> nn.Module | None:
        """The part of one layer."""
        return None

    def matmul_params(self, linears: Linears) -> int:
        """Entries of the matrices that one token is multiplied with, per layer."""
        return 0

    def matmul_params_per_row(self, dim: int, layers: int) -> int:
        """Entries of the matrices that one row (not token) is multiplied with, per application of `layers` layers."""
        return 0


@dataclass(frozen=True, kw_only=True)
class NoSignal(Signal):
    """The block does not know."""


@dataclass(frozen=True, kw_only=True)
class StepEmbedding(Signal):
    """A trained vector per iteration, added to what the block reads."""

    max: int
    """Iterations with a vector."""

    def __post_init__(self):
        if self.max < 1:
            raise ValueError(f"StepEmbedding.max must be at least 1. Got {self.max}. Give the largest trained depth.")

    @property
    def index_part(self) -> str:
        """Its name among the index parts of a LoopSpec."""
        return "embedding"

    @property
    def limit(self) -> int:
        """Iterations below it have own parameters."""
        return self.max

    def build(self, dim: int, init: Init) -> "StepEmbeddingModule":
        """The part that the whole model shares."""
        return StepEmbeddingModule(self.max, dim, init)


@dataclass(frozen=True, kw_only=True)
class AdaLN(Signal):
    """Gains of every branch from time and step size."""

    freq_dim: int = 256
    """Width of the sinusoid code."""

    def __post_init__(self):
        if self.freq_dim < 2 or self.freq_dim % 2:
            raise ValueError(f"AdaLN.freq_dim must be even and at least 2. Got {self.freq_dim}. LoopFormer has 256.")

    @property
    def index_part(self) -> str:
        """Its name among the index parts of a LoopSpec."""
        return "adaln"

    def build(self, dim: int, init: Init) -> "TimeCode":
        """The part that the whole model shares."""
        return TimeCode(self.freq_dim, dim, init)

    def build_layer(self, dim: int, linears: Linears, init: Init) -> "AdaLNModule":
        """The part of one layer."""
        return AdaLNModule(dim, init)

    def matmul_params_per_row(self, dim: int, layers: int) -> int:
        """Entries of the matrices that one row (not token) is multiplied with, per application of `layers` layers."""
        return 2 * (self.freq_dim * dim + dim * dim) + layers * 4 * dim * dim


@dataclass(frozen=True, kw_only=True)
class PerIterationLoRA(Signal):
    """A low-rank change of the named maps per iteration."""

    rank: int
    targets: tuple[str, ...]
    """Names of linear maps: q k v o of attention, gate up down of the feed-forward."""
    max: int
    """Iterations with a change of their own."""

    def __post_init__(self):
        for name, value in (("rank", self.rank), ("max", self.max)):
            if value < 1:
                raise ValueError(f"PerIterationLoRA.{name} must be at least 1. Got {value}. Use NoSignal() for none.")
        if not self.targets or len(set(self.targets)) != len(self.targets):
            raise ValueError(
                f"PerIterationLoRA.targets must name at least one map, each once. Got {self.targets}. "
                "Choose from q k v o gate up down."
            )

    @property
    def index_part(self) -> str:
        """Its name among the index parts of a LoopSpec."""
        return "lora"

    @property
    def limit(self) -> int:
        """Iterations below it have own parameters."""
        return self.max

    def build_layer(self, dim: int, linears: Linears, init: Init) -> "PerIterationLoRAModule":
        """The part of one layer."""
        self._check(linears)
        return PerIterationLoRAModule(self, linears, init)

    def matmul_params(self, linears: Linears) -> int:
        """Entries of the matrices that one token is multiplied with, per layer."""
        self._check(linears)
        return sum(self.rank * sum(linears[name]) for name in self.targets)

    def _check(self, linears: Linears) -> None:
        for name in self.targets:
            if name not in linears:
                known = sorted(linears)
                raise ValueError(
                    f"PerIterationLoRA.targets must be among {', '.join(known)}. Got {name!r}."
                    f"{did_you_mean(name, known) or ' Choose one of them.'}"
                )


class StepEmbeddingModule(nn.Module):
    """u + E[t]."""

    def __init__(self, entries: int, dim: int, init: Init):
        super().__init__()
        self.table = nn.Parameter(torch.empty(entries, dim))
        init.matrix_(self.table)

    def forward(
        self, u: Float[Tensor, "batch seq dim"], iteration: Int[Tensor, " batch"]
    ) -> Float[Tensor, "batch seq dim"]:
        """What the block reads."""
        return u + self.table[iteration][:, None]


class TimeCode(nn.Module):
    """c = MLP_t(code(time)) + MLP_dt(code(dt))."""

    def __init__(self, freq_dim: int, dim: int, init: Init):
        super().__init__()
        self.freq_dim = freq_dim
        self.time = _code_mlp(freq_dim, dim, init)
        self.step_size = _code_mlp(freq_dim, dim, init)

    def forward(
        self,
        times: Float[Tensor, "batch grid"],
        step_sizes: Float[Tensor, "batch grid"],
        iteration: Int[Tensor, " batch"],
    ) -> Float[Tensor, "batch dim"]:
        """The code of every row's iteration.

        Args:
            times: Per row, the time at which each iteration starts.
            step_sizes: Per row, the size of each step.
            iteration: The row of these tables that each row of the batch reads.
        """
        time, step_size = (table.gather(1, iteration[:, None].long()) for table in (times, step_sizes))
        return self.time(self._sinusoids(time)) + self.step_size(self._sinusoids(step_size))

    def _sinusoids(self, x: Tensor) -> Tensor:
        """[cos | sin] of x at geometric frequencies, in the type of the weights."""
        dtype = next(self.time.parameters()).dtype
        wide = torch.promote_types(dtype, torch.float32)
        half = self.freq_dim // 2
        index = torch.arange(half, device=x.device, dtype=wide)
        angle = x.to(wide) * torch.exp(-math.log(10000) * index / half)
        return torch.cat([angle.cos(), angle.sin()], dim=-1).to(dtype)


class AdaLNModule(nn.Module):
    """(g1, g2, k1, k2) = W silu(c) + b."""

    stacked: ClassVar[Mapping[str, int]] = MappingProxyType({"map.weight": 4})
    """Matrices that lie one under another in a parameter, for optimizers of matrices."""

    def __init__(self, dim: int, init: Init):
        super().__init__()
        self.map = linear(dim, 4 * dim, init=init, bias=True)

    def forward(self, code: Float[Tensor, "batch dim"]) -> Modulation:
        """The gains of one layer."""
        return Modulation(*self.map(F.silu(code))[:, None].chunk(4, dim=-1))


class PerIterationLoRAModule(nn.Module):
    """A_t and B_t of one layer: `a.<map>` [max, rank, inputs], `b.<map>` [max, outputs, rank]."""

    def __init__(self, config: PerIterationLoRA, linears: Linears, init: Init):
        super().__init__()
        self.a = nn.ParameterDict()
        self.b = nn.ParameterDict()
        for name in config.targets:
            inputs, outputs = linears[name]
            self.a[name] = nn.Parameter(torch.empty(config.max, config.rank, inputs))
            init.matrix_(self.a[name])
            self.b[name] = nn.Parameter(torch.zeros(config.max, outputs, config.rank))

    def forward(self, iteration: Int[Tensor, " batch"]) -> dict[str, LowRank]:
        """The change of each named map, one per row."""
        return {name: LowRank(self.a[name][iteration], self.b[name][iteration]) for name in self.a}


def _code_mlp(freq_dim: int, dim: int, init: Init) -> nn.Sequential:
    return nn.Sequential(linear(freq_dim, dim, init=init, bias=True), nn.SiLU(), linear(dim, dim, init=init, bias=True))
