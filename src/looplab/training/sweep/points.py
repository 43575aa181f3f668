"""What a sweep varies: axes over fields of a RunConfig, and the configurations that they span.

    grid      seed=0..2  x  optimizer.lr=1e-3,3e-3                       every combination
    zipped    optimizer.lr=1e-3,3e-3  with  data.packing.rows=8,16       first with first, second with second
    random    optimizer.lr=log(1e-4..1e-2)                               draw i depends on (draw seed, axis, i) alone

A field is named by its path, as in the errors of a configuration. A value is a number, a word, a list, or a choice such
as TruncatedBPTT(window=2). Random draws are a pure function of their number, so a longer sweep begins with the shorter.
"""

import ast
import json
import math
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from looplab._config import KIND, config_hash, to_dict
from looplab._registry import did_you_mean
from looplab.training.config import RunConfig

Point = Mapping[str, Any]
"""Path of a field -> its value; applied in order."""
NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
RANGE = re.compile(rf"({NUMBER})\.\.({NUMBER})")
LOG = re.compile(rf"log\(({NUMBER})\.\.({NUMBER})\)")
LARGEST = 10_000
"""Most runs of one sweep."""
WORDS = {"none": None, "null": None, "true": True, "false": False}


class SweepError(ValueError):
    """An axis, a file or a point that makes no sweep."""


@dataclass(frozen=True)
class Axis:
    """One field and the values it takes: a list, or a range to draw from."""

    path: str
    values: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False

    @property
    def continuous(self) -> bool:
        """A range whose values can only be drawn."""
        return not self.values

    def draw(self, chance: random.Random) -> Any:
        """One value; numbers of a range have four digits, so that they can be read and typed."""
        if not self.continuous:
            return self.values[chance.randrange(len(self.values))]
        if self.log:
            return _four_digits(math.exp(chance.uniform(math.log(self.low), math.log(self.high))))
        return _four_digits(chance.uniform(self.low, self.high))

    @classmethod
    def parse(cls, text: str) -> "Axis":
        """`optimizer.lr=1e-3,3e-3`, `seed=0..2` (both ends), `clip_norm=0.5..2.0`, `optimizer.lr=log(1e-4..1e-2)`.

        Raises:
            SweepError: Another form, no value, or a range without a beginning before its end.
        """
        path, equals, written = text.partition("=")
        path = path.strip().replace("-", "_")
        if not equals or not path:
            raise SweepError(
                f"an axis must be FIELD=VALUES. Got {text!r}. Write, for instance, seed=0..2 or optimizer.lr=1e-3,3e-3."
            )
        if found := LOG.fullmatch(written.strip()):
            return cls._range(path, text, float(found[1]), float(found[2]), log=True)
        if (found := RANGE.fullmatch(written.strip())) and not all(_whole(end) for end in found.groups()):
            return cls._range(path, text, float(found[1]), float(found[2]), log=False)
        values = [value for piece in _split(written) for value in _values(path, text, piece)]
        if not values:
            raise SweepError(f"{path}: an axis must have at least one value. Got {text!r}. Give values: {path}=A,B.")
        return cls(path, tuple(values))

    @classmethod
    def _range(cls, path: str, text: str, low: float, high: float, *, log: bool) -> "Axis":
        if not low < high or (log and low <= 0):
            least = "above 0 and " if log else ""
            raise SweepError(f"{path}: a range must have a beginning {least}before its end. Got {text!r}. Mend it.")
        return cls(path, (), low, high, log)


def grid_points(over: Sequence[Axis], zipped: Sequence[Axis] = (), listed: Sequence[Point] = ({},)) -> list[Point]:
    """Every combination of the axes `over`, of the `zipped` ones taken side by side, and of the `listed` points.

    Raises:
        SweepError: An axis twice, zipped axes of different lengths, a range that can only be drawn from, too many.
    """
    _check_axes(over, zipped)
    for axis in (*over, *zipped):
        if axis.continuous:
            raise SweepError(
                f"{axis.path}: values between {axis.low:g} and {axis.high:g} must be drawn. Got a grid. "
                "Give the number of runs with --random, or a list of values."
            )
    beside = [dict(zip([axis.path for axis in zipped], row, strict=True)) for row in _rows(zipped)]
    number = math.prod([len(listed), len(beside), *(len(axis.values) for axis in over)])
    if not 1 <= number <= LARGEST:
        what = "fewer" if number else "some"
        raise SweepError(f"a sweep must have from 1 to {LARGEST:,} runs. Got {number:,}. Give {what} values.")
    combined = product(*([(axis.path, value) for value in axis.values] for axis in over))
    return [{**point, **pairs, **dict(values)} for values in combined for point in listed for pairs in beside]


