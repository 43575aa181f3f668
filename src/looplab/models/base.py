"""The contract that every architecture answers, and nothing else is ever asked.

    encode(tokens)                         -> context    constant over the loop
    init_state(context, noise)             -> state      before application 0
    step(state, context, block, iteration) -> state      one application
    coda(state, context)                   -> hidden     what the head reads
    head(hidden)                           -> logits
    halt(state)                            -> score      only with a trained gate

A model is a function of its arguments: it draws no random numbers, keeps no counter, computes no loss and never reads
`self.training`. `block` is one Python int per launch; `iteration` has one entry per row and is never turned into a
Python number. Everything that repeats is written in `recurrence/loop.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from looplab._registry import Registry
from looplab._types import Bool, Float, Int
from looplab.nn.rope import Learned, Position
from looplab.recurrence.exit.base import no_gate
from looplab.recurrence.kv.base import Cache
from looplab.recurrence.spec import ClampLast, Cycle, LoopSpec, ParamCount

MODELS: Registry[type["LoopedLM"]] = Registry("model", package="looplab.models")
PRESETS: Registry[Callable[[], Any]] = Registry("preset", package="looplab.models")


class Context(NamedTuple):
    """What `encode` returns; families add fields after these. Every tensor has the row as first axis."""

    embeds: Float[Tensor, "batch seq dim"]
    positions: Int[Tensor, "batch seq"]
    valid: Bool[Tensor, "batch seq"] | None
    """False on padding; None: no padding."""


class LoopedLM(nn.Module, ABC):
    """A looped language model. Registered classes also name `config_class`, and `reference` (the paper)."""

    spec: LoopSpec
    config_class: type
    reference: str = ""
    notes: tuple[str, ...] = ()
    """What a reader of results must know about how the model is run."""
    mask_token: int | None = None
    """Id that stands for a token to be predicted, of a masked model."""
    ragged_cache: bool = True
    """Whether rows of one launch may have pasts of different lengths, as in an engine."""
    contract_exceptions: Mapping[str, str] = {}
    """Points of the contract suite (causality, cache, padding, bfloat16) that do not hold -> why."""
    idle_parameters: Mapping[str, str] = {}
    """Start of a parameter's name -> why no loss gives it a gradient; a checkpoint may store what nothing reads."""

    @abstractmethod
    def encode(
        self,
        tokens: Int[Tensor, "batch seq"],
        cache: Cache | None = None,
        *,
        positions: Int[Tensor, "batch seq"] | None = None,
        valid: Bool[Tensor, "batch seq"] | None = None,
        extras: Mapping[str, Tensor] | None = None,
    ) -> Any:
        """Embedding and prelude.

        Args:
            positions: Default: the cache's length + 0, 1, ..; with padding, the count of valid tokens before.
            valid: False on padding.
            extras: Tensors that only some families need; `spec.extras` lists the keys.
        """

    @abstractmethod
    def init_state(self, context: Any, noise: Float[Tensor, "batch seq noise"] | None) -> Any:
        """The state before application 0. `noise` is standard normal with `spec.noise_width` channels, or None."""

    @abstractmethod
    def step(
        self,
        state: Any,
        context: Any,
        block: int,
        iteration: Int[Tensor, " batch"],
        cache: Cache | None = None,
        *,
        record: dict[str, Tensor] | None = None,
    ) -> Any:
        """One application of one block; `iteration` has one entry per row. `record` may receive named tensors."""

    @abstractmethod
    def coda(self, state: Any, context: Any, cache: Cache | None = None) -> Float[Tensor, "batch seq dim"]:
        """What the head reads."""

    @abstractmethod
    def head(self, hidden: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch vocab"]:
        """Logits in float32, columns of the true vocabulary only."""

    def native(self, tokens: Int[Tensor, "batch seq"], valid: Bool[Tensor, "batch seq"] | None = None) -> Tensor | None:
        """Logits of the original forward at default depth, where this model wraps one; otherwise None."""
        return None

    def halt(self, state: Any) -> Tensor:
        """The trained stopping score (layout: `spec.halt`)."""
        raise no_gate(self.spec)


def build(config: Any, *, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> LoopedLM:
    """A freshly initialised model of `config`, in eval mode. Equal seeds give equal weights.

    Raises:
        KeyError: No registered model has this config class.
    """
    name = model_name(config)
    with torch.random.fork_rng(devices=[]), torch.device("meta" if device == "meta" else "cpu"):
        torch.manual_seed(seed)
        return MODELS[name](config).to(device=device, dtype=dtype).eval()  # type: ignore[call-arg]


def model_name(config: Any) -> str:
    """Registry name of the model that `config` configures."""
    for name in MODELS:
        if MODELS[name].config_class is type(config):
            return name
    raise KeyError(f"No registered model has a config of type {type(config).__name__}. Known: {', '.join(MODELS)}.")


def prepare(
    spec: LoopSpec,
    tokens: Int[Tensor, "batch seq"],
    cache: Cache | None,
    positions: Int[Tensor, "batch seq"] | None,
    valid: Bool[Tensor, "batch seq"] | None,
    extras: Mapping[str, Tensor] | None,
) -> tuple[Int[Tensor, "batch seq"], Bool[Tensor, "batch seq"] | None]:
    """Checks the arguments of `encode`, fills in positions, and announces the tokens to the cache.

    Returns:
        positions, and `valid` (None where nothing is padded).
    Raises:
        ValueError: A token outside the vocabulary (checked on the CPU), a row without a valid token, padding on a side
            that the family does not support, too many positions, unknown extras, or a cache with a model that has none.
    """
    checked = values_known(tokens)
    if checked:
        _check_vocabulary(spec, tokens)
    given = set(extras or ())
    if given - set(spec.extras) or {name for name, needed in spec.extras.items() if needed} - given:
        accepted = ", ".join(sorted(spec.extras)) or "none"
        raise ValueError(f"encode: extras of {spec.name} must be: {accepted}. Got {sorted(extras or ())}.")
    if cache is not None and not spec.causal:
        raise ValueError(f"{spec.name} is not causal: no KV cache. Pass cache=None")
    if cache is not None:
        cache.fits(*tokens.shape)
    past = 0 if cache is None else cache.length
    if valid is not None:
        valid = _check_padding(spec, valid, cached=cache is not None)
    given_on_cpu = positions is not None and checked
    if positions is None:
        positions = _positions(tokens, cache, valid)
    if spec.max_positions is not None and (given_on_cpu or past + tokens.shape[1] > spec.max_positions):
        _check_length(spec, positions, spec.max_positions)
    if cache is not None:
        cache.stage(positions, valid)
    return positions, valid


def values_known(tensor: Tensor) -> bool:
    """Whether Python may look at the values without cost; a compiled graph cannot, and fake tensors have none."""
    real = not torch.compiler.is_compiling() and torch._guards.active_fake_mode() is None
    return tensor.device.type == "cpu" and real


def gather_index(spec: LoopSpec, iteration: Int[Tensor, " batch"]) -> Int[Tensor, " batch"]:
    """Index of the per-iteration parameters each row reads: `iteration`, or what `spec.beyond` makes of it."""
    if spec.max_iteration is None or not isinstance(spec.beyond, (ClampLast, Cycle)):
        return iteration
    if isinstance(spec.beyond, ClampLast):
        return iteration.clamp(max=spec.max_iteration - 1)
    return iteration % spec.max_iteration


def longest_context(max_positions: int | None, position: Position) -> int | None:
    """Longest context in tokens: what is declared, and no more than a table of learned positions holds."""
    table = position.max if isinstance(position, Learned) else None
    return min((limit for limit in (max_positions, table) if limit is not None), default=None)


def count_parameters(core: Sequence[Iterable[nn.Parameter]], **groups: Iterable[nn.Parameter]) -> ParamCount:
    """Counts every storage once, in the first group that holds it (groups in the order given, then the core blocks)."""
    seen: set[int] = set()

    def count(parameters: Iterable[nn.Parameter]) -> int:
        fresh = [p for p in parameters if id(p) not in seen and not seen.add(id(p))]  # type: ignore[func-returns-value]
        return sum(p.numel() for p in fresh)

    outside = {name: count(parameters) for name, parameters in groups.items()}
    return ParamCount(**outside, core=tuple(count(parameters) for parameters in core))


def _check_vocabulary(spec: LoopSpec, tokens: Tensor) -> None:
    size = spec.vocab[0] if spec.token_ids is None else spec.token_ids
    wrong = (tokens < 0) | (tokens >= size)
    if bool(wrong.any()):
        row, position = (int(i) for i in wrong.nonzero()[0])
        raise ValueError(
            f"encode: token id {int(tokens[row, position])} at row {row}, position {position} is outside the "
            f"vocabulary ({size})"
        )


def _check_padding(spec: LoopSpec, valid: Tensor, *, cached: bool) -> Tensor | None:
    if bool(valid.all()):
        return None
    empty = ~valid.any(dim=1)
    if not cached and bool(empty.any()):  # under a cache this may be one piece of a left-padded prompt
        raise ValueError(f"encode: row {int(empty.nonzero()[0])} has no valid token")
    before = (valid.long().cumsum(dim=1) == 0) & ~empty[:, None]
    left = bool(before.any())
    right = bool((~valid & ~before).any())  # a gap counts as right padding, a row that is past its end too
    wrong = ({"left"} if left else set()) | ({"right"} if right else set())
    wrong -= spec.padding
    if wrong:
        supported = " and ".join(sorted(spec.padding)) or "none"
        raise ValueError(
            f"encode: valid has {' and '.join(sorted(wrong))} padding but {spec.name} supports {supported}. "
            "Send equal lengths"
        )
    return valid


def _check_length(spec: LoopSpec, positions: Tensor, limit: int) -> None:
    needed = int(positions.max()) + 1
    if needed > limit:
        kind = "learned positions" if spec.params.position else "positions (max_positions)"
        raise ValueError(f"encode: {needed} tokens, but {spec.name} has {limit} {kind}. Shorten the prompt")


def _positions(tokens: Tensor, cache: Cache | None, valid: Tensor | None) -> Tensor:
    rows, seq = tokens.shape
    if valid is None and (cache is None or not cache.padded):
        past = 0 if cache is None else cache.length
        return (past + torch.arange(seq, device=tokens.device)).expand(rows, seq)
    own = torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid
    before = 0 if cache is None else cache.valid[:, : cache.length].sum(dim=1, keepdim=True)
    return (before + own.long().cumsum(dim=1) - 1).clamp(min=0)
