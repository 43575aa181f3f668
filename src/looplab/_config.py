"""Strict configurations: frozen keyword-only dataclasses that survive a round trip through JSON.

    from_dict(type(c), to_dict(c)) == c

A choice is an object. Every written dataclass carries its class name under "kind"; where a field allows one class only,
a hand-written form may leave it out. Keys and types are checked, and an error names the path of the field.
"""

import dataclasses
import hashlib
import inspect
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from looplab._registry import did_you_mean, import_folder

C = TypeVar("C")
KIND = "kind"
LATER = {"later": True}
"""Metadata of a field that came after configurations were hashed: `declared` leaves it out while it has its default."""


def to_dict(config: Any) -> Any:
    """JSON-ready form of a configuration: dataclasses become dicts, tuples become lists.

    Raises:
        TypeError: A value, a mapping's key or a field name that would not come back the same.
        ValueError: A number that is not finite.
    """
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        fields = {f.name: to_dict(getattr(config, f.name)) for f in dataclasses.fields(config)}
        if KIND in fields:
            raise TypeError(f"config: {type(config).__name__} has a field {KIND!r}, the key of its class. Rename it.")
        return {KIND: type(config).__name__, **fields}
    if isinstance(config, (tuple, list)):
        return [to_dict(item) for item in config]
    if isinstance(config, Mapping):
        if not all(isinstance(key, str) for key in config):
            raise TypeError(f"config: keys of a mapping must be strings. Got {list(config)!r}.")
        return {key: to_dict(value) for key, value in config.items()}
    if isinstance(config, float) and not math.isfinite(config):
        raise ValueError(f"config: a number must be finite. Got {config}. Use None for 'no limit'.")
    if config is None or type(config) in (bool, int, float, str):
        return config
    raise TypeError(f"config: a value must be a dataclass, number, string, tuple or mapping. Got {config!r}.")


def from_dict(cls: type[C], data: Any, *, path: str = "") -> C:
    """The configuration that `to_dict` wrote.

    Args:
        cls: Its class, or the abstract base of the classes it may have.
        data: A mapping of field names, and "kind".
        path: Where `data` stands in a larger configuration, for errors.

    Raises:
        KeyError: An unknown key or choice, with a suggestion, or a missing key.
        TypeError: A value of another type than the field's annotation.
        ValueError: A value that the configuration itself refuses.
    """
    where = path or cls.__name__
    if not isinstance(data, Mapping):
        raise TypeError(f"{where} must be a mapping of {cls.__name__} fields. Got {data!r}.")
    concrete = _choose([cls], data, where)
    hints = typing.get_type_hints(concrete)
    fields = {f.name: f for f in dataclasses.fields(concrete)}
    for key in data:
        if key != KIND and key not in fields:
            known = ", ".join(fields)
            raise KeyError(f"Unknown config key {key!r} for {where}.{did_you_mean(str(key), fields)} Known: {known}.")
    values = {}
    for name, field in fields.items():
        if name in data:
            values[name] = _value(hints[name], data[name], f"{where}.{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise KeyError(f"Key {name!r} of {where} is missing. {concrete.__name__} has no default for it.")
    return concrete(**values)


def declared(config: Any) -> Any:
    """`to_dict` without fields that are marked `LATER` and have their default, so a new field changes no old hash."""
    if isinstance(config, (tuple, list)):
        return [declared(item) for item in config]
    if isinstance(config, Mapping):
        return {key: declared(value) for key, value in config.items()}
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        return to_dict(config)
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if not _unsaid(config, f)}
    return {KIND: type(config).__name__, **{name: declared(value) for name, value in fields.items()}}


def _unsaid(config: Any, field: dataclasses.Field[Any]) -> bool:
    if "later" not in field.metadata:
        return False
    made = field.default_factory
    default = field.default if made is dataclasses.MISSING else made()
    return bool(getattr(config, field.name) == default)


def config_hash(config: Any) -> str:
    """Hex digest (16 characters of blake2b) of the canonical JSON form; equal configurations have equal hashes."""
    to_dict(config)  # refuses what would not come back the same
    text = json.dumps(_canonical(declared(config)), sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _canonical(value: Any) -> Any:
    # 8 == 8.0, and a float field may hold either: both must hash alike.
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _concrete(cls: type) -> list[type]:
    """`cls` and its subclasses, as far as they are dataclasses that can be built; none for str, int and the like."""
    if cls.__module__ == "builtins":
        return []  # somebody else's dataclass below `str` is no choice of ours
    if cls.__module__.endswith(".base"):
        import_folder(cls.__module__.removesuffix(".base"))  # a family: each file of its folder may hold a choice
    own = [cls] if dataclasses.is_dataclass(cls) and not inspect.isabstract(cls) else []
    below: list[type] = cls.__subclasses__()
    return own + [found for sub in below for found in _concrete(sub)]


def _choose(classes: list[type], data: Mapping[str, Any], where: str) -> Any:
    """The one class among `classes` and their subclasses that `data` names."""
    choices = {choice.__name__: choice for cls in classes for choice in _concrete(cls)}
    if KIND not in data and len(choices) == 1:
        return next(iter(choices.values()))
    if KIND not in data:
        raise KeyError(f"Key {KIND!r} of {where} is missing. Known: {', '.join(sorted(choices))}.")
    kind = data[KIND]
    if kind not in choices:
        hint, known = did_you_mean(str(kind), choices), ", ".join(sorted(choices))
        raise KeyError(f"Unknown choice {kind!r} for {where}.{hint} Known: {known}.")
    return choices[kind]


def _value(hint: Any, value: Any, path: str) -> Any:
    """`value` as the annotation `hint` wants it, or an error that names `path`."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _union(args, value, path)
    if origin is Literal:
        if value not in args:
            raise TypeError(f"{path} must be one of {', '.join(map(repr, args))}. Got {value!r}.")
        return value
    if origin is tuple:
        return _tuple(args, value, path)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise TypeError(f"{path} must be a mapping. Got {value!r}.")
        return {_value(args[0], key, path): _value(args[1], item, f"{path}.{key}") for key, item in value.items()}
    if _concrete(hint):
        return from_dict(hint, value, path=path)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise TypeError(f"{path} must be {hint.__name__}. Got {value!r}.")
    return value


def _union(args: tuple[Any, ...], value: Any, path: str) -> Any:
    classes = [a for a in args if isinstance(a, type) and _concrete(a)]
    if classes and isinstance(value, Mapping):
        return from_dict(_choose(classes, value, path), value, path=path)
    for hint in args:
        if hint in classes:
            continue
        try:
            return _value(hint, value, path)
        except TypeError:
            continue
    expected = " or ".join("None" if a is type(None) else getattr(a, "__name__", str(a)) for a in args)
    raise TypeError(f"{path} must be {expected}. Got {value!r}.")


def _tuple(args: tuple[Any, ...], value: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{path} must be a list. Got {value!r}.")
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_value(args[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if len(args) != len(value):
        raise TypeError(f"{path} must have {len(args)} entries. Got {len(value)}.")
    return tuple(_value(hint, item, f"{path}[{i}]") for i, (hint, item) in enumerate(zip(args, value, strict=True)))
