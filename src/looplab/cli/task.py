"""`looplab task [NAME]`: lists the tasks, prints problems with their answers, checks reference against reference."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from looplab._config import to_dict
from looplab.cli import exit_codes
from looplab.tasks.agreement import Agreement, agreement
from looplab.tasks.base import IGNORED, TASKS, Task

SHOWN = 10
"""Intermediate values printed of a long trace: all but the last from its beginning."""
ITEMS = 3

EPILOGUE = """
Problem INDEX of a seed is the same alone, in a batch and on any machine. Its split is a hash of what all problems equal
up to a symmetry have in common, so none is in two splits whatever the seed. Chance: how often the best guess that does
not read the problem is exactly right.
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the command, and of the task."""

    difficulty: tuple[int, ...] = ()
    """Difficulties. Default: the least that is trained; with --check all."""
    show: int = ITEMS
    """Problems of each difficulty."""
    first: int = 0
    """Number of the first one."""
    split: Literal["train", "validation", "test"] | None = None
    """Only problems of this split."""
    seed: int = 0
    """Seed of the run that the problems belong to."""
    check: int = 0
    """Instead, grade so many problems of each difficulty by the reference and by an independent check."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print one JSON object."""
    task: Any
    """The task with its options."""


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    if not argv or list(argv) == ["--json"]:
        listed = [entry(name) for name in TASKS]
        print(json.dumps({"tasks": listed}, indent=1)) if argv else show_list(listed, Console())
        return exit_codes.DONE
    if argv[0].startswith("-"):
        asked = argv[0] in ("-h", "--help")
        print(usage(), file=sys.stdout if asked else sys.stderr)
        return exit_codes.DONE if asked else exit_codes.USAGE
    options = _parse(argv[0], argv[1:])
    task: Task = options.task
    known = sorted({*task.train_difficulties, *task.test_difficulties})
    asked_for = options.difficulty or (known if options.check else (min(task.train_difficulties),))
    with exit_codes.user_error(exit_codes.USAGE, (ValueError,)):
        for difficulty in asked_for:
            task.check(difficulty)
        if options.check:
            return _check(task, asked_for, options)
        found = [
            described(task, difficulty, options.seed, index, options.split)
            for difficulty in asked_for
            for index in range(options.first, options.first + options.show)
        ]
    if options.json:
        print(json.dumps({"task": facts(task), "items": found}, indent=1))
    else:
        print(heading(task))
        for item in found:
            print(f"\n{text(item)}")
    return exit_codes.DONE


def usage() -> str:
    """What `looplab task --help` prints."""
    lines = [
        "usage: looplab task [NAME] [--difficulty N ...] [--show N] [--check N] [--json] [--OPTION VALUE ...]",
        "",
        "Print problems of a task: tokens, answer, intermediate values, split, chance. Without NAME: list the tasks.",
        "",
        "Tasks:",
        *(f"  {name:<24}{_about(TASKS[name])}" for name in TASKS),
        *("", "Examples:"),
        "  looplab task pointer_chase --difficulty 4 16 --show 3",
        "  looplab task state_tracking --group a5             the options of a task are flags; --help names them",
        "  looplab task addition --check 1000                 grade by the reference and by an independent check",
        EPILOGUE.rstrip(),
    ]
    return "\n".join(lines)


def entry(name: str) -> dict[str, Any]:
    """One line of the list: a task with its usual options."""
    return {"name": name, "about": _about(TASKS[name]), **facts(TASKS[name]())}


def facts(task: Task) -> dict[str, Any]:
    """What a task is, apart from its problems."""
    return {
        "task": task.name,
        "version": task.version,
        "options": to_dict(task),
        "reference": task.reference_paper,
        "train": list(task.train_difficulties),
        "test": list(task.test_difficulties),
        "causal": task.causal,
        "targets": task.has_targets,
        "tokens": len(task.tokens),
        "symbols": len(task.symbols),
        "cells": task.cells,
    }


def described(task: Task, difficulty: int, seed: int, index: int, split: Any) -> dict[str, Any]:
    """One problem, in names and numbers."""
    problem = task.sample(difficulty, seed, index, split)
    example, trace = task.example(problem), task.reference(problem)
    return {
        "difficulty": difficulty,
        "seed": seed,
        "index": index,
        "split": task.split(difficulty, problem),
        "chance": task.chance(difficulty),
        "num_steps": task.num_steps(difficulty),
        "text": task.show(problem),
        "tokens": [task.tokens[t] for t in example.tokens],
        "token_ids": example.tokens.tolist(),
        "labels": example.labels.tolist(),
        "answer": [task.symbols[a] for a in example.labels[example.answer].reshape(-1) if a != IGNORED],
        "values": [_plain(value) for value in trace.values],
    }


