"""`looplab claims [DIR ..]`: the claims of all studies in one table."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from looplab.cli import exit_codes
from looplab.cli.exit_codes import UserError, user_error
from looplab.report.claims import FORMATS, NO_WORD, ClaimsError, merge

EPILOGUE = """
Reads every results.json that `looplab study` wrote in or below the folders; opens no model. The newest run of a claim
at a scale counts, older ones are listed. A word holds for its scale and recipe alone; what was not run has no word.

Examples:
  looplab claims                                   studies in study-out
  looplab claims docs/results --format md          the page of committed results
  looplab claims study-out --scale cpu --check     exit code 6 while a claim has no word
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Merge the claims of all studies into one table."""

    folders: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="[DIR ...]")] = ()
    """Folders of studies. Default: study-out."""
    scale: Literal["smoke", "cpu", "gpu"] | None = None
    """Only results of this scale."""
    format: Literal["table", "json", "md", "tex"] = "table"
    """table: for a terminal; json: everything; md: the page; tex: for a paper."""
    check: tyro.conf.FlagCreatePairsOff[bool] = False
    """End with 6 while a claim has no word."""


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    options = tyro.cli(Options, args=[*argv], prog="looplab claims", description=EPILOGUE.strip())
    folders = options.folders or (Path("study-out"),)
    with user_error(exit_codes.DATA, (ClaimsError,)):
        merged = merge(folders, options.scale)
    if not merged.rows:
        raise UserError(f"claims: no study has results at scale {options.scale}. Leave --scale out.", exit_codes.DATA)
    sys.stdout.write(FORMATS[options.format](merged))
    return exit_codes.FINDING if options.check and any(row.word == NO_WORD for row in merged.rows) else exit_codes.DONE
