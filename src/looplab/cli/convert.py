"""`looplab convert FILE OUT`: a released pickle of tensors becomes safetensors, once and explicitly."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from looplab.cli import exit_codes
from looplab.cli.checkpoint import ReadAs, in_flags
from looplab.interop.convert import MANIFEST, convert
from looplab.interop.load_check import LoadCheck, load_check
from looplab.models.published import PUBLISHED

SHOWN = 8
"""Dropped entries that are listed; the manifest has them all."""


@dataclass(frozen=True, kw_only=True)
class Options(ReadAs):
    """Convert a pickle of tensors to safetensors. Restricted loading only: a file that needs other types is refused.

    Ends with a look at OUT, as `looplab load-check` takes it: --family and --tie say how it is to be read.
    """

    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
    """A file written by torch.save, or the pytorch_model.bin.index.json of several."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """A new or empty folder. config.json and tokenizer files beside FILE are copied into it."""
    key: str | None = None
    """Where in FILE the state dict is, such as model.ema. Default: found by name."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the manifest (OUT/convert.json), with what load-check says of OUT, instead of a summary."""


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code."""
    options = tyro.cli(Options, args=argv, prog="looplab convert")
    with (
        exit_codes.user_error(exit_codes.MODEL, (ValueError, KeyError, FileNotFoundError, PermissionError)),
        exit_codes.user_error(exit_codes.BUSY, (FileExistsError,)),
    ):
        tie = options.tied
        if options.family != "auto":
            PUBLISHED[options.family]  # refuses a name that is none before anything is written
        manifest = convert(options.file, options.out, key=options.key)
        found = load_check(options.out, family=options.family, tie=tie, assume=options.assume)
    if options.json:
        print(json.dumps(manifest | {"load_check": asdict(found)}, indent=1))
    else:
        print(summary(manifest, options.out, found))
    return exit_codes.DONE


def summary(manifest: dict[str, Any], out: Path, found: LoadCheck) -> str:
    """What was read, what was left out, whether it opens, and what to do next."""
    dtypes = ", ".join(f"{count} {name}" for name, count in manifest["dtypes"].items())
    under = f" under {manifest['state_dict']}" if manifest["state_dict"] else ""
    lines = [f"read {manifest['tensors']} tensors{under}: {dtypes}, {manifest['bytes']:,} bytes"]
    lines += [f"tied: {name} is {kept}, written once" for name, kept in manifest["ties"].items()]
    dropped = list(manifest["dropped"].items())
    lines += [f"not kept: {name} ({kind})" for name, kind in dropped[:SHOWN]]
    if len(dropped) > SHOWN:
        lines += [f"not kept: {len(dropped) - SHOWN} more, see {MANIFEST}"]
    lines += [f"copied: {', '.join(manifest['copied']) or 'no settings beside FILE; add config.json by hand'}"]
    lines += [f"wrote {out}: {', '.join([*manifest['files'], MANIFEST])}"]
    lines += [f"opens: yes, as {found.family}" if found.loads else f"opens: not yet; {in_flags(found.problems[0])}"]
    lines += [f"next: looplab load-check {out}"]
    return "\n".join(lines)
