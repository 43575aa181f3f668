"""How large the branches of a core layer are beside the stream: h <- h + gamma f(n(h)).

    UnitResidual   gamma = 1
    LoomResidual   gamma = lam / (H sqrt(M))        H loops of the trained depth over a block of M layers

Branches of unit variance that are equal from loop to loop and independent from layer to layer add H^2 M to the variance
of the stream where gamma is 1, and lam^2 under the other rule, whatever H and M; two branches per layer twice as much.

Reference: LOOM, arXiv:2610.01153; its H and M read as loops and layers of the block.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Residual(ABC):
    """The weight of a branch."""

    @abstractmethod
    def weight(self, loops: int, layers: int) -> float:
        """gamma of the layers of a block.

        Args:
            loops: Iterations of the block at the trained depth, however many a call runs.
            layers: Layers of the block.
        """


@dataclass(frozen=True, kw_only=True)
class UnitResidual(Residual):
    """Branches are added as they are."""

    def weight(self, loops: int, layers: int) -> float:
        """1."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class LoomResidual(Residual):
    """lam / (H sqrt(M))."""

    lam: float = 0.5
    """Standard deviation that one branch per layer adds to a stream of unit variance, over all loops."""

    def __post_init__(self) -> None:
        if self.lam <= 0:
            raise ValueError(f"LoomResidual.lam must be positive. Got {self.lam}. LOOM has 0.5.")

    def weight(self, loops: int, layers: int) -> float:
        """gamma of the layers of a block."""
        return self.lam / (loops * math.sqrt(layers))
