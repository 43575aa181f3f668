"""`looplab study NAME`: reruns a published claim set at a chosen scale, with a word for every claim."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from looplab._registry import did_you_mean
from looplab.audit.self_tests import NonFiniteError, SelfTestError
from looplab.cli import exit_codes
from looplab.cli.exit_codes import UserError, user_error
from looplab.data.documents import DataError
from looplab.report.study import PAGE
from looplab.studies.base import STUDIES, Study
from looplab.studies.run import predict, run_study, study_folder
from looplab.training.checkpoint import CheckpointError
from looplab.training.folder import FolderError

EPILOGUE = """
A study is a set of claims with their rules, and the arms that decide them. Its predictions are written and hashed
before the first arm runs; afterwards every claim has one of four words: supported, not supported, undecided, not
identifiable at this scale. A missed prediction is a result.

Scales: smoke takes seconds and shows that the study works, nothing else; cpu is sized for two cores.

OUT/STUDY/SCALE holds report.html, results.json, tables.tex, figures/, predictions.json, the audits with their own
reports, and times in ledger.json. Training runs lie in OUT/runs and are shared. The same command goes on where it was
killed.

Examples:
  looplab study --list                            all studies, with claims and minutes
  looplab study dcp --scale smoke --out studies   about a minute
  looplab study dcp --scale cpu --out studies     the audit of all built-in checkpoints
  looplab study depth_schedule --scale cpu --seeds 3 --predict-only --out studies
  looplab study par --scale cpu --workers 2       two arms at a time
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Rerun a published claim set at a chosen scale."""

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")] = ""
    """A study (see `looplab study --list`)."""
    scale: Literal["smoke", "cpu"] = "cpu"
    """Size of the arms."""
    seeds: int | None = None
    """Number of training seeds, 0 to N - 1. Default: what the scale asks for; 3 are needed to decide a recipe."""
    out: Path = Path("study-out")
    """Folder of studies."""
    full: tyro.conf.FlagCreatePairsOff[bool] = False
    """Run all arms, not only those that decide the claims; in a folder of its own, OUT/STUDY/SCALE-full."""
    workers: int = 1
    """Arms that run at once, in processes of one thread each."""
    fresh: tyro.conf.FlagCreatePairsOff[bool] = False
    """Start the study over; training runs are kept."""
    predict_only: tyro.conf.FlagCreatePairsOff[bool] = False
    """Write and hash the predictions, and stop."""
    list: tyro.conf.FlagCreatePairsOff[bool] = False
    """Name every study and stop."""
    quiet: tyro.conf.FlagCreatePairsOff[bool] = False
    """Say nothing until the end."""


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    if not argv:
        argv = ["--help"]
    options = tyro.cli(Options, args=[*argv], prog="looplab study", description=EPILOGUE.strip())
    if options.list:
        print("\n".join(study_lines()))
        return exit_codes.DONE
    study = _study(options.name)
    if options.full and not study.further(options.scale, 1):
        raise UserError(f"study: {study.name} has no further arms, so --full must be left out.", exit_codes.USAGE)
    if options.workers < 1:
        raise UserError(f"study: --workers must be at least 1. Got {options.workers}.", exit_codes.USAGE)
    seeds = _seeds(study, options)
    with (
        user_error(exit_codes.BUSY, (FolderError,)),
        user_error(exit_codes.DATA, (DataError, CheckpointError, NonFiniteError)),
        user_error(exit_codes.SELF_TEST, (SelfTestError,)),
    ):
        if options.predict_only:
            digest = predict(study, options.scale, seeds, options.out, full=options.full, fresh=options.fresh)
            print(f"predictions.json  SHA-256 {digest}")
            return exit_codes.DONE
        say = _silent if options.quiet else _say
        try:
            result = run_study(
                study,
                options.scale,
                seeds,
                options.out,
                full=options.full,
                workers=options.workers,
                fresh=options.fresh,
                say=say,
            )
        except KeyboardInterrupt:
            print("The same command goes on with what is missing.", file=sys.stderr)
            raise
    print(result)
    print(f"\nReport: {study_folder(options.out, study, options.scale, full=options.full) / PAGE}")
    return exit_codes.DONE


def study_lines() -> list[str]:
    """One line per study: name, claims, minutes at scale cpu, question."""
    found = [STUDIES[name]() for name in STUDIES]
    return [
        f"{study.name:<18}{len(study.claims):>2} claims  about {study.minutes:>3} min at cpu  {study.question}"
        for study in found
    ]


def _study(name: str) -> Study:
    if name not in STUDIES:
        hint = did_you_mean(name, list(STUDIES))
        raise UserError(f"study: no study {name!r}.{hint} See: looplab study --list", exit_codes.USAGE)
    return STUDIES[name]()


def _seeds(study: Study, options: Options) -> int:
    if not study.seeds:
        if options.seeds is not None:
            raise UserError(f"study: {study.name} trains nothing, so --seeds must be left out.", exit_codes.USAGE)
        return 0
    number = study.seeds[options.scale] if options.seeds is None else options.seeds
    if not 1 <= number <= 1000:
        raise UserError(f"study: --seeds must be from 1 to 1000. Got {number}.", exit_codes.USAGE)
    return number


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _silent(line: str) -> None:
    pass
