"""`looplab bench CASE`: benchmarks of a checkout, and the same on another commit."""

import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from looplab._registry import did_you_mean
from looplab.cli import exit_codes
from looplab.cli.config_file import FLAG, config_path, on_command_line, read_config
from looplab.cli.exit_codes import UserError

USAGE = """usage: looplab bench [CASE] [--against REF] [--config FILE] [OPTIONS of the case]

Runs a benchmark of this checkout, such as engine.depth_mix, audit_walk or models.kv_decode; without a name it lists
them. Every case checks first that both sides give the same numbers, and prints times as ratios against a named rival.
`looplab bench CASE --help` says what the case takes.

  --against REF    run the case on another commit too, in turn (this, that, that, this), and print both
  --config FILE    YAML or JSON file of options by name, `case` and `against` among them; the command line wins

Examples:
  looplab bench
  looplab bench engine.depth_mix --model loop-512 --rows 16
  looplab bench engine.depth_mix --laws spread --against HEAD~3
"""
ORDER = (0, 1, 1, 0)
"""Of this side and the other under --against."""


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    words = list(argv)
    if words[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return exit_codes.DONE
    root = checkout(Path.cwd())
    known = cases(root)
    if not words:
        print("\n".join(known))
        return exit_codes.DONE
    words = _from_file(words)
    name, rest = words[0], words[1:]
    module, _, case = name.partition(".")
    if module not in {entry.partition(".")[0] for entry in known} or (case and name not in known):
        hint = did_you_mean(name, known)
        raise UserError(f"CASE must be a benchmark of this checkout. Got {name!r}.{hint} See looplab bench.", 2)
    against, rest = _against(rest)
    command = [sys.executable, "-m", f"benchmarks.cases.{module}", *([case] if case else []), *rest]
    if not against:
        return exit_codes.DONE if _run(command, root).returncode == 0 else exit_codes.UNEXPECTED
    with worktree(root, against) as other:
        sides: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
        for side in ORDER:
            done = _run(command, (root, other)[side], capture=True)
            if done.returncode:
                where = "this checkout" if side == 0 else against
                raise UserError(f"bench: {name} must run on both sides. It failed on {where}: {done.stderr[-500:]}", 2)
            sides[side].append(json.loads(done.stdout.splitlines()[-1]))
    print(f"{name}: this checkout over {against}, medians of 2 runs each")
    for label, ours, theirs in compared(*sides):
        share = f"{ours / theirs:.3f}" if theirs else "-"
        print(f"  {label:<60} {ours:>14.6g} {theirs:>14.6g}  ratio {share}")
    return exit_codes.DONE


def checkout(start: Path) -> Path:
    """The folder of the checkout around a path: the first with `benchmarks/cases` above it, else the package's own.

    Raises:
        UserError: There is none, as in an installed wheel.
    """
    package = Path(__file__).resolve().parents[3]
    for folder in (start, *start.parents, package):
        if (folder / "benchmarks" / "cases").is_dir() and (folder / "src" / "looplab").is_dir():
            return folder
    raise UserError(
        f"bench: benchmarks are part of a checkout of looplab, not of the installed package. Got {start}, which is in "
        "none. Clone the repository and run the command there.",
        exit_codes.USAGE,
    )


def cases(root: Path) -> list[str]:
    """Names of all benchmarks: modules with a `main`, and their cases as MODULE.CASE."""
    code = (
        "import importlib, pathlib, sys\n"
        "for path in sorted(pathlib.Path('benchmarks/cases').glob('*.py')):\n"
        "    if 'def main' not in path.read_text(): continue\n"
        "    found = getattr(importlib.import_module(f'benchmarks.cases.{path.stem}'), 'CASES', {})\n"
        "    print('\\n'.join(f'{path.stem}.{case}' for case in found) if found else path.stem)\n"
    )
    done = _run([sys.executable, "-c", code], root, capture=True)
    if done.returncode:
        raise UserError(f"bench: the benchmarks of {root} must import. They did not: {done.stderr[-500:]}", 2)
    return done.stdout.split()


@contextmanager
def worktree(root: Path, ref: str) -> Iterator[Path]:
    """Another commit of the checkout, in a folder of its own that is removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="looplab-bench-"))
    git = ["git", "-C", str(root)]
    added = subprocess.run([*git, "worktree", "add", "--detach", str(folder), ref], capture_output=True, text=True)
    try:
        if added.returncode:
            said = added.stderr.strip().splitlines()[-1]
            raise UserError(f"--against must be a commit of this checkout. Got {ref!r}: {said}.", exit_codes.USAGE)
        yield folder
    finally:
        subprocess.run([*git, "worktree", "remove", "--force", str(folder)], capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)


def compared(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> Iterator[tuple[str, float, float]]:
    """(where a number stands, its median here, its median there), for every number that both sides report."""
    left, right = [dict(_numbers(one)) for one in ours], [dict(_numbers(one)) for one in theirs]
    for name in left[0]:
        if all(name in one for one in (*left, *right)):
            yield name, statistics.median(one[name] for one in left), statistics.median(one[name] for one in right)


def _numbers(value: Any, where: str = "") -> Iterator[tuple[str, float]]:
    """Numbers of a report by their place; rows are named by their words."""
    if isinstance(value, dict):
        words = [str(v) for v in value.values() if isinstance(v, str)] if where else []
        inside = f"{where}{' '.join(words)} " if words else where
        for name, entry in value.items():
            yield from _numbers(entry, f"{inside}{name} ")
    elif isinstance(value, list):
        for entry in value:
            yield from _numbers(entry, where)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield where.strip(), float(value)


def _from_file(words: list[str]) -> list[str]:
    """The words with those of the file that they name; they are printed, so that a log says what ran."""
    path = config_path(words)
    if path is None:
        return words
    own = [word for place, word in enumerate(words)
           if word != FLAG and not word.startswith(f"{FLAG}=") and words[max(0, place - 1)] != FLAG]  # fmt: skip
    values = read_config(path)
    case = values.pop("case", None)
    if not own or own[0].startswith("-"):
        if not isinstance(case, str):
            raise UserError(
                f"{FLAG} {path} must name the case where CASE is left out. Got {case!r}. Add case: NAME.", 2
            )
        own = [case, *own]
    for name, value in values.items():
        if on_command_line(name, own) or value is False or value is None:
            continue
        given = [] if value is True else [str(one) for one in (value if isinstance(value, list) else [value])]
        own += [f"--{name.replace('_', '-')}", *given]
    print(f"bench: {shlex.join(own)}", file=sys.stderr)
    return own


def _against(words: list[str]) -> tuple[str, list[str]]:
    for place, word in enumerate(words):
        if word == "--against":
            if place + 1 == len(words):
                raise UserError("--against must be followed by a commit. Got nothing. Name one, such as HEAD~1.", 2)
            return words[place + 1], words[:place] + words[place + 2 :]
        if word.startswith("--against="):
            return word.partition("=")[2], words[:place] + words[place + 1 :]
    return "", words


def _run(command: list[str], folder: Path, *, capture: bool = False) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder / "src"), str(folder)])
    return subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": path}, capture_output=capture, text=True)
