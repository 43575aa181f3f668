"""No injection: u = s."""

from dataclasses import dataclass

from looplab.nn.linear import Init
from looplab.recurrence.injection.base import INJECTIONS, Injection


@INJECTIONS.register("none")
@dataclass(frozen=True, kw_only=True)
class NoInjection(Injection):
    """u = s. The context acts through the initial state alone."""

    def build(self, state_dim: int, embed_dim: int, init: Init) -> None:
        """Nothing."""

    def matmul_params(self, state_dim: int, embed_dim: int) -> int:
        """Entries of the matrices that one token is multiplied with."""
        return 0

    def operator_class(self, iteration: int) -> int:
        """Equal values: the same function of (state, context)."""
        return 0
