"""`looplab batch MODEL IN OUT`: a file of requests into a file of answers, with the server's own rules."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from looplab.cli import exit_codes
from looplab.cli.config_file import parsed
from looplab.cli.engine_options import EngineOptions, open_engine
from looplab.cli.eval import ProgressLine
from looplab.cli.exit_codes import UserError, user_error

EPILOGUE = """
IN holds requests as lines of the batch format of OpenAI:
  {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "def f(", "max_tokens": 16}}

OUT gets one line per request, in the same order:
  {"id": "...", "custom_id": "a", "response": {"status_code": 200, "request_id": "...", "body": {...}}, "error": null}

The same command goes on where it was killed. OUT appears when all lines are answered; until then answers are in
OUT.parts, and OUT.meta says which run they belong to. Draws depend on --seed and custom_id alone: under
--numerics exact a run that was killed writes what an undisturbed one would.

Examples:
  looplab batch demo requests.jsonl answers.jsonl
  looplab batch demo requests.jsonl answers.jsonl --errors refused.jsonl --numerics exact --seed 1
"""


@dataclass(frozen=True, kw_only=True)
class Options(EngineOptions):
    """Answer a file of requests."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Checkpoint folder, or the name of a built-in checkpoint (see `looplab list`)."""
    input: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="IN")]
    """File of requests."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """File of answers."""
    errors: Path | None = None
    """File for answers that are errors. Default: they stand in OUT."""
    seed: int = 0
    """Of draws, where a request names no seed."""
    quiet: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the result and nothing else."""


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    options = parsed(Options, "batch", argv, EPILOGUE)
    command = shlex.join(["looplab", "batch", *argv])
    try:
        answered, failed = _run(options)
    except KeyboardInterrupt:
        print(f"Interrupted. To go on: {command}", file=sys.stderr)
        raise
    print(f"{answered:,} answers in {options.out}, {failed:,} of them errors" + _elsewhere(options, failed))
    return exit_codes.DONE


def _run(options: Options) -> tuple[int, int]:
    """Answers what is open; returns how many lines were answered, and how many with an error."""
    from looplab.server.batch import Batch, BatchBusyError, BatchFolder, InputError, batch_settings, read_lines

    files = [path.resolve() for path in (options.input, options.out, options.errors) if path is not None]
    if len(set(files)) < len(files):
        raise UserError("IN, OUT and --errors must be different files. Got one twice. Name another.", exit_codes.USAGE)
    with user_error(exit_codes.DATA, (OSError, InputError)):
        data = options.input.read_bytes()
        lines = read_lines(data)
    names = (Path(options.model).name,)
    folder = BatchFolder(options.out, options.errors)
    progress = ProgressLine(Console(stderr=True, quiet=options.quiet, highlight=False, soft_wrap=True))
    progress.started("batch")
    with (
        open_engine(options.model, options) as engine,
        user_error(exit_codes.BUSY, (BatchBusyError,)),
        user_error(exit_codes.DATA, (OSError,)),
        folder.claimed(batch_settings(engine.describe(), data=data, seed=options.seed, names=names)) as finished,
    ):
        if finished:
            return folder.counted()
        engine.start()
        most = 2 * engine.describe()["max_resident"]
        batch = Batch(engine, engine.tokenizer, names=names, most=most, seed=options.seed)
        with progress.shown():
            batch.run(lines, folder, lambda done, total: progress.advanced("requests", done, total))
        return folder.finish(lines)


def _elsewhere(options: Options, failed: int) -> str:
    return f", which are in {options.errors}" if options.errors is not None and failed else ""
