"""The command line: `looplab COMMAND ...`, one thin file per command.

A command is a module of this folder with `main(argv) -> int`; it parses its own options and returns an exit code. Only
the chosen module is imported, so `looplab --help` is quick and needs no PyTorch.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

import looplab
from looplab._registry import did_you_mean
from looplab.cli import exit_codes


class Command(NamedTuple):
    """One line of `looplab --help`."""

    group: str
    help: str
    module: str


COMMANDS = {
    "audit": Command("answer", "say what the depth of a model is worth, with intervals", "looplab.cli.audit"),
    "eval": Command("answer", "run tasks of lm-eval at several depths", "looplab.cli.eval"),
    "study": Command("answer", "rerun a published claim set, with a word for every claim", "looplab.cli.study"),
    "claims": Command("answer", "merge the claims of all studies into one table", "looplab.cli.claims"),
    "scaling": Command("answer", "fit scaling laws, count costs, match compute", "looplab.cli.scaling"),
    "reuse": Command("answer", "say whether early exits harm later tokens", "looplab.cli.reuse"),
    "train": Command("make", "train a model by a recipe", "looplab.cli.train"),
    "sweep": Command("make", "train many runs of one recipe, and put them into one table", "looplab.cli.sweep"),
    "gate": Command("make", "train gates that know early when a token stops", "looplab.cli.gate"),
    "retrofit": Command("make", "make a looped model out of layers of a dense one", "looplab.cli.retrofit"),
    "export": Command("make", "write a model in the format of a published family", "looplab.cli.export"),
    "convert": Command("make", "turn a released pickle of tensors into safetensors", "looplab.cli.convert"),
    "generate": Command("use", "let a model go on with a text, at any depth", "looplab.cli.generate"),
    "serve": Command("use", "answer requests over HTTP, as the OpenAI API does", "looplab.cli.serve"),
    "bench": Command("look", "run a benchmark of a checkout", "looplab.cli.bench"),
    "batch": Command("use", "answer a file of requests", "looplab.cli.batch"),
    "task": Command("look", "print problems of a task with their answers", "looplab.cli.task"),
    "list": Command("look", "list models, presets, recipes and built-in checkpoints", "looplab.cli.list"),
    "describe": Command("look", "describe one model: plan, parameters, FLOPs, KV bytes", "looplab.cli.describe"),
    "load-check": Command("look", "say what a checkpoint folder is and whether it opens", "looplab.cli.load_check"),
}
GROUPS = {
    "answer": "Answer a question about a model",
    "make": "Make a model",
    "use": "Use a model",
    "look": "Look around",
}
EXAMPLES = (
    ("looplab list", "what is built in"),
    ("looplab describe text-2x4-fixed", "one of the built-in checkpoints"),
    ("looplab audit text-2x4-fixed --out audit-out", "a report on its depth, in about a minute"),
    ("looplab load-check FOLDER", "whether a checkpoint would open, and why not"),
    ("looplab audit --help", "all options of a command"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code (`looplab.cli.exit_codes`)."""
    words = [*(sys.argv[1:] if argv is None else argv)]  # `list` is a module of this package
    if not words:
        print(usage(), file=sys.stderr)
        return exit_codes.USAGE
    name, rest = words[0], words[1:]
    if name in ("-h", "--help", "help"):
        print(usage())
        return exit_codes.DONE
    if name == "--version":
        print(f"looplab {looplab.__version__}")
        return exit_codes.DONE
    try:
        if name not in COMMANDS:
            known = ", ".join(COMMANDS)
            hint = did_you_mean(name, COMMANDS)
            raise exit_codes.UserError(f"Unknown command {name!r}.{hint} Known: {known}.", exit_codes.USAGE)
        return importlib.import_module(COMMANDS[name].module).main(rest)
    except exit_codes.UserError as error:
        speaker = name if name in COMMANDS else "looplab"
        said = error.message.startswith(f"{speaker}: ")
        print(error.message if said else f"{speaker}: {error.message}", file=sys.stderr)
        return error.code
    except BrokenPipeError:  # the reader left, as `head` does; without this the flush at exit would complain too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exit_codes.UNEXPECTED
    except KeyboardInterrupt:
        print(f"{name}: interrupted.", file=sys.stderr)
        return exit_codes.INTERRUPTED


def usage() -> str:
    """The text of `looplab --help`."""
    lines = ["usage: looplab COMMAND [options]", "", "The workbench for looped (recurrent-depth) language models."]
    for group, title in GROUPS.items():
        lines += ["", f"{title}:"]
        lines += [f"  {name:<12}{command.help}" for name, command in COMMANDS.items() if command.group == group]
    lines += ["", "Examples:"]
    lines += [f"  {example:<50}  {meaning}" for example, meaning in EXAMPLES]
    lines += ["", "Exit codes:"]
    lines += [f"  {code:<5}{meaning}" for code, meaning in exit_codes.MEANINGS.items()]
    return "\n".join(lines)
