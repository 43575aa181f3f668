"""The contract over a model of the transformers library, and the test that an adapter passes before it is trusted.

    native(tokens, valid) -> logits      the model's own forward, untouched
    encode, step, coda, head             the same numbers, layer by layer

In float32 on the CPU the rollout of the model's own plan must equal `native` bit for bit, with and without padding; in
other settings the largest difference is bounded (`_tolerances.SELF_TEST`) and reported.
"""

import inspect
import warnings
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from looplab._registry import Registry
from looplab._tolerances import SELF_TEST
from looplab._types import Bool, Float, Int
from looplab.interop.adapters.replay import PerRow, Recording, outputs_of, record
from looplab.interop.adapters.slots import SlotCache
from looplab.models.base import LoopedLM
from looplab.recurrence.kv.base import Cache
from looplab.recurrence.loop import forward

ADAPTERS: Registry[type["Adapter"]] = Registry("model type", package="looplab.interop.adapters")
"""`model_type` of a `config.json` -> adapter."""

PROBE_TOKENS = 9
"""Length of the self-test's rows: enough for padding on either side, cheap for any model."""


class Adapter(LoopedLM):
    """A model of the library behind our contract. Depth is never read from the library's configuration again.

    Attributes:
        inner: The library's model.
        layers: All layers that are replayed; a layer's place here is its number in recordings.
    """

    since: ClassVar[str] = "5.20"
    """First version of the library that has the family, as far as known."""
    auto_class: ClassVar[str] = "AutoModelForCausalLM"
    """Class of the library that opens the family."""
    ignored: ClassVar[str] = ""
    """Pattern of stored tensors that the readout does not use."""
    reference = "through transformers"
    ragged_cache = False  # the library makes its masks from one length
    inner: Any
    layers: list[Any]

    @classmethod
    @abstractmethod
    def wrap(cls, inner: Any) -> "Adapter":
        """The adapter of an opened model of the library, in eval mode."""

    def init_state(self, context: Any, noise: Float[Tensor, "batch seq noise"] | None) -> Any:
        if noise is not None:
            raise ValueError(f"init_state: this model draws no noise; got width {noise.shape[-1]}. Pass noise=None")
        return self.start(context)

    def start(self, context: Any) -> Any:
        """The state before application 0."""
        return context.embeds

    def native(
        self, tokens: Int[Tensor, "batch seq"], valid: Bool[Tensor, "batch seq"] | None = None
    ) -> Float[Tensor, "batch seq vocab"]:
        """Logits of the library's own forward at its own depth."""
        output = self.inner(input_ids=tokens, **self.arguments(positions_of(tokens, valid), valid, None))
        return output.logits.float()[..., : self.spec.vocab[0]]

    def arguments(
        self, positions: Int[Tensor, "batch seq"], valid: Bool[Tensor, "batch seq"] | None, cache: Cache | None
    ) -> dict[str, Any]:
        """How the library is told of positions, padding and past tokens."""
        if cache is not None:
            valid = cache.valid[:, : cache.length + positions.shape[1]] if cache.padded else None
        mask = None if valid is None else valid.long()
        given = {"attention_mask": mask, "position_ids": positions}
        if not self.spec.causal:
            return given
        return given | {"use_cache": False} | ({} if cache is None else {self.cache_name: SlotCache(cache)})

    @property
    def cache_name(self) -> str:
        """The library's word for its cache argument."""
        names = inspect.signature(self.body.forward).parameters
        return "cache" if "cache" in names else "past_key_values"

    @property
    @abstractmethod
    def body(self) -> nn.Module:
        """The part of the library's model that embeds and runs the layers."""

    def record(
        self,
        inputs: dict[str, Tensor],
        positions: Int[Tensor, "batch seq"],
        valid: Bool[Tensor, "batch seq"] | None,
        cache: Cache | None,
        *,
        drop: frozenset[str] = frozenset(),
        own_positional: bool = False,
        per_row: PerRow | None = None,
        idle: Iterable[nn.Module] = (),
    ) -> Recording:
        """The arguments of all layers; `inputs` is what the body is called with besides `arguments`."""
        arguments = self.arguments(positions, valid, cache)
        return record(
            self.body,
            lambda: self.body(**inputs, **arguments),
            self.layers,
            drop=drop,
            own_positional=own_positional,
            per_row=per_row,
            idle=tuple(idle),
        )

    def verify(self) -> float:
        """Compares the rollout of the model's own plan with `native`, without padding and with it.

        Returns:
            The largest difference relative to max(1, largest |logit|): 0.0 in float32 and float64 on the CPU.
        Raises:
            ValueError: They differ by more than is allowed; the message names the first layer that differs.
        """
        tokens, valid = self._probe()
        worst = 0.0
        for padding in (None, valid):
            with torch.no_grad(), outputs_of(self.layers) as native_layers:
                native = self.native(tokens, padding)
            with torch.no_grad(), outputs_of(self.layers) as own_layers:
                own = forward(self, tokens, valid=padding).logits
            assert own is not None
            keep = torch.ones_like(tokens, dtype=torch.bool) if padding is None else padding
            difference = _difference(own[keep], native[keep])
            worst = max(worst, difference) if difference == difference else difference
            if not worst <= self.allowed:
                raise ValueError(
                    f"adapter {self.spec.name}: rollout differs from the native forward at "
                    f"{_first_difference(native_layers, own_layers, keep)} (max {difference:.0e}). Not audited. "
                    "Likely cause: attn_implementation or hooks"
                )
        if worst:
            warnings.warn(f"adapter {self.spec.name}: rollout and native forward differ by {worst:.1e}", stacklevel=2)
        return worst

    @property
    def allowed(self) -> float:
        """The largest difference that `verify` lets pass."""
        weight = next(self.parameters())
        exact = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.float64)
        return 0.0 if exact else SELF_TEST[str(weight.dtype).removeprefix("torch.")]

    def _probe(self) -> tuple[Tensor, Tensor]:
        length = min(PROBE_TOKENS, self.spec.max_positions or PROBE_TOKENS)
        device = next(self.parameters()).device
        tokens = (torch.arange(3 * length, device=device).view(3, length) * 7 + 1) % self.spec.vocab[0]
        valid = torch.ones_like(tokens, dtype=torch.bool)
        valid[0, : length // 3] = "left" not in self.spec.padding
        valid[1, length - length // 4 :] = "right" not in self.spec.padding
        return tokens, valid


def positions_of(tokens: Int[Tensor, "batch seq"], valid: Bool[Tensor, "batch seq"] | None) -> Int[Tensor, "batch seq"]:
    """0, 1, .. along each row; padding does not count."""
    own = torch.ones_like(tokens) if valid is None else valid.long()
    return (own.cumsum(dim=1) - 1).clamp(min=0)


def softcapped(logits: Float[Tensor, "*batch vocab"], cap: float | None) -> Float[Tensor, "*batch vocab"]:
    """cap * tanh(logits / cap), in the order of operations of the library; None: as they are."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


def _difference(own: Tensor, native: Tensor) -> float:
    if torch.equal(own, native):
        return 0.0
    return float((own - native).abs().max() / native.abs().max().clamp(min=1.0))


def _first_difference(native: list[tuple[int, Tensor]], own: list[tuple[int, Tensor]], keep: Tensor) -> str:
    for (index, expected), (other, got) in zip(native, own, strict=False):
        if index != other or not torch.equal(expected[keep], got[keep]):
            return f"layer {index}"
    return "the readout"
