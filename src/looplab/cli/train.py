"""`looplab train RECIPE --out FOLDER`: trains a model by a recipe, any of whose fields an option may change."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import tyro

from looplab._config import config_hash
from looplab.cli import exit_codes, torchrun
from looplab.cli.device import check_device
from looplab.data.documents import DataError
from looplab.recipes import RECIPES
from looplab.records import RunRecord
from looplab.training.checkpoint import CheckpointError
from looplab.training.config import RunConfig
from looplab.training.display import choose_display
from looplab.training.divergence import DivergedError
from looplab.training.evaluation import DepthError
from looplab.training.folder import MODEL, FolderError
from looplab.training.trackers import TrackerError, check_trackers
from looplab.training.trainer import train

Kind = TypeVar("Kind")

EPILOGUE = """
A run is one configuration in one folder. The same command in the same folder goes on from the newest checkpoint, to the
same bits as a run that was never stopped; only steps, logging and evaluation may be changed then. FOLDER/model opens
with looplab.load and with the other commands. RECIPE may also be the run.json of an earlier run, edited or not.
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the command, and of the recipe."""

    out: Path
    """Folder of the run."""
    device: str = "cpu"
    """Device of PyTorch: cpu, cuda, cuda:1. Under torchrun "cuda" is a GPU for each process."""
    parallel: Literal["ddp", "fsdp"] | None = None
    """Under torchrun: the whole model on every process, or a piece of it. None: ddp."""
    track: str = ""
    """Programs that are told the numbers of the run, with commas: trackio, wandb. None unless named."""
    quiet: tyro.conf.FlagCreatePairsOff[bool] = False
    """Say nothing until the end."""
    run: RunConfig
    """The recipe with its changes."""


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    return torchrun.once(lambda: _run(argv))


def _run(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(usage(), file=sys.stdout if argv else sys.stderr)
        return exit_codes.DONE if argv else exit_codes.USAGE
    with torchrun.hushed():
        options = parsed(Options, "train", argv, EPILOGUE)
    config = options.run
    check_device(options.device)
    with exit_codes.user_error(exit_codes.USAGE, (ValueError,)):
        digest = config_hash(config)  # refuses numbers that are not finite
    if not torchrun.silent():
        print(f"{config.recipe}  config {digest}  out {options.out}", file=sys.stderr)
    track = [name.strip() for name in options.track.split(",") if name.strip()]
    display = choose_display(config.log_every, quiet=options.quiet or torchrun.silent())
    with (
        exit_codes.user_error(exit_codes.USAGE, (DepthError,)),
        exit_codes.user_error(exit_codes.MODEL, (DivergedError,)),
        exit_codes.user_error(exit_codes.DATA, (DataError, CheckpointError)),
        exit_codes.user_error(exit_codes.BUSY, (FolderError,)),
        torchrun.processes(options.parallel, options.device) as parallel,
    ):
        with exit_codes.user_error(exit_codes.USAGE, (ValueError,)):
            parallel.check(config)
        with exit_codes.user_error(exit_codes.USAGE, (KeyError, TrackerError)):
            check_trackers(track)
        try:
            record = train(config, options.out, display=display, parallel=parallel, track=track)
        except KeyboardInterrupt:
            print("The same command goes on from the newest checkpoint.", file=sys.stderr)
            raise
    if not torchrun.silent():
        print(summary(record, options.out))
    return exit_codes.DONE


def usage() -> str:
    """What `looplab train --help` prints: the recipes, and how to see and change their fields."""
    lines = [
        "usage: looplab train RECIPE --out FOLDER [--FIELD VALUE ...]",
        "",
        "Train a model by a recipe.",
        "",
        "Recipes:",
    ]
    for name in RECIPES:
        lines.append(f"  {name:<24}{(RECIPES[name].__doc__ or '').splitlines()[0]}")
    lines += [
        *("", "Examples:"),
        "  looplab train text-core --help                              every field of a recipe, with its value",
        "  looplab train text-core --out runs/core                     about ten minutes on one CPU thread",
        "  looplab train text-core --out runs/tiny --steps 100 --optimizer.lr 1e-3",
        "  looplab train text-core --out runs/mine --data.sources a.jsonl b.txt --seed 1",
        "  torchrun --nproc-per-node 2 -m looplab.cli train text-core --out runs/two --parallel fsdp",
        EPILOGUE.rstrip(),
    ]
    return "\n".join(lines)


def summary(record: RunRecord, folder: Path) -> str:
    """The last lines of a run."""
    return (
        f"Held-out loss {record.loss:.4f} nats per token after {record.tokens:,} tokens, {record.seconds:.0f} s and "
        f"{record.train_flops:.3g} FLOPs.\nModel: {folder / MODEL}"
    )


def parsed(kind: type[Kind], command: str, argv: Sequence[str], description: str) -> Kind:
    """Options of a command whose first word is a recipe, with the recipe's fields as further options in `run`."""
    recipe, *rest = argv
    with exit_codes.user_error(exit_codes.USAGE):
        base = configuration(recipe)
    with exit_codes.user_error(exit_codes.USAGE, (ValueError, TypeError, KeyError)):

        @dataclass(frozen=True, kw_only=True)
        class OfRecipe(kind):  # type: ignore[valid-type, misc]
            run: Annotated[RunConfig, tyro.conf.arg(name="")] = base

        return tyro.cli(
            OfRecipe,
            args=rest,
            prog=f"looplab {command} {recipe}",
            description=description.strip(),
            config=(tyro.conf.AvoidSubcommands,),
        )


def configuration(recipe: str) -> RunConfig:
    """The recipe of this name, or the configuration in a run.json."""
    if recipe in RECIPES or not recipe.endswith(".json"):
        return RECIPES[recipe]()
    if not Path(recipe).is_file():
        raise FileNotFoundError(
            f"RECIPE must be a recipe or the run.json of an earlier run. Got {recipe!r}: no such file."
        )
    try:
        data = json.loads(Path(recipe).read_bytes())
    except ValueError as error:
        raise ValueError(
            f"RECIPE must be a run.json. Got {recipe!r}, which is not JSON ({error}). Repair it."
        ) from None
    written = data.get("config", data) if isinstance(data, dict) else data
    if not isinstance(written, dict):
        raise ValueError(f"RECIPE must be a run.json. Got {recipe!r}, which holds no configuration. Give another file.")
    return RunConfig.read(written)
