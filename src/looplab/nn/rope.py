"""How attention knows positions.

    Rope          q, k rotated in pairs by position * base^(-2 i / head_dim)     arXiv:2104.09864
    NoPE          nothing
    ALiBi         score - slope_h * distance                                     arXiv:2108.12409
    Learned       a trained vector per position, added to the embedding (nn/embedding.py)
    RelativeBias  score + a trained number per head and distance; distances past the table read its last entry
    FallingBias   the same, but past the table the number falls by `slope` per position: what all far positions
                  weigh together stays bounded, e^(last entry) / (e^slope - 1), however long the row is

Rotary pairs are (i, i + head_dim / 2) for "half" and (2 i, 2 i + 1) for "interleaved". Angles are float32 whatever the
model's type is: in bfloat16, positions above 256 would no longer differ.
"""

import math
from abc import ABC
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from looplab._types import Float, Int


class Position(ABC):
    """A position rule."""


@dataclass(frozen=True, kw_only=True)
class NoPE(Position):
    """No positions; a causal mask alone tells order."""


@dataclass(frozen=True, kw_only=True)
class Learned(Position):
    """A trained vector per position, added to the embedding."""

    max: int
    """Number of positions."""

    def __post_init__(self):
        _at_least_one("Learned", self.max)


@dataclass(frozen=True, kw_only=True)
class ALiBi(Position):
    """Scores fall linearly with distance, at a fixed slope per head."""

    def slopes(self, heads: int, device: torch.device) -> Float[Tensor, " heads"]:
        """2^(-8 (i + 1) / n) for a power of two n; otherwise those of the power below and every other one of 2 n."""
        power = 2 ** math.floor(math.log2(heads))
        first = torch.arange(1, power + 1, device=device) * (-8 / power)
        rest = (2 * torch.arange(heads - power, device=device) + 1) * (-4 / power)
        return torch.exp2(torch.cat([first, rest]).float())


@dataclass(frozen=True, kw_only=True)
class RelativeBias(Position):
    """A trained number per head and distance, starting at 0."""

    max: int
    """Distances with an own entry: 0 .. max - 1."""

    def __post_init__(self):
        _at_least_one("RelativeBias", self.max)


@dataclass(frozen=True, kw_only=True)
class FallingBias(Position):
    """A trained number per head and near distance, starting at 0; beyond them it falls linearly (ours)."""

    max: int
    """Distances with an own entry: 0 .. max - 1."""
    slope: float = 1.0
    """Fall per position beyond the table."""

    def __post_init__(self):
        _at_least_one("FallingBias", self.max)
        if not self.slope > 0:
            raise ValueError(
                f"FallingBias.slope must be positive. Got {self.slope}. Use RelativeBias for a bias that stays level."
            )


@dataclass(frozen=True, kw_only=True)
class Llama3:
    """Rotary frequencies for longer contexts, as in Llama 3.1 (arXiv:2407.21783): slow pairs are slowed."""

    factor: float
    """How much slower the slow pairs turn."""
    low_freq_factor: float
    """Pairs that turn fewer times than this within the original context are slowed fully."""
    high_freq_factor: float
    """Pairs that turn more often than this are left alone; between the two the change is blended."""
    original_max_positions: int

    def __post_init__(self):
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                "Llama3.low_freq_factor must be positive and below high_freq_factor. Got "
                f"{self.low_freq_factor} and {self.high_freq_factor}. Take both from the checkpoint's rope_scaling."
            )

    def scale(self, frequency: Float[Tensor, " pairs"]) -> Float[Tensor, " pairs"]:
        """The frequencies after scaling."""
        turns = self.original_max_positions * frequency / (2 * math.pi)
        kept = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return frequency * (kept + (1 - kept) / self.factor)


class Rotary(NamedTuple):
    """What `Rope.rotate` multiplies with: per channel, the cosine and the sine of its pair's angle.

    The sine is negative at the first channel of a pair: (a, b) becomes (a, b) o cos + (b, a) o sin.
    """

    cos: Float[Tensor, "batch 1 seq head_dim"]
    sin: Float[Tensor, "batch 1 seq head_dim"]


