"""`looplab list [KIND]`: what is built in, from the registries."""

import importlib
import inspect
import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

import tyro
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from looplab._config import from_dict
from looplab.cli import exit_codes
from looplab.interop import builtin_folder, builtin_names
from looplab.models.base import MODELS, PRESETS, build
from looplab.models.folder import read_config
from looplab.models.published import PUBLISHED, Family
from looplab.recipes import RECIPES

Kind = Literal[
    "models",
    "presets",
    "recipes",
    "builtins",
    "families",
    "objectives",
    "injections",
    "state-inits",
    "depth-samplers",
    "gradient-strategies",
]
MAIN: tuple[Kind, ...] = ("models", "presets", "recipes", "builtins")
"""Kinds shown when none is named."""

CHOICES = {
    "objectives": ("looplab.objectives.base", "OBJECTIVES"),
    "injections": ("looplab.recurrence.injection", "INJECTIONS"),
    "state-inits": ("looplab.recurrence.state_init", "STATE_INITS"),
    "depth-samplers": ("looplab.recurrence.depth", "DEPTH_SAMPLERS"),
    "gradient-strategies": ("looplab.recurrence.gradient", "GRADIENT_STRATEGIES"),
}
"""Families whose members are parts of a configuration: kind -> where their registry is."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """List what is built in. Without a kind: what has a size, that is models, presets, recipes and checkpoints."""

    kind: tyro.conf.Positional[Kind | None] = None
    """What to list."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print one JSON object, kind -> entries, instead of tables."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of a list."""

    name: str
    about: str
    parameters: int | None = None
    """Stored parameters, where the entry fixes them."""
    reference: str = ""


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code."""
    options = tyro.cli(Options, args=argv, prog="looplab list")
    kinds = MAIN if options.kind is None else (options.kind,)
    lists = {kind: entries(kind) for kind in kinds}
    if options.json:
        print(json.dumps({kind: [asdict(entry) for entry in found] for kind, found in lists.items()}, indent=1))
    else:
        for kind, found in lists.items():
            show(kind, found, Console())
    return exit_codes.DONE


def entries(kind: Kind) -> list[Entry]:
    """All entries of a kind, by name."""
    if kind == "models":
        return [Entry(name=n, about=_first_line(MODELS[n]), reference=MODELS[n].reference) for n in MODELS]
    if kind == "presets":
        return [_sized(name, _first_line(PRESETS[name]), PRESETS[name]()) for name in PRESETS]
    if kind == "recipes":
        return [_sized(name, _first_line(RECIPES[name]), RECIPES[name]().model) for name in RECIPES]
    if kind == "builtins":
        return [_builtin(name) for name in builtin_names()]
    if kind == "families":
        return _families()
    module, registry = CHOICES[kind]
    family = getattr(importlib.import_module(module), registry)
    return [Entry(name=name, about=_first_line(family[name])) for name in family]


def show(kind: str, found: list[Entry], console: Console) -> None:
    """Prints the entries of a kind as a table; columns that no entry fills are left out."""
    table = Table(box=box.SIMPLE_HEAD)
    columns = {
        "name": [entry.name for entry in found],
        "parameters": ["" if entry.parameters is None else f"{entry.parameters:,}" for entry in found],
        "": [entry.about for entry in found],
        "reference": [entry.reference for entry in found],
    }
    filled = {title: cells for title, cells in columns.items() if any(cells)}
    for title in filled:
        table.add_column(title, justify="right" if title == "parameters" else "left", overflow="fold")
    for row in zip(*filled.values(), strict=True):
        table.add_row(*row)
    console.print(Text(kind, style="bold"), table)


def _families() -> list[Entry]:
    """Whose checkpoints open: published families, which `--family` can name, and model types of the library."""
    from looplab.interop.adapters import ADAPTERS  # loads the transformers library

    published = [Entry(name=n, about=_found_by(PUBLISHED[n]), reference=PUBLISHED[n].reference) for n in PUBLISHED]
    adapted = [Entry(name=n, about=f"model_type {n}", reference=ADAPTERS[n].reference) for n in ADAPTERS]
    return sorted(published + adapted, key=lambda entry: entry.name)


def _found_by(family: Family) -> str:
    if not family.model_types:
        return "found by its tensors"
    return " or ".join(f"model_type {kind}" for kind in family.model_types)


def _builtin(name: str) -> Entry:
    facts = read_config(builtin_folder(name))
    config: Any = from_dict(MODELS[facts["model"]].config_class, facts["config"])
    return _sized(name, f"trained by recipe {facts['trained']['recipe']}", config)


def _sized(name: str, about: str, config: Any) -> Entry:
    """An entry for a model configuration; the model is built without storage to count it."""
    model = build(config, device="meta")
    return Entry(name=name, about=about, parameters=model.spec.params.total, reference=model.reference)


def _first_line(documented: Any) -> str:
    return (inspect.getdoc(documented) or "").partition("\n")[0]
