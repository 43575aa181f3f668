"""Layer replay: run the layers of somebody else's model one at a time, each with the arguments its own model gives it.

    recording = record(native forward)          every layer answers with its input, so the forward costs no layer
    h_k+1     = layer_k(h_k, *recording[k])     any number of times, in any order

Masks, rotary tables and positions are made by the native code, once per `encode`, and differ from layer to layer where
the model says so. Nothing of a family's forward is written again here, which is what makes replay exact.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from looplab._types import Bool, Float, Int
from looplab.interop.adapters.slots import SlotCache
from looplab.recurrence.kv.base import KVView

PerRow = Mapping[str, Callable[[Tensor], Tensor]]


@dataclass(frozen=True)
class _At:
    """Stands for a tensor inside recorded arguments: its place in `ReplayContext.tensors`."""

    index: int


class _CacheHere:
    """Stands for the cache inside recorded arguments."""


@dataclass(frozen=True, eq=False)
class Calls:
    """What every layer is called with besides the stream; tensors and the cache are taken out."""

    positional: tuple[tuple[Any, ...], ...]
    named: tuple[dict[str, Any], ...]


class ReplayContext(NamedTuple):
    """Context of an adapter. Families with fields of their own put them after these."""

    embeds: Float[Tensor, "batch seq dim"]
    positions: Int[Tensor, "batch seq"]
    valid: Bool[Tensor, "batch seq"] | None
    tensors: tuple[Tensor, ...]
    """Every tensor that layers are called with, once; the row is the first axis."""
    calls: Calls


class Recording(NamedTuple):
    """What `record` found: the stream that entered the first layer, and the arguments of all."""

    stream: Float[Tensor, "batch seq dim"]
    tensors: tuple[Tensor, ...]
    calls: Calls


class _AllRecorded(Exception):
    """Every layer was called; the rest of the forward is not needed."""


def record(
    root: nn.Module,
    forward: Callable[[], Any],
    layers: Sequence[nn.Module],
    *,
    drop: frozenset[str] = frozenset(),
    own_positional: bool = False,
    per_row: PerRow | None = None,
    idle: Sequence[nn.Module] = (),
) -> Recording:
    """Runs `forward` with stand-ins for `layers`, up to the first call of the last one.

    Args:
        root: What holds the layers.
        forward: Calls the native model.
        layers: In the order in which their numbers are used later. Only the first call of each is kept.
        drop: Names of arguments that the replaying adapter gives itself, or leaves to their defaults.
        own_positional: The adapter gives all positional arguments itself.
        per_row: By name, how an argument without a row axis becomes one with it.
        idle: Modules that only work for the layers; they answer with their last tensor argument.
    """
    found: dict[int, tuple[Tensor, tuple[Any, ...], dict[str, Any]]] = {}

    def stand_in(index: int) -> Callable[..., Tensor]:
        def answer(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            found.setdefault(index, (hidden_states, args, kwargs))
            if len(found) == len(layers):
                raise _AllRecorded
            return hidden_states

        return answer

    stand_ins = {layer: stand_in(index) for index, layer in enumerate(layers)}
    stand_ins |= dict.fromkeys(idle, lambda *args: [a for a in args if isinstance(a, Tensor)][-1])
    with _replaced(root, stand_ins), suppress(_AllRecorded):
        forward()
    missing = sorted(set(range(len(layers))) - set(found))
    if missing:
        raise RuntimeError(f"adapter: the native forward never called layers {missing}. Use the library's own classes.")
    return _packed(found, drop, own_positional, per_row or {})


def replay(
    layer: nn.Module,
    context: Any,
    index: int,
    hidden: Float[Tensor, "batch seq dim"],
    *own: Any,
    view: KVView | None = None,
) -> Float[Tensor, "batch seq dim"]:
    """Calls layer number `index` of the recording on `hidden`.

    Args:
        own: Positional arguments, for recordings made with `own_positional`.
        view: The slot of this application; None without a cache.
    """
    slot = None if view is None else SlotCache(view.cache, view)

    def filled(value: Any) -> Any:
        if isinstance(value, _At):
            return context.tensors[value.index]
        if isinstance(value, _CacheHere):
            return slot
        if isinstance(value, (tuple, list)):
            return type(value)(filled(part) for part in value)
        return {name: filled(part) for name, part in value.items()} if isinstance(value, dict) else value

    output = layer(hidden, *own, *filled(context.calls.positional[index]), **filled(context.calls.named[index]))
    return output[0] if isinstance(output, tuple) else output


@contextmanager
def outputs_of(layers: Sequence[nn.Module]) -> Any:
    """Inside it, the outputs of every call of these layers, as (layer number, tensor), in the order of the calls."""
    seen: list[tuple[int, Tensor]] = []

    def keep(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            seen.append((index, output[0] if isinstance(output, tuple) else output))

        return hook

    handles = [layer.register_forward_hook(keep(index)) for index, layer in enumerate(layers)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


class _StandIn(nn.Module):
    """Takes the place of a module, attributes included; the module's own hooks do not see the call."""

    def __init__(self, replaced: nn.Module, answer: Callable[..., Tensor]):
        super().__init__()
        self.__dict__.update(replaced=replaced, answer=answer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["replaced"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.__dict__["answer"](*args, **kwargs)


@contextmanager
def _replaced(root: nn.Module, answers: Mapping[nn.Module, Callable[..., Tensor]]) -> Any:
    places = [
        (parent._modules, name, child)
        for parent in root.modules()
        for name, child in parent._modules.items()
        if child in answers
    ]
    try:
        for siblings, name, child in places:
            siblings[name] = _StandIn(child, answers[child])  # type: ignore[index,arg-type]
        yield
    finally:
        for siblings, name, child in places:
            siblings[name] = child


def _packed(
    found: dict[int, tuple[Tensor, tuple[Any, ...], dict[str, Any]]],
    drop: frozenset[str],
    own_positional: bool,
    per_row: PerRow,
) -> Recording:
    tensors: list[Tensor] = []
    places: dict[int, int] = {}
    kept: list[Any] = []  # keeps ids from being reused while they are keys

    def packed(value: Any, name: str = "") -> Any:
        if isinstance(value, Tensor):
            if id(value) not in places:
                places[id(value)] = len(tensors)
                kept.append(value)
                tensors.append(per_row[name](value) if name in per_row else value)
                return _At(len(tensors) - 1)
            return _At(places[id(value)])
        if isinstance(value, SlotCache):
            return _CacheHere()
        if isinstance(value, (tuple, list)):
            return type(value)(packed(part, name) for part in value)
        return {key: packed(part, key) for key, part in value.items()} if isinstance(value, dict) else value

    order = range(len(found))
    positional = tuple(() if own_positional else packed(found[i][1]) for i in order)
    named = tuple(packed({k: v for k, v in found[i][2].items() if k not in drop}) for i in order)
    return Recording(found[0][0], tuple(tensors), Calls(positional, named))