def heading(task: Task) -> str:
    """The first line: the task and its options."""
    options = "  ".join(f"{name}={value}" for name, value in to_dict(task).items() if name != "kind")
    return f"{task.name} version {task.version}  {options}"


def text(item: Mapping[str, Any]) -> str:
    """One problem in readable lines."""
    lines = [
        f"difficulty {item['difficulty']}  item {item['index']} of seed {item['seed']}  split {item['split']}  "
        f"chance {item['chance']:.3g}  steps {item['num_steps']}",
        *(f"  {line}" for line in item["text"].splitlines()),
    ]
    values, last = item["values"], len(item["values"]) - 1
    for k, value in enumerate(values):
        if k < SHOWN - 1 or k == last:
            lines.append(f"  {k:>4}  {_said(value)}")
        elif k == last - 1:
            lines.append(f"        .. {last - SHOWN + 1} more")
    return "\n".join(lines)


def show_list(listed: list[dict[str, Any]], console: Console) -> None:
    """Prints the tasks as a table."""
    table = Table("task", "", "train", "test", "targets", "reference", box=box.SIMPLE_HEAD)
    for found in listed:
        grids = (", ".join(map(str, found[part])) for part in ("train", "test"))
        table.add_row(found["name"], found["about"], *grids, "yes" if found["targets"] else "no", found["reference"])
    console.print(table)
    console.print("Difficulties are those of the usual options. Targets: whether iterations have targets of their own.")


def _check(task: Task, difficulties: Sequence[int], options: Options) -> int:
    found = [agreement(task, d, items=options.check, seed=options.seed, split=options.split) for d in difficulties]
    if options.json:
        print(json.dumps({"task": facts(task), "check": [asdict(one) for one in found]}, indent=1))
    else:
        print(heading(task))
        show_agreement(found, task, Console())
    return exit_codes.DONE if all(one.complete for one in found) else exit_codes.SELF_TEST


def show_agreement(found: list[Agreement], task: Task, console: Console) -> None:
    """Prints what agreed as a table."""
    table = Table(
        *("difficulty", "items", "reference exact", "check agrees", "changed refused", "check agrees", "same alone"),
        "chance",
        box=box.SIMPLE_HEAD,
    )
    for one in found:
        counts = (one.exact, one.verified, one.refused, one.agreed, one.alone)
        said = ["no check" if count is None else str(count) for count in counts]
        table.add_row(str(one.difficulty), str(one.items), *said, f"{task.chance(one.difficulty):.3g}")
    console.print(table)


def _parse(name: str, argv: Sequence[str]) -> Options:
    with exit_codes.user_error(exit_codes.USAGE):
        kind = TASKS[name]
    with exit_codes.user_error(exit_codes.USAGE, (ValueError, TypeError)):
        options = kind()

        @dataclass(frozen=True, kw_only=True)
        class OfTask(Options):
            task: Annotated[kind, tyro.conf.arg(name="")] = options  # type: ignore[valid-type]

        parsed = tyro.cli(
            OfTask, args=list(argv), prog=f"looplab task {name}", description=f"{_about(kind)}\n{EPILOGUE.strip()}"
        )
    for option, least in (("show", 1), ("first", 0), ("check", 0), ("seed", 0)):
        if getattr(parsed, option) < least:
            raise exit_codes.UserError(
                f"--{option} must be at least {least}. Got {getattr(parsed, option)}.", exit_codes.USAGE
            )
    return parsed


def _about(kind: type[Task]) -> str:
    return (kind.__doc__ or "").partition("\n")[0]


def _plain(value: Any) -> Any:
    """A value of a trace as JSON has it; sets in ascending order."""
    if isinstance(value, (frozenset, set)):
        return sorted(value)
    if isinstance(value, (tuple, list)):
        return [_plain(one) for one in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.integer):
        return int(value)
    return value if isinstance(value, (int, float, str, bool)) or value is None else str(value)


def _said(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    return " ".join(f"({_said(one)})" if isinstance(one, list) else _said(one) for one in value)
