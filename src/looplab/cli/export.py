"""`looplab export MODEL OUT`: a model in the format of a published family, for the family's own code."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

import looplab
from looplab.cli import exit_codes
from looplab.interop.checkpoint import DTYPES, export, find_folder
from looplab.interop.published import Shards
from looplab.models.folder import listing


@dataclass(frozen=True, kw_only=True)
class Options:
    """Write a model as a published family keeps it: config.json, weights under its names, tokenizer.

    A checkpoint of the family comes back bit by bit. A model that was made here is written if the family has words for
    everything that it computes; otherwise the part without a place is named and nothing is written.
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """A checkpoint folder, or the name of a built-in checkpoint."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """A new or empty folder."""
    format: str | None = None
    """huginn, retrofit, ouro, parcae or loopformer. Default: the family that MODEL came from."""
    dtype: Literal["stored", "float32", "bfloat16"] = "stored"
    """Type of the weights. stored: as in MODEL's files."""


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code."""
    options = tyro.cli(Options, args=argv, prog="looplab export")
    if options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        raise exit_codes.UserError(
            f"export: OUT must be a new or empty folder. Got {options.out}, which has {listing(options.out)}. "
            "Choose another folder.",
            exit_codes.BUSY,
        )
    with exit_codes.user_error(exit_codes.MODEL):
        dtype = stored_dtype(find_folder(options.model)) if options.dtype == "stored" else options.dtype
        loaded = looplab.load(options.model, dtype=dtype)
        lost = export(loaded, options.out, format=options.format)
    for words in lost:
        print(f"not kept: {words}, for which the format has no word; what the model computes is the same")
    if loaded.facts.get("tokenizer") == "bytes":
        print("not written: a tokenizer; MODEL reads bytes, which has no file")
    written = ", ".join(sorted(path.name for path in options.out.iterdir()))
    print(f"wrote {options.out}: {written}\nnext: looplab load-check {options.out}")
    return exit_codes.DONE


def stored_dtype(folder: Path) -> str:
    """Name of the type of the first floating tensor of a folder."""
    shards = Shards(folder)
    for name in shards:
        kind = str(shards[name].dtype).removeprefix("torch.")
        if kind in DTYPES and kind != "float16":
            return kind
    return "float32"
