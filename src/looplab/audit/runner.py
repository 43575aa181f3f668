"""How the audit touches a model: start a batch, run plans over it, turn hidden states into logits.

Runs without gradient and without a cache, on the model's device; what is kept lies on the CPU. Noise is made per
document, so the first positions of a document start the same whatever its length, its row or its neighbours.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from looplab._types import Bool, Float, Int
from looplab.models.folder import weight_hash as weight_hash  # where tensors are; results name it from here
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.plan import Application
from looplab.recurrence.state import standard_noise


@dataclass(frozen=True, eq=False)
class Runner:
    """A model with the audit's seed. `zero_noise` starts a model that draws noise from its mean instead."""

    model: Any
    seed: int = 0
    zero_noise: bool = False

    @property
    def spec(self) -> Any:
        """The model's LoopSpec."""
        return self.model.spec

    @property
    def weights(self) -> Tensor:
        """A parameter: its dtype and device are those of every launch."""
        return next(self.model.parameters())

    @property
    def pads(self) -> bool:
        """Whether rows of different lengths can share a launch."""
        return "right" in self.spec.padding

    def start(
        self,
        tokens: Int[Tensor, "batch seq"],
        valid: Bool[Tensor, "batch seq"] | None,
        items: Sequence[int],
        ledger: Ledger | None = None,
        extras: Mapping[str, Tensor] | None = None,
    ) -> tuple[Any, Any]:
        """Context and initial state.

        Args:
            items: One number per row that names its noise.
            extras: What the rows bring along besides tokens.
        """
        device = self.weights.device
        with torch.no_grad():
            context = self.model.encode(
                tokens.to(device), valid=None if valid is None else valid.to(device), extras=self.placed(extras)
            )
            if ledger is not None:
                ledger.count_encode(self.spec, rows=tokens.shape[0], tokens=tokens.shape[1])
            return context, self.model.init_state(context, self.noise(context.positions, items))

    def placed(self, extras: Mapping[str, Tensor] | None) -> dict[str, Tensor] | None:
        """Extras on the model's device."""
        return None if extras is None else {key: tensor.to(self.weights.device) for key, tensor in extras.items()}

    def noise(
        self, positions: Int[Tensor, "batch seq"], items: Sequence[int]
    ) -> Float[Tensor, "batch seq noise"] | None:
        """The initial noise of every row; None for a model that draws none."""
        width = self.spec.noise_width
        if width == 0:
            return None
        if self.zero_noise:
            noise = torch.zeros(*positions.shape, width)
        else:
            noise = standard_noise(self.seed, items, positions, width)
        return noise.to(self.weights.device, self.weights.dtype)

    def rollout(self, plan: Iterable[Application], context: Any, state: Any) -> Any:
        """The state after a plan, as a plain loop that shares no code with `recurrence.loop`."""
        with torch.no_grad():
            for block, iteration in plan:
                index = torch.full(
                    (context.embeds.shape[0],), iteration, dtype=torch.long, device=context.embeds.device
                )
                state = self.model.step(state, context, block, index)
        return state

    def hidden(self, state: Any, context: Any) -> Float[Tensor, "batch seq dim"]:
        """What the head reads, on the CPU."""
        with torch.no_grad():
            return self.model.coda(state, context).cpu()

    def head(self, hidden: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens vocab"]:
        """Logits on the CPU of hidden states in any dtype; differentiable in `hidden`."""
        row = hidden.to(self.weights.device, self.weights.dtype)[None]  # the contract's head takes rows of tokens
        return self.model.head(row).squeeze(0).cpu()  # whose backward copies nothing, unlike that of [0]
