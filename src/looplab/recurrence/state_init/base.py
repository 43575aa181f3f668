"""The contract of a state start: s_0 = start(e, noise). Noise is handed in, standard normal, one vector per token."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import nn

from looplab._registry import Registry
from looplab.nn.linear import Init

STATE_INITS: Registry[type["StateInit"]] = Registry("state start", package="looplab.recurrence.state_init")


@dataclass(frozen=True, kw_only=True)
class StateInit(ABC):
    """The rule of the first state."""

    @abstractmethod
    def build(self, state_dim: int, embed_dim: int, *, embed_scale: float, init: Init) -> nn.Module:
        """The module (embeds, noise) -> s_0.

        Args:
            state_dim: Width of the state.
            embed_dim: Width of the context.
            embed_scale: Factor of the model's embeddings, which a random start shares.
            init: Start of a trained vector.
        """

    def noise_width(self, state_dim: int) -> int:
        """Standard normal numbers per token that the start needs; 0: the start is not random."""
        return 0
