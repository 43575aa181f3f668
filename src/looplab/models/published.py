"""Published checkpoints: how a family's files become one of our models and back. One family per file in `models/`.

A family maps a foreign `config.json` to our configuration, and foreign tensor names to ours. Its key map is a list of
rules, each of which moves whole tensors, cuts one into rows, or joins several; together they are a bijection, so
`export` gives back the names and bytes of the original file. Tensors that the original can leave out or that are made
anew (rotary tables) are named as ignorable; everything else is strict.
"""

import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from looplab._registry import Registry
from looplab.models.base import LoopedLM
from looplab.models.folder import check_finite

PREFIXES = ("_orig_mod.", "module.", "_forward_module.", "gpt.", "model.", "inner.")
"""Wrappers that training leaves around names; stripped again and again, only where the remainder is a known name."""

LISTED = 8
"""Names that an error lists of each kind."""

COMPUTED = 1e-3
"""Largest difference between a table of a file and ours that goes without saying: float32 angles at some thousand
positions, rounded in another order."""


class MisfitError(ValueError):
    """Tensors of a file that do not fit the model, all of them by name; the message lists the first of each kind."""

    def __init__(self, missing: Sequence[str], unexpected: Sequence[str], misshapen: Sequence[str]):
        super().__init__(f"load: {misfit(missing, unexpected, misshapen)}")
        self.missing, self.unexpected, self.misshapen = tuple(missing), tuple(unexpected), tuple(misshapen)


