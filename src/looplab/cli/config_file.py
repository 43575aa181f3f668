"""The `--config` option: a file of options, over which the command line wins.

A YAML or JSON mapping from the names of options, with dashes or underscores, to their values; a list where an option
may be given several times. Names that a command does not have are refused.
"""

import dataclasses
import json
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro
import yaml

from looplab._registry import did_you_mean
from looplab.cli import exit_codes
from looplab.cli.exit_codes import UserError

Kind = TypeVar("Kind", bound="FromFile")
WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a text", Path: "a path"}
FLAG = "--config"


@dataclass(frozen=True, kw_only=True)
class FromFile:
    """Options that a file may hold."""

    config: Path | None = None
    """YAML or JSON file of options by name, MODEL among them; what stands on the command line wins."""


def parsed(kind: type[Kind], command: str, argv: Sequence[str], description: str) -> Kind:
    """The options of a command, from its words and from the file that they name.

    Raises:
        UserError: The file cannot be read, or says what the command does not take.
    """
    words = list(argv) or ["--help"]
    path = config_path(words)
    default = None if path is None else _default(kind, read_config(path), words, path)
    options = tyro.cli(kind, args=words, prog=f"looplab {command}", description=description.strip(), default=default)
    assert options is not None
    if path is not None and not getattr(options, "quiet", False):
        print(f"config: {json.dumps(resolved(options))}", file=sys.stderr)
    return options


def config_path(words: Sequence[str]) -> Path | None:
    """The file that a command line names; the last one counts."""
    found = None
    for place, word in enumerate(words):
        if word == FLAG and place + 1 < len(words):
            found = Path(words[place + 1])
        elif word.startswith(f"{FLAG}="):
            found = Path(word.partition("=")[2])
    return found


def read_config(path: Path) -> dict[str, Any]:
    """The mapping in a file, its names with underscores.

    Raises:
        UserError: No such file, or no mapping.
    """
    wanted = f"{FLAG} must be a YAML or JSON file that maps options to values"
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{wanted}. Got {path}: {' '.join(str(error).split())}. Repair it.", exit_codes.USAGE) from None
    if not isinstance(found, Mapping):
        raise UserError(f"{wanted}. Got {path}, which holds none. Write lines such as port: 8001.", exit_codes.USAGE)
    return {str(name).replace("-", "_"): value for name, value in found.items()}


def resolved(options: FromFile) -> dict[str, Any]:
    """All options as a file would hold them."""
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    return {name: _written(value) for name, value in values.items() if name != "config"}


def output_folder(path: Path) -> None:
    """Makes the folder of `--out`, before anything long begins.

    Raises:
        UserError: It is a file, or cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        said = f"--out must be a folder, or a name that one can have. Got {path}: {error.strerror}. Name another."
        raise UserError(said, exit_codes.USAGE) from None


def on_command_line(name: str, words: Sequence[str]) -> bool:
    """Whether an option is among the words."""
    flags = {f"{dashes}{name.replace('_', '-')}" for dashes in ("--", "--no-")}
    flags |= {f"--{name}"}
    return any(word.partition("=")[0] in flags for word in words)


def _default(kind: type[Kind], values: Mapping[str, Any], words: Sequence[str], path: Path) -> Kind:
    """Options as the file says them, except those that are among the words."""
    fields = {field.name: field for field in dataclasses.fields(kind) if field.name != "config"}
    hints = get_type_hints(kind)
    for name in values:
        if name not in fields:
            hint = did_you_mean(name.replace("_", "-"), [field.replace("_", "-") for field in fields])
            raise UserError(
                f"{FLAG} {path} must name options of this command. Got {name.replace('_', '-')!r}.{hint} See --help.",
                exit_codes.USAGE,
            )
    read = {name: _read(hints[name], value, f"{name.replace('_', '-')} in {path}") for name, value in values.items()}
    taken = {name: value for name, value in read.items() if not on_command_line(name, words)}
    for name, field in fields.items():
        if name not in taken and field.default is dataclasses.MISSING:
            taken[name] = tyro.MISSING
    return kind(**taken)


def _read(hint: Any, value: Any, where: str) -> Any:
    """A value of a file as the option's type."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        inside = next(arg for arg in args if arg is not type(None))
        return None if value is None else _read(inside, value, where)
    if origin is tuple:
        return tuple(_read(args[0], one, where) for one in (value if isinstance(value, list) else [value]))
    if origin is Literal:
        value = "off" if value is False and "off" in args else value  # YAML takes a bare off for false
        if value not in args:
            raise _wrong(where, f"one of {', '.join(map(str, args))}", value)
        return value
    if hint is float and isinstance(value, int | str) and not isinstance(value, bool):
        try:
            return float(value)  # YAML takes 1e-3 for a text
        except ValueError:
            raise _wrong(where, WORDS[float], value) from None
    if hint is Path and isinstance(value, str):
        return Path(value)
    if type(value) is not hint:
        raise _wrong(where, WORDS[hint], value)
    return value


def _wrong(where: str, must: str, value: Any) -> UserError:
    return UserError(f"{FLAG}: {where} must be {must}. Got {value!r}. Correct it.", exit_codes.USAGE)


def _written(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_written(one) for one in value]
    return str(value) if isinstance(value, Path) else value
