"""`looplab load-check FOLDER`: what a checkpoint folder is, and whether it would open."""

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import tyro
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from looplab.cli import exit_codes
from looplab.cli.checkpoint import ReadAs, in_flags
from looplab.interop.load_check import UNKNOWN, LoadCheck, load_check
from looplab.models.published import PUBLISHED


@dataclass(frozen=True, kw_only=True)
class Options(ReadAs):
    """Look at a checkpoint folder without opening the model: family, tensors, ties, numbers that are not finite."""

    folder: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FOLDER")]
    """A folder of looplab, of a published family or of the transformers library, or the name of a built-in one."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print one JSON object instead of tables."""


def main(argv: list[str]) -> int:
    """Runs the command; the exit code says whether the folder would open."""
    options = tyro.cli(Options, args=argv, prog="looplab load-check")
    with exit_codes.user_error(exit_codes.MODEL, (KeyError,)):
        found = load_check(options.folder, family=options.family, tie=options.tied, assume=options.assume)
    if options.json:
        print(json.dumps(asdict(found), indent=1))
    else:
        show(found, Console())
    return exit_codes.DONE if found.loads else exit_codes.MODEL


def show(found: LoadCheck, console: Console) -> None:
    """Prints everything that was found; lists are whole."""
    near = f"nearest: {found.nearest or 'none'}"
    nothing = "none" if found.architecture else "not compared"
    problems = in_flags("\n".join(found.problems))
    alike = [name for name in PUBLISHED if found.nearest in (name, *PUBLISHED[name].model_types)]
    if found.kind == UNKNOWN and alike:
        problems += f"\nTo read it as the nearest: looplab load-check {found.path} --family {' or '.join(alike)}"
    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in (
        ("family", f"{found.family} ({found.kind if found.kind != UNKNOWN else near})"),
        *((name.replace("_", " "), _plain(value)) for name, value in found.architecture.items() if value is not None),
        ("trained depth", found.trained_depth),
        ("KV rule", found.kv_rule),
        ("parameters", "" if found.parameters is None else f"{found.parameters:,}"),
        ("files", ", ".join(found.files)),
        ("tensors", f"{found.tensors}, {found.bytes:,} bytes"),
        ("types", ", ".join(f"{count} {name}" for name, count in found.dtypes.items())),
        ("tokenizer", found.tokenizer or "none"),
        ("tied", "\n".join(f"{' = '.join(tie['names'])} (by {tie['by']})" for tie in found.ties) or "none"),
        ("missing", "\n".join(found.missing) or nothing),
        ("unexpected", "\n".join(found.unexpected) or nothing),
        ("of wrong shape", "\n".join(found.misshapen) or nothing),
        ("not finite", "\n".join(f"{name}: {count:,}" for name, count in found.non_finite.items()) or "none"),
        ("notes", "\n".join(found.notes)),
        ("would open", "yes" if found.loads else f"no\n{problems}"),
    ):
        if value:
            table.add_row(label, Text(value))
    console.print(Text(found.path, style="bold"), table)


def _plain(value: Any) -> str:
    """A fact of the architecture in words: yes, or "high 32, low 32", or "0 1 | 2 3" for the layers of two blocks."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} {width}" for name, width in value.items())
    if isinstance(value, list):
        return " | ".join(" ".join(map(str, block)) for block in value)
    return str(value)