def random_points(over: Sequence[Axis], zipped: Sequence[Axis], number: int, seed: int) -> list[Point]:
    """`number` different draws: every axis by itself, the zipped ones together.

    Raises:
        SweepError: As for `grid_points`; fewer different draws than asked for; no axis.
    """
    if not 1 <= number <= LARGEST:
        raise SweepError(f"--random must be from 1 to {LARGEST:,}. Got {number}. Give the number of runs.")
    _check_axes(over, zipped)
    if not over and not zipped:
        raise SweepError("--random must have axes to draw from. Got none. Add --over FIELD=VALUES.")
    rows = _rows(zipped)
    found: dict[str, Point] = {}
    for index in range(100 * number):
        chances = {axis.path: random.Random(f"{seed}/{axis.path}/{index}") for axis in over}
        beside = rows[random.Random(f"{seed}/zip/{index}").randrange(len(rows))]
        point = dict(zip([axis.path for axis in zipped], beside, strict=True))
        point |= {axis.path: axis.draw(chances[axis.path]) for axis in over}
        found.setdefault(json.dumps(point, sort_keys=True), point)
        if len(found) == number:
            return list(found.values())
    raise SweepError(
        f"--random must be at most the number of different draws. Got {number}, and 100 times as many draws gave only "
        f"{len(found)}. Lower it or give more values."
    )


def read_points(path: Path) -> list[Point]:
    """The points of a JSON or YAML file: a list of mappings, each from the path of a field to its value.

    Raises:
        SweepError: A file that cannot be read, or holds something else.
    """
    wanted = "must be a JSON or YAML list of mappings, such as [{seed: 0}, {seed: 1}]"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SweepError(f"--from {path} {wanted}. Got no such file. Check the path.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SweepError(f"--from {path} {wanted}. Got {error}. Give a text file that can be read.") from None
    try:
        found = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        said = " ".join(str(error).split())
        raise SweepError(f"--from {path} {wanted}. Got what cannot be parsed ({said}). Repair it.") from None
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise SweepError(f"--from {path} {wanted}. Got {type(found).__name__}. Put every run into a list.")
    if not found:
        raise SweepError(f"--from {path} {wanted}. Got an empty list. Add runs.")
    return [
        {str(name).replace("-", "_"): _read(value) for name, value in entry.items() if name != KIND} for entry in found
    ]


def configurations(base: RunConfig, points: Iterable[Point]) -> list[RunConfig]:
    """The configuration of every point.

    Raises:
        SweepError: An unknown field, a value that the configuration refuses, equal configurations.
    """
    configs: list[RunConfig] = []
    seen: dict[str, Point] = {}
    for point in points:
        try:
            config = changed(base, point)
            digest = config_hash(config)
        except (KeyError, TypeError, ValueError) as error:
            said = error.args[0] if isinstance(error, KeyError) else error
            raise SweepError(f"{_shown(point)}: {said}") from None
        if digest in seen:
            raise SweepError(
                f"runs must differ. Got equal configurations for {_shown(seen[digest])} and {_shown(point)}. "
                "Remove one of them."
            )
        seen[digest] = point
        configs.append(config)
    return configs


def changed(base: RunConfig, point: Point) -> RunConfig:
    """`base` with the values of a point.

    Raises:
        KeyError: An unknown field, with a suggestion; or as for `RunConfig.read`.
        TypeError, ValueError: A value that the configuration refuses.
    """
    data = to_dict(base)
    for path, value in point.items():
        *above, last = path.split(".")
        place, where = data, "RunConfig"
        for name in above:
            place, where = _inside(place, name, where), f"{where}.{name}"
        old = _inside(place, last, where)
        choice = isinstance(old, dict) and isinstance(value, str)  # the bare name of a choice
        place[last] = {KIND: value} if choice else value
    return RunConfig.read(data)


def varied(configs: Sequence[RunConfig]) -> tuple[str, ...]:
    """Paths of the fields in which the configurations differ, in the order of RunConfig."""
    return tuple(_varied([to_dict(config) for config in configs], "")) if configs else ()


def value_at(config: RunConfig, path: str) -> Any:
    """The JSON value of a field."""
    found = to_dict(config)
    for name in path.split("."):
        found = found[name]
    return found


def short_names(paths: Sequence[str]) -> dict[str, str]:
    """Path -> its shortest ending that no other path shares."""
    names = {}
    for path in paths:
        parts = path.split(".")
        endings = [".".join(parts[i:]) for i in range(len(parts) - 1, -1, -1)]
        alone = (e for e in endings if sum(other == e or other.endswith(f".{e}") for other in paths) == 1)
        names[path] = next(alone, path)
    return names


def label(config: RunConfig, paths: Sequence[str]) -> str:
    """`seed=0 lr=0.001`: a run by what tells it from the others."""
    names = short_names(paths)
    return " ".join(f"{names[path]}={text_of(value_at(config, path))}" for path in paths) or config.recipe


def text_of(value: Any) -> str:
    """A value on one line, as it may be typed: choices as `TruncatedBPTT(window=2)`."""
    if isinstance(value, dict):
        inside = ", ".join(f"{name}={text_of(item)}" for name, item in value.items() if name != KIND)
        return f"{value.get(KIND, '')}({inside})"
    if isinstance(value, list):
        return f"[{','.join(map(text_of, value))}]"
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def _varied(values: Sequence[Any], path: str) -> Iterator[str]:
    first = values[0]
    if all(isinstance(v, dict) and v.keys() == first.keys() and v.get(KIND) == first.get(KIND) for v in values):
        for name in first:
            yield from _varied([value[name] for value in values], f"{path}.{name}" if path else name)
    elif any(type(value) is not type(first) or value != first for value in values):
        yield path


def _inside(place: Any, name: str, where: str) -> Any:
    if not isinstance(place, dict):
        raise KeyError(
            f"{where} must be a group of fields, to vary {name!r} of it. Got {place!r}. Vary {where} itself."
        )
    if name not in place:
        known = [key for key in place if key != KIND]
        raise KeyError(
            f"Unknown config key {name!r} for {where}.{did_you_mean(name, known)} Known: {', '.join(known)}."
        )
    return place[name]


def _check_axes(over: Sequence[Axis], zipped: Sequence[Axis]) -> None:
    paths = [axis.path for axis in (*over, *zipped)]
    for path in paths:
        if paths.count(path) > 1:
            raise SweepError(f"a field must be varied once. Got {path} {paths.count(path)} times. Join the values.")
    lengths = {axis.path: len(axis.values) for axis in zipped}
    if len(set(lengths.values())) > 1:
        got = ", ".join(f"{path} {number}" for path, number in lengths.items())
        raise SweepError(f"--zip must have equally many values for every field. Got {got}. Give as many to each.")


def _rows(zipped: Sequence[Axis]) -> list[tuple[Any, ...]]:
    return list(zip(*(axis.values for axis in zipped), strict=True)) if zipped else [()]


def _values(path: str, text: str, piece: str) -> Iterator[Any]:
    """The values of one piece between commas: a range of whole numbers with both ends, or one value."""
    found = RANGE.fullmatch(piece)
    if not found:
        yield parse_value(piece)
        return
    if not all(_whole(end) for end in found.groups()):
        raise SweepError(f"{path}: a range of numbers that are not whole must stand alone. Got {text!r}. Write values.")
    low, high = int(found[1]), int(found[2])
    if not 0 <= high - low < LARGEST:
        raise SweepError(
            f"{path}: a range must go up, by at most {LARGEST:,} values. Got {piece!r}. Write its lower end first."
        )
    yield from range(low, high + 1)


def parse_value(text: str) -> Any:
    """A number, a list, a choice such as `TruncatedBPTT(window=2)`, none, true, false; anything else is a word."""
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        return [parse_value(piece) for piece in _split(text[1:-1])]
    try:
        return _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError):
        return text


