"""`looplab scaling fit RUNS ...`: a law with intervals, compared with others, in one folder."""

import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import tyro

from looplab.cli import exit_codes
from looplab.cli.exit_codes import UserError, user_error
from looplab.cli.scaling_check import Repeated, Table, assigned
from looplab.records import Level, dump_json, write_atomic
from looplab.scaling import Fit, FitRefused, Runs, compare, fit
from looplab.scaling.laws import (
    Additive,
    Chinchilla,
    Decay,
    ForwardBackward,
    Gain,
    IsoDepth,
    Law,
    Ouro,
    Parcae,
    Power,
    Tilt,
)
from looplab.scaling.laws import Table as TableGain

GAINS: dict[str, Gain] = {
    "power": Power(),
    "tilt": Tilt(),
    "decay": Decay(),
    "additive": Additive(),
    "table": TableGain(),
}
LAWS: dict[str, Law] = {
    "chinchilla": Chinchilla(),
    "iso-depth": IsoDepth(),
    "parcae": Parcae(),
    "parcae-core": Parcae(count="core"),
    "parcae-test-time": Parcae(test_time=True),
    "ouro": Ouro(),
}
TEST_TIME = ("parcae-test-time", "ouro")
"""Laws of the depth of evaluation."""
FIT, COMPARISON, RESIDUALS, TIMING = "fit.json", "comparison.json", "residuals.parquet", "timing.json"


@dataclass(frozen=True, kw_only=True)
class Options(Table):
    """Fit a scaling law to finished runs.

    Prints estimates with intervals by a bootstrap over cells, how many starts reached the minimum, and what the runs
    cannot tell. Equal runs and options give equal bytes; times go to timing.json.
    """

    law: Literal["forward-backward", "iso-depth", "chinchilla", "parcae", "parcae-core", "parcae-test-time", "ouro"] = (
        "forward-backward"
    )
    """Form of the law."""
    gain: Literal["power", "tilt", "decay", "additive", "table"] = "power"
    """Gain of forward-backward."""
    compare: tyro.conf.FlagCreatePairsOff[bool] = False
    """Compare all gains and Iso-Depth: AICc, held-out budgets and cells."""
    fix: Repeated = ()
    """NAME=VALUE of a parameter that is held; may be given several times."""
    starts: int = 500
    """Starts of the search."""
    replicates: int = 200
    """Bootstrap replicates; 0: none."""
    screen: int = 0
    """Descend only that many starts, the best once projected; 0: all."""
    seed: int = 0
    """Decides starts and draws."""
    out: Path = Path("fit-out")
    """Folder of the fit."""
    fail_on: Literal["none", "warning", "failure"] = "none"
    """End with 6 if there is a finding of this level or above."""
    quiet: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the result and nothing else."""


def main(argv: Sequence[str]) -> int:
    """Runs the action and returns its exit code."""
    options = tyro.cli(Options, args=list(argv), prog="looplab scaling fit")
    if min(options.starts, options.replicates + 1, options.screen + 1) < 1:
        raise UserError("--starts must be 1 or more, --replicates and --screen 0 or more. Raise it.", exit_codes.USAGE)
    law = ForwardBackward(gain=GAINS[options.gain]) if options.law == "forward-backward" else LAWS[options.law]
    began = time.perf_counter()
    times: dict[str, float] = {}

    def watch(line: str) -> None:
        times[line.partition(" ")[0]] = time.perf_counter() - began
        if not options.quiet:
            print(f"{line}  {time.perf_counter() - began:.1f} s", file=sys.stderr)

    runs = options.read(test_time=options.law in TEST_TIME)
    watch(f"check {runs.design()}")
    with user_error(exit_codes.DATA, (FitRefused, KeyError)):
        found = fit(
            runs,
            law,
            starts=options.starts,
            replicates=options.replicates,
            screen=options.screen,
            seed=options.seed,
            fixed=_numbers(options.fix),
            watch=watch,
        )
        rivals = [ForwardBackward(gain=gain) for gain in GAINS.values()]
        laws = [*rivals, IsoDepth()] if options.compare else []
        table = compare(runs, laws, starts=options.starts, seed=options.seed, watch=watch) if laws else None
    options.out.mkdir(parents=True, exist_ok=True)
    write_atomic(options.out / FIT, dump_json(found.to_dict()))
    if table is not None:
        write_atomic(options.out / COMPARISON, dump_json(table))
    _write_residuals(runs, found, options.out / RESIDUALS)
    # The page is drawn by a layer that loads PyTorch; the estimates need not wait for it.
    print(found)
    if table is not None:
        print(table)
    from looplab.report.scaling import write_fit

    page = write_fit(found, table, options.out, command=shlex.join(["looplab", "scaling", "fit", *argv]))
    watch("report 1/1")
    write_atomic(options.out / TIMING, dump_json({"seconds": times}))
    print(f"Report: {page}")
    levels = {"none": (), "warning": (Level.WARNING, Level.FAILURE), "failure": (Level.FAILURE,)}[options.fail_on]
    return exit_codes.FINDING if any(f.level in levels for f in found.findings) else exit_codes.DONE


def _numbers(pairs: Sequence[str]) -> dict[str, float]:
    found = {}
    for name, value in assigned("--fix", pairs).items():
        try:
            found[name] = float(value)
        except ValueError as error:
            raise UserError(f"--fix {name} must be a number. Got {value!r}. Give one.", exit_codes.USAGE) from error
    return found


def _write_residuals(runs: Runs, found: Fit, path: Path) -> None:
    """Predicted and actual loss of every run, in nats."""
    predicted = np.exp(found.law.log_loss(found.theta, runs.points()))
    names = ("run_id", "budget", "family", "num_steps", "window", "n_once", "n_rec", "tokens", "loss")
    columns = {name: runs.column(name) for name in names}
    table = pa.table({**columns, "predicted": predicted, "residual": np.array(columns["loss"]) - predicted})
    pyarrow.parquet.write_table(table, path)