class Rule(ABC):
    """A piece of a key map: foreign names on one side, ours on the other."""

    @property
    @abstractmethod
    def theirs(self) -> tuple[str, ...]:
        """Foreign names, without prefixes."""

    @property
    @abstractmethod
    def ours(self) -> tuple[str, ...]:
        """Names in our state dict."""

    @abstractmethod
    def read(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Foreign tensors, in the order of `theirs`, to ours."""

    @abstractmethod
    def write(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Ours, in the order of `ours`, to the foreign ones, bit by bit."""


@dataclass(frozen=True)
class Rename(Rule):
    """The same tensor under another name. `shape`: ours, where the original keeps it in another one of equal size."""

    source: str
    target: str
    shape: tuple[int, ...] | None = None
    original_shape: tuple[int, ...] | None = None

    @property
    def theirs(self) -> tuple[str, ...]:
        return (self.source,)

    @property
    def ours(self) -> tuple[str, ...]:
        return (self.target,)

    def read(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        (tensor,) = tensors
        return (tensor if self.shape is None else tensor.reshape(self.shape),)

    def write(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        (tensor,) = tensors
        return (tensor if self.original_shape is None else tensor.reshape(self.original_shape),)


@dataclass(frozen=True)
class Split(Rule):
    """One fused tensor, cut along an axis: `parts` are our names with their sizes, in the order they lie in it."""

    source: str
    parts: tuple[tuple[str, int], ...]
    dim: int = 0

    @property
    def theirs(self) -> tuple[str, ...]:
        return (self.source,)

    @property
    def ours(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.parts)

    def read(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        (tensor,) = tensors
        sizes = [size for _, size in self.parts]
        if tensor.shape[self.dim] != sum(sizes):
            raise ValueError(
                f"load: {self.source} must have {sum(sizes)} entries along axis {self.dim}. "
                f"Got shape {tuple(tensor.shape)}."
            )
        return tuple(part.contiguous() for part in tensor.split(sizes, dim=self.dim))

    def write(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (torch.cat(list(tensors), dim=self.dim),)


@dataclass(frozen=True)
class Join(Rule):
    """Several tensors that we keep as one, along an axis: `parts` are foreign names with their sizes, in order."""

    parts: tuple[tuple[str, int], ...]
    target: str
    dim: int = 0

    @property
    def theirs(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.parts)

    @property
    def ours(self) -> tuple[str, ...]:
        return (self.target,)

    def read(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (torch.cat(list(tensors), dim=self.dim),)

    def write(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        (tensor,) = tensors
        sizes = [size for _, size in self.parts]
        return tuple(part.contiguous() for part in tensor.split(sizes, dim=self.dim))


@dataclass(frozen=True)
class KeyMap:
    """All rules of one configuration. `ignorable`: patterns of foreign names that are not read, whole-name matches."""

    rules: tuple[Rule, ...]
    ignorable: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Foreign names that must equal another foreign tensor where they are there, such as a tied head."""
    computed: Mapping[str, Callable[[], Tensor]] = field(default_factory=dict)
    """Of the ignorable names, those whose tensors we compute ourselves; loading tells where the file's differ."""

    @property
    def theirs(self) -> frozenset[str]:
        """Every foreign name that is read."""
        return frozenset(name for rule in self.rules for name in rule.theirs)

    def strip(self, name: str) -> str:
        """A foreign name without the wrappers of training, where what remains is known."""
        known = self.theirs | set(self.aliases)
        stripped = name
        while stripped not in known and not self.ignored(stripped):
            prefix = next((p for p in PREFIXES if stripped.startswith(p)), None)
            if prefix is None:
                return name
            stripped = stripped.removeprefix(prefix)
        return stripped

    def ignored(self, name: str) -> bool:
        """Whether a foreign name is one that is not read."""
        return any(re.fullmatch(pattern, name) for pattern in self.ignorable)

    def export(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Our state dict under the foreign names."""
        found: dict[str, Tensor] = {}
        for rule in self.rules:
            found |= zip(rule.theirs, rule.write([state[name] for name in rule.ours]), strict=True)
        return found


@dataclass(frozen=True, kw_only=True)
class Family:
    """One published family."""

    name: str
    model_types: tuple[str, ...]
    """Values of `model_type` in its config.json; empty for files that have none."""
    reference: str
    """Paper and repository."""
    config: Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]]], Any]
    """(config.json, shapes of foreign tensors without wrappers) -> our configuration; ValueError if it cannot be."""
    key_map: Callable[[Any], KeyMap]
    """Our configuration -> key map."""
    build: Callable[[Any], LoopedLM]
    """Our configuration -> model; may run on the meta device."""
    recognises: Callable[[frozenset[str]], bool] = lambda names: False
    """Whether a set of stripped foreign names is of this family, for folders without a model_type."""
    config_files: tuple[str, ...] = ("config.json",)
    """Where the settings may be, in this order; .yaml is plain YAML."""
    notes: tuple[str, ...] = ()
    """What the original does differently on purpose, for reports."""
    open_questions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What its files leave open: question -> possible answers, that of the published code first. A family with open
    questions opens no file."""
    answered: Callable[[Mapping[str, str]], "Family"] | None = None
    """The family with one answer to every open question."""
    inverse: Callable[[Any], dict[str, Any]] | None = None
    """Our configuration -> config.json, as far as the format has words for it; `models/inverse.py` finds what is lost.
    None: models that were made here are not written in this format."""


PUBLISHED: Registry[Family] = Registry("family", package="looplab.models")
"""Families by name; `PUBLISHED.register(name)(Family(...))` in the family's file."""


def assemble(
    family: Family,
    facts: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> LoopedLM:
    """Our model, in eval mode, out of foreign settings and tensors.

    The model is built without storage and filled rule by rule, so besides its own weights no more is held than the
    tensors of one rule, if `tensors` reads them when asked.

    Args:
        facts: What the foreign configuration file says.
        tensors: Foreign tensors by their own names, wrappers of training included.
        shapes: Shapes of `tensors`, where asking for them would read them.
        dtype: The type floating tensors are cast to; default: as they are.

    Raises:
        ValueError: Tensors that are missing, unexpected or misshapen (each listed by name), numbers that are not
            finite, an alias that differs from what it stands for.
    """
    if shapes is None:
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    config, key_map, named = understand(family, facts, shapes)
    for alias, original in key_map.aliases.items():
        if alias in named and named[alias] != named[original]:
            check_tie(alias, original, tensors[named[alias]], tensors[named[original]])
    with torch.device("meta"):
        model = family.build(config)
    # One tensor may stand under several names; `id` tells, as storage that is not there has no address.
    places: dict[int, list[str]] = {}
    own = model.state_dict(keep_vars=True)
    for name, tensor in own.items():
        places.setdefault(id(tensor), []).append(name)
    for rule in key_map.rules:
        parts = rule.read([tensors[named[name]] for name in rule.theirs])
        for name, part in zip(rule.ours, parts, strict=True):
            check_finite(name, part)
            cast = dtype if dtype is not None and part.is_floating_point() else part.dtype
            value = part.to(device=device, dtype=cast, copy=True, memory_format=torch.contiguous_format)
            for place in places.pop(id(own[name])):
                _put(model, place, value)
    left = [name for names in places.values() for name in names]
    left += [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in left]
    if left:
        raise RuntimeError(f"{family.name}: the key map gives {', '.join(left)} no value")
    check_computed(key_map, tensors)
    model.reference, model.notes = family.reference, family.notes
    return model.to(device=device).eval()  # buffers that the settings alone fill are on the CPU until here


def configured(
    family: Family, facts: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Any, KeyMap, LoopedLM]:
    """Configuration, key map, and the model without storage, whatever tensors there are.

    Raises:
        ValueError: A setting that is missing, or that no model of the family can have.
    """
    settings = " or ".join(family.config_files)
    try:
        config = family.config(facts, {bare(name): shape for name, shape in shapes.items()})
        key_map = family.key_map(config)
        with torch.device("meta"):
            return config, key_map, family.build(config)
    except ValueError as error:
        told = str(error)
        raise ValueError(told if told.startswith("load: ") else f"load: {told}") from error
    except KeyError as error:
        raise ValueError(f"load: {settings} must have {error.args[0]}. Got none. Copy it again.") from error
    except (TypeError, AttributeError, ArithmeticError, IndexError, RuntimeError) as error:
        raise ValueError(
            f"load: {settings} must hold values that {family.name} can have. Got one that it cannot ({error}). "
            "Copy it again."
        ) from error


def understand(
    family: Family, facts: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Any, KeyMap, dict[str, str]]:
    """Configuration and key map of a file, and stripped name -> name in the file of everything that is read.

    Raises:
        ValueError: The family has open questions.
        MisfitError: Missing, unexpected or misshapen tensors, each listed by its name in the file.
    """
    if family.open_questions:
        asked = ", ".join(f"{name} ({' or '.join(answers)})" for name, answers in family.open_questions.items())
        raise ValueError(f"load: {family.name} must be read with answers to {asked}. Got none. Use Family.answered.")
    config, key_map, model = configured(family, facts, shapes)
    named: dict[str, str] = {}
    twice = []
    for name in shapes:
        stripped = key_map.strip(name)
        if stripped in named:
            twice.append(name)
        elif not key_map.ignored(stripped):
            named[stripped] = name
    for alias, original in key_map.aliases.items():
        if alias in named:
            named.setdefault(original, named[alias])  # a tie may be stored under either name
    with torch.device("meta"):
        expected = key_map.export(model.state_dict())
    missing = sorted(expected.keys() - named.keys())
    unexpected = sorted([*twice, *(named[n] for n in named.keys() - expected.keys() - key_map.aliases.keys())])
    misshapen = [
        f"{named[name]}: file {list(shapes[named[name]])}, model {list(tensor.shape)}"
        for name, tensor in sorted(expected.items())
        if name in named and shapes[named[name]] != tuple(tensor.shape)
    ]
    if missing or unexpected or misshapen:
        raise MisfitError(missing, unexpected, misshapen)
    return config, key_map, named


def misfit(missing: Sequence[str], unexpected: Sequence[str], misshapen: Sequence[str]) -> str:
    """What is wrong with the tensors of a file: "3 tensors missing (a, b, c), 1 unexpected (d)"."""
    lists = [(names, word) for names, word in ((missing, "missing"), (unexpected, "unexpected")) if names]
    lists += [(misshapen, "of wrong shape")] if misshapen else []
    told: list[str] = []
    for names, word in lists:
        noun = "" if told else " tensor" if len(names) == 1 else " tensors"
        more = ", ..." if len(names) > LISTED else ""
        told.append(f"{len(names)}{noun} {word} ({', '.join(names[:LISTED])}{more})")
    return ", ".join(told)


def bare(name: str) -> str:
    """A name without any wrapper of training, for those who look at names before the configuration is known."""
    while prefix := next((p for p in PREFIXES if name.startswith(p)), None):
        name = name.removeprefix(prefix)
    return name


def _put(model: nn.Module, name: str, value: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    old = module._parameters.get(leaf)
    if old is not None:
        module._parameters[leaf] = nn.Parameter(value, requires_grad=old.requires_grad)
    else:
        module._buffers[leaf] = value


def check_tie(alias: str, original: str, one: Tensor, other: Tensor) -> None:
    """Refuses a tensor that differs from the one it stands for."""
    if one.shape == other.shape and torch.equal(one, other):
        return
    apart = f"max {float((one - other).abs().max()):.2g}" if one.shape == other.shape else "shapes too"
    raise ValueError(
        f"load: config says tie_embeddings but {alias} and {original} differ ({apart}). Pass tie=False or fix the file"
    )


def check_computed(key_map: KeyMap, tensors: Mapping[str, Tensor]) -> None:
    """Says by how much tensors of the file differ from what is computed in their place."""
    for name in tensors:
        made = key_map.computed.get(key_map.strip(name))
        if made is None:
            continue
        file, ours = tensors[name], made()
        if file.shape != ours.shape:
            raise ValueError(f"load: {misfit([], [], [f'{name}: file {list(file.shape)}, model {list(ours.shape)}'])}")
        apart = float((file.float() - ours).abs().max())
        if not apart <= COMPUTED:
            stored = str(file.dtype).removeprefix("torch.")
            warnings.warn(
                f"load: {name} of the file ({stored}) differs from what is computed here by up to {apart:.1e}; "
                "the original runs with the file's.",
                stacklevel=3,
            )
