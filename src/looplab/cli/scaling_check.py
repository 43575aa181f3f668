"""`looplab scaling check RUNS ...`: what a table of runs is good for, and what is wrong with it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from looplab.cli import exit_codes
from looplab.cli.exit_codes import UserError, user_error
from looplab.scaling import Runs, RunsError, read_runs

Repeated = tyro.conf.UseAppendAction[tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class Table:
    """How runs are read; every action that takes runs has these options."""

    runs: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUNS [RUNS ...]")]
    """Files (.jsonl, .json, .csv, .parquet) or globs of finished runs, such as record.json of a run and table.csv of a
    sweep; or synthetic_truncation."""
    columns: Repeated = ()
    """THEIRS=OURS name of a column; may be given several times."""
    only: Repeated = ()
    """COLUMN=VALUE that rows must have; may be given several times."""
    loss_unit: Literal["nats", "bits", "ppl"] = "nats"
    """Unit of the column loss."""

    def read(self, *, test_time: bool = False) -> Runs:
        """The checked runs."""
        if not self.runs:
            raise UserError("RUNS must name files with finished runs. Got none. Name one.", exit_codes.USAGE)
        columns, only = assigned("--columns", self.columns), assigned("--only", self.only)
        with user_error(exit_codes.DATA, (RunsError, OSError)):
            return read_runs(*self.runs, columns=columns, only=only, loss_unit=self.loss_unit, test_time=test_time)


@dataclass(frozen=True, kw_only=True)
class Options(Table):
    """Say what a table of runs is good for: its design, its noise, and every check that fails.

    Ends with 4 if the table cannot be fitted.
    """

    test_time: tyro.conf.FlagCreatePairsOff[bool] = False
    """Keep runs that were evaluated at another depth than they were trained at."""


def main(argv: Sequence[str]) -> int:
    """Runs the action and returns its exit code."""
    options = tyro.cli(Options, args=list(argv), prog="looplab scaling check")
    runs = options.read(test_time=options.test_time)
    print(runs)
    return exit_codes.DATA if runs.refused else exit_codes.DONE


def assigned(flag: str, pairs: Sequence[str]) -> Mapping[str, str]:
    """NAME=VALUE words as a mapping."""
    for pair in pairs:
        name, equal, _ = pair.partition("=")
        if not (name and equal):
            raise UserError(f"{flag} must be NAME=VALUE. Got {pair!r}. Put an equals sign between.", exit_codes.USAGE)
    return dict(pair.split("=", 1) for pair in pairs)