@dataclass(frozen=True, kw_only=True)
class Rope(Position):
    """Rotation of queries and keys by an angle proportional to the position."""

    base: float
    """Largest wavelength over 2 pi."""
    pairing: Literal["half", "interleaved"] = "half"
    order: Literal["before_norm", "after_norm"] = "before_norm"
    """Whether the rotation stands before or after QK-norm; without QK-norm it makes no difference."""
    scaling: Llama3 | None = None

    def __post_init__(self):
        if self.base <= 0:
            raise ValueError(f"Rope.base must be positive. Got {self.base}. Usual values are 1e4 to 1e6.")
        for name, value, known in (
            ("pairing", self.pairing, ("half", "interleaved")),
            ("order", self.order, ("before_norm", "after_norm")),
        ):
            if value not in known:
                raise ValueError(
                    f"Rope.{name} must be {known[0]!r} or {known[1]!r}. Got {value!r}. Choose one of them."
                )

    def waves(
        self, positions: Int[Tensor, "batch seq"], head_dim: int, dtype: torch.dtype
    ) -> tuple[Float[Tensor, "batch seq pairs"], Float[Tensor, "batch seq pairs"]]:
        """Cosines and sines; the angles are float32, `dtype` (float32 or float64) is that of the result."""
        index = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64)
        frequency = self.base ** (-index / head_dim)
        if self.scaling is not None:
            frequency = self.scaling.scale(frequency)
        angle = (positions[..., None].float() * frequency.float()).to(dtype)
        return angle.cos(), angle.sin()

    def tables(self, positions: Int[Tensor, "batch seq"], head_dim: int, dtype: torch.dtype) -> Rotary:
        """The waves, laid out for `rotate`: made once for all layers, so that each has less to do."""
        cos, sin = self.waves(positions, head_dim, dtype)
        return Rotary(self._channels(cos, cos)[:, None], self._channels(-sin, sin)[:, None])

    def rotate(
        self, x: Float[Tensor, "batch heads seq head_dim"], rotary: Rotary
    ) -> Float[Tensor, "batch heads seq head_dim"]:
        """`x` turned by the angles of its tokens; computed in the type of the tables, returned in that of `x`."""
        wide = x.to(rotary.cos.dtype)
        if self.pairing == "half":
            first, second = wide.chunk(2, dim=-1)
        else:
            first, second = wide[..., 0::2], wide[..., 1::2]
        return (wide * rotary.cos + self._channels(second, first) * rotary.sin).to(x.dtype)

    def _channels(self, first: Tensor, second: Tensor) -> Tensor:
        """The channels of all pairs, of their first and their second ones."""
        if self.pairing == "half":
            return torch.cat([first, second], dim=-1)
        return torch.stack([first, second], dim=-1).flatten(-2)


class RelativeBiasModule(nn.Module):
    """The table of `RelativeBias`."""

    def __init__(self, heads: int, entries: int):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(heads, entries))

    def forward(self, distance: Int[Tensor, "batch seq visible"]) -> Float[Tensor, "batch heads seq visible"]:
        """The bias of every query-key pair; a distance and its negative share an entry."""
        heads, entries = self.table.shape
        index = distance.abs().clamp(max=entries - 1)
        return self.table[torch.arange(heads, device=index.device)[:, None, None], index[:, None]]


class FallingBiasModule(RelativeBiasModule):
    """The table of `FallingBias`, and the fall beyond it."""

    def __init__(self, heads: int, config: FallingBias):
        super().__init__(heads, config.max)
        self.slope = config.slope

    def forward(self, distance: Int[Tensor, "batch seq visible"]) -> Float[Tensor, "batch heads seq visible"]:
        """The bias of every query-key pair."""
        beyond = (distance.abs() - (self.table.shape[1] - 1)).clamp(min=0).to(self.table.dtype)
        return super().forward(distance) - self.slope * beyond[:, None]


class ALiBiModule(nn.Module):
    """The bias of `ALiBi`; no parameters."""

    def __init__(self, config: ALiBi, heads: int):
        super().__init__()
        self.config = config
        self.heads = heads

    def forward(self, distance: Int[Tensor, "batch seq visible"]) -> Float[Tensor, "batch heads seq visible"]:
        """The bias of every query-key pair."""
        slopes = self.config.slopes(self.heads, distance.device)
        return -slopes[:, None, None] * distance.abs()[:, None]


def check_unrotated(config: str, layers: tuple[int, ...], position: Position, stored: int) -> None:
    """Refuses a list of layers without rotation that a model of `stored` layers cannot have."""
    if layers and not isinstance(position, Rope):
        raise ValueError(
            f"{config}.unrotated_layers must be () without Rope. Got {layers} and {position}. Leave it out."
        )
    if tuple(sorted(set(layers))) != layers or not all(0 <= i < stored for i in layers):
        raise ValueError(
            f"{config}.unrotated_layers must name stored layers 0..{stored - 1} in order. Got {layers}. Correct them."
        )


def _at_least_one(name: str, entries: int) -> None:
    if entries < 1:
        raise ValueError(f"{name}.max must be at least 1. Got {entries}. Give the number of entries.")
