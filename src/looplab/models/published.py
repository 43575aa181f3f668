"""Published checkpoints: how a family's files become one of our models and back. One family per file in `models/`.

A family maps a foreign `config.json` to our configuration, and foreign tensor names to ours. Its key map is a list of
rules, each of which moves whole tensors, cuts one into rows, or joins several; together they are a bijection, so
`export` gives back the names and bytes of the original file. Tensors that the original can leave out or that are made
anew (rotary tables) are named as ignorable; everything else is strict.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from looplab._registry import Registry
from looplab.models.base import LoopedLM
from looplab.models.folder import load_tensors

PREFIXES = ("_orig_mod.", "module.", "_forward_module.", "gpt.", "model.", "inner.")
"""Wrappers that training leaves around names; stripped again and again, only where the remainder is a known name."""


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
class KeyMap:
    """All rules of one configuration. `ignorable`: patterns of foreign names that are not read, whole-name matches."""

    rules: tuple[Rule, ...]
    ignorable: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Foreign names that must equal another foreign tensor where they are there, such as a tied head."""

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


PUBLISHED: Registry[Family] = Registry("family", package="looplab.models")
"""Families by name; `PUBLISHED.register(name)(Family(...))` in the family's file."""


def assemble(
    family: Family, facts: Mapping[str, Any], tensors: Mapping[str, Tensor], *, dtype: torch.dtype | None = None
) -> LoopedLM:
    """Our model, in eval mode, out of foreign settings and tensors.

    Args:
        facts: What the foreign configuration file says.
        tensors: Foreign tensors by their own names, wrappers of training included.
        dtype: The type floating tensors are cast to; default: as they are.

    Raises:
        ValueError: Tensors that are missing, unexpected or misshapen (each listed by name), numbers that are not
            finite, an alias that differs from what it stands for.
    """
    config, key_map, named = understand(family, facts, {name: tuple(t.shape) for name, t in tensors.items()})
    values = {stripped: tensors[name] for stripped, name in named.items()}
    for alias, original in key_map.aliases.items():
        if alias in values and not torch.equal(values[alias], values[original]):
            raise ValueError(
                f"load: {alias} must equal {original}, to which {family.name} ties it. They differ in the file. "
                "The configuration and the weights do not belong together."
            )
    found: dict[str, Tensor] = {}
    for rule in key_map.rules:
        found |= zip(rule.ours, rule.read([values[name] for name in rule.theirs]), strict=True)
    if dtype is not None:
        found = {name: t.to(dtype) if t.is_floating_point() else t for name, t in found.items()}
    model = family.build(config)
    if dtype is not None:
        model = model.to(dtype)
    load_tensors(model, found)
    return model.eval()


def understand(
    family: Family, facts: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Any, KeyMap, dict[str, str]]:
    """Configuration and key map of a file, and stripped name -> name in the file of everything that is read.

    Raises:
        ValueError: Missing or unexpected tensors, each listed by name.
    """
    config = family.config(facts, {_bare(name): shape for name, shape in shapes.items()})
    key_map = family.key_map(config)
    named = {stripped: name for name in shapes if not key_map.ignored(stripped := key_map.strip(name))}
    wanted = key_map.theirs
    missing = sorted(wanted - named.keys())
    unexpected = sorted(named[name] for name in named.keys() - wanted - key_map.aliases.keys())
    if missing or unexpected:
        told = [
            f"{word}: {', '.join(names)}" for word, names in (("missing", missing), ("unexpected", unexpected)) if names
        ]
        raise ValueError(f"load: tensors do not fit {family.name} ({'; '.join(told)}). Copy the folder again.")
    return config, key_map, named


def _bare(name: str) -> str:
    """A name without any wrapper of training, for those who look at shapes before the configuration is known."""
    while prefix := next((p for p in PREFIXES if name.startswith(p)), None):
        name = name.removeprefix(prefix)
    return name