def _value(node: ast.expr) -> Any:
    """ValueError where the expression is no value."""
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None):
            return node.value
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=ast.Constant(value=int() | float() as number)):
            return -number if isinstance(node.op, ast.USub) else number
        case ast.Name(id=name):
            return WORDS.get(name, name)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values) if all(key is not None for key in keys):
            return {str(_value(key)): _value(value) for key, value in zip(keys, values, strict=True) if key}
        case ast.Call(func=ast.Name(id=kind), args=[], keywords=named) if all(each.arg for each in named):
            return {KIND: kind, **{str(each.arg): _value(each.value) for each in named}}
    raise ValueError(ast.dump(node))


def _read(value: Any) -> Any:
    """A value of a file; YAML takes 1e-3 for a word."""
    return parse_value(value) if isinstance(value, str) else value


def _split(text: str) -> list[str]:
    """Pieces between the commas that are in no bracket and no quotes."""
    pieces, depth, quote = [""], 0, ""
    for letter in text:
        if quote or letter in "'\"":
            quote = "" if letter == quote else quote or letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif letter == "," and depth == 0:
            pieces.append("")
            continue
        pieces[-1] += letter
    return [piece.strip() for piece in pieces if piece.strip()]


def _whole(text: str) -> bool:
    return re.fullmatch(r"[-+]?\d+", text) is not None


def _four_digits(number: float) -> float:
    return float(f"{number:.4g}")


def _shown(point: Point) -> str:
    return " ".join(f"{path}={text_of(value)}" for path, value in point.items()) or "the recipe as it is"
