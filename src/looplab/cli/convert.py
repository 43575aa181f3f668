"""`looplab convert FILE OUT`: a released pickle of tensors becomes safetensors, once and explicitly."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from looplab.cli import exit_codes
from looplab.interop.convert import MANIFEST, convert

SHOWN = 8
"""Dropped entries that are listed; the manifest has them all."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Convert a pickle of tensors to safetensors. Restricted loading only: a file that needs other types is refused."""

    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
    """A file written by torch.save, or the pytorch_model.bin.index.json of several."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """A new or empty folder. config.json and tokenizer files beside FILE are copied into it."""
    key: str | None = None
    """Where in FILE the state dict is, such as model.ema. Default: found by name."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the manifest (OUT/convert.json) instead of a summary."""


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code."""
    options = tyro.cli(Options, args=argv, prog="looplab convert")
    with (
        exit_codes.user_error(exit_codes.MODEL, (ValueError, FileNotFoundError, PermissionError)),
        exit_codes.user_error(exit_codes.BUSY, (FileExistsError,)),
    ):
        manifest = convert(options.file, options.out, key=options.key)
    print(json.dumps(manifest, indent=1) if options.json else summary(manifest, options.out))
    return exit_codes.DONE


def summary(manifest: dict[str, Any], out: Path) -> str:
    """What was read, what was left out, and what to do next."""
    dtypes = ", ".join(f"{count} {name}" for name, count in manifest["dtypes"].items())
    under = f" under {manifest['state_dict']}" if manifest["state_dict"] else ""
    lines = [f"read {manifest['tensors']} tensors{under}: {dtypes}, {manifest['bytes']:,} bytes"]
    lines += [f"tied: {name} is {kept}, written once" for name, kept in manifest["ties"].items()]
    dropped = list(manifest["dropped"].items())
    lines += [f"not kept: {name} ({kind})" for name, kind in dropped[:SHOWN]]
    if len(dropped) > SHOWN:
        lines += [f"not kept: {len(dropped) - SHOWN} more, see {MANIFEST}"]
    lines += [f"copied: {', '.join(manifest['copied']) or 'no settings beside FILE; add config.json by hand'}"]
    lines += [f"wrote {out}: {', '.join([*manifest['files'], MANIFEST])}", f"next: looplab load-check {out}"]
    return "\n".join(lines)
