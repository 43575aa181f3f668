"""`looplab load-check FOLDER`: what a checkpoint folder is, and whether it would open."""

import json
from dataclasses import asdict, dataclass
from typing import Annotated

import tyro
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from looplab.cli import exit_codes
from looplab.interop.load_check import UNKNOWN, LoadCheck, load_check


@dataclass(frozen=True, kw_only=True)
class Options:
    """Look at a checkpoint folder without opening the model: family, tensors, ties, numbers that are not finite."""

    folder: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FOLDER")]
    """A folder of looplab, of a published family or of the transformers library, or the name of a built-in one."""
    family: str = "auto"
    """Name of a published family that the folder is to be read as. Default: what its files say."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print one JSON object instead of tables."""


def main(argv: list[str]) -> int:
    """Runs the command; the exit code says whether the folder would open."""
    options = tyro.cli(Options, args=argv, prog="looplab load-check")
    with exit_codes.user_error(exit_codes.MODEL, (KeyError,)):
        found = load_check(options.folder, family=options.family)
    if options.json:
        print(json.dumps(asdict(found), indent=1))
    else:
        show(found, Console())
    return exit_codes.DONE if found.loads else exit_codes.MODEL


def show(found: LoadCheck, console: Console) -> None:
    """Prints everything that was found; lists are whole."""
    near = f"nearest: {found.nearest or 'none'}"
    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in (
        ("family", f"{found.family} ({found.kind if found.kind != UNKNOWN else near})"),
        *((name.replace("_", " "), str(value)) for name, value in found.architecture.items() if value is not None),
        ("trained depth", found.trained_depth),
        ("KV rule", found.kv_rule),
        ("parameters", "" if found.parameters is None else f"{found.parameters:,}"),
        ("files", ", ".join(found.files)),
        ("tensors", f"{found.tensors}, {found.bytes:,} bytes"),
        ("types", ", ".join(f"{count} {name}" for name, count in found.dtypes.items())),
        ("tokenizer", found.tokenizer or "none"),
        ("tied", "\n".join(f"{' = '.join(tie['names'])} (by {tie['by']})" for tie in found.ties) or "none"),
        ("missing", "\n".join(found.missing) or "none"),
        ("unexpected", "\n".join(found.unexpected) or "none"),
        ("of wrong shape", "\n".join(found.misshapen) or "none"),
        ("not finite", "\n".join(f"{name}: {count:,}" for name, count in found.non_finite.items()) or "none"),
        ("notes", "\n".join(found.notes)),
        ("would open", "yes" if found.loads else "no\n" + "\n".join(found.problems)),
    ):
        if value:
            table.add_row(label, Text(value))
    console.print(Text(found.path, style="bold"), table)
