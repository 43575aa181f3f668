"""`looplab study NAME`: reruns a published claim set at a chosen scale, with a word for every claim."""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from looplab._registry import did_you_mean
from looplab.audit.result import RESULTS
from looplab.audit.self_tests import NonFiniteError, SelfTestError
from looplab.cli import exit_codes
from looplab.cli.audit import Repeated, named_paths
from looplab.cli.exit_codes import UserError, user_error
from looplab.data.documents import DataError
from looplab.executors import WorkerDied, executor
from looplab.records import Claim, StudyResult
from looplab.report.study import PAGE
from looplab.studies.base import SMOKE, STUDIES, Study
from looplab.studies.choice import Choice
from looplab.studies.claims import one_seed
from looplab.studies.forecast import forecaster, missing
from looplab.studies.matching import StudyError
from looplab.studies.predictions import digest, predictions_text
from looplab.studies.rows import RowsError
from looplab.studies.rules import MIN_SEEDS
from looplab.studies.run import TUNING_SEED, command, few_seeds, predict, run_study, study_arms, study_folder
from looplab.training.checkpoint import CheckpointError
from looplab.training.folder import FolderError

EVERY = "all"
EPILOGUE = """
A study is a set of claims with their rules, and the arms that decide them. Its predictions are written and hashed
before the first arm runs; afterwards every claim has one of four words: supported, not supported, undecided, not
identifiable at this scale. What was not run has no word: `-`, and why. A missed prediction is a result.

Scales: smoke takes seconds and shows that the study works, nothing else; cpu is sized for two cores.

OUT/STUDY/SCALE holds report.html, results.json, tables.tex, figures/, predictions.json, the audits with their own
reports, and times in ledger.json. Training runs lie in OUT/runs and are shared. The same command goes on where it was
killed, and does what --arms, --claims or --minutes left out. `looplab claims OUT` merges all studies.

Examples:
  looplab study --list                            all studies, with claims and minutes
  looplab study par --explain 8a                  one claim: its words, rule and guard, and what would settle it
  looplab study dcp --scale smoke --out studies   about a minute
  looplab study dcp --scale cpu --out studies     the audit of all built-in checkpoints
  looplab study dcp --model mine=runs/mine/model  and of a model of yours
  looplab study depth_schedule --scale cpu --seeds 3 --predict-only --out studies
  looplab study par --scale cpu --dry-run         what is missing, and what it will take
  looplab study par --scale cpu --minutes 30      as much as fits into half an hour
  looplab study all --scale smoke                 every study, in seconds each
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Rerun a published claim set at a chosen scale."""

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")] = ""
    """A study (see `looplab study --list`), or "all"."""
    scale: Literal["smoke", "cpu", "gpu"] = "cpu"
    """Size of the arms."""
    seeds: str = ""
    """Number of training seeds, 0 to N - 1, or the seeds themselves with commas: "3" is "0,1,2", and "3," is seed 3
    alone. Default: what the scale asks for; 3 are needed to decide a recipe."""
    arms: str = ""
    """Run these arms only, named with commas; what is finished of the others counts."""
    claims: str = ""
    """Run what these claims need only: "1,3"."""
    full: tyro.conf.FlagCreatePairsOff[bool] = False
    """Run all arms, not only those that decide the claims; in a folder of its own, OUT/STUDY/SCALE-full."""
    minutes: float | None = None
    """Begin no arm that is predicted to end later than so many minutes from now."""
    executor: Literal["local", "ray"] = "local"
    """Where arms run: processes of this machine, or a Ray cluster whose machines all see OUT."""
    workers: str = "1"
    """Arms that run at once, in processes of one thread each; "auto": as many as there are CPUs."""
    model: Repeated = ()
    """NAME=PATH: a model of yours, where the study can use one."""
    data: Repeated = ()
    """NAME=PATH: a text of yours, where the study can use one."""
    out: Path = Path("study-out")
    """Folder of studies."""
    fresh: tyro.conf.FlagCreatePairsOff[bool] = False
    """Start the study over; training runs are kept."""
    predict_only: tyro.conf.FlagCreatePairsOff[bool] = False
    """Write and hash the predictions, and stop."""
    dry_run: tyro.conf.FlagCreatePairsOff[bool] = False
    """Say what is finished and what the rest will take, from two seconds of real steps; write nothing."""
    explain: str = ""
    """Say everything about one claim, and stop."""
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
    _check(options)
    if options.name == EVERY:
        return _all(options)
    study = _study(options)
    if options.explain:
        print(explanation(study, _claim(study, options.explain), _stored(options, study)))
        return exit_codes.DONE
    return _one(study, options, None if options.minutes is None else time.monotonic() + 60 * options.minutes)


def study_lines() -> list[str]:
    """One line per study: name, claims, minutes at scale cpu, question."""
    found = [STUDIES[name]() for name in STUDIES]
    return [
        f"{study.name:<20}{len(study.claims):>2} claims  about {study.minutes:>3} min at cpu  {study.question}"
        for study in found
    ]


def explanation(study: Study, claim: Claim, result: StudyResult | None) -> str:
    """Claim, words of the source, rule, guard, published figures, what would settle it, and what it came to."""
    lines = [f"{claim.id}  {claim.statement}", ""]
    words = {"published": "published", "ours": "a prediction of ours", "question": "an open question"}
    told = [("origin", words[claim.origin]), ("source", f"“{claim.quote}”" if claim.quote else "")]
    told += [("rule", claim.rule), ("unit", claim.unit), ("guard", claim.guard)]
    told += [("needs", f"{', '.join(n.arms)}: {n.quantity} >= {n.at_least:g}, else {n.reason}") for n in claim.needs]
    told += [("looks at", f"{part.label}: {part.decides}") for part in claim.parts]
    told += [("published", f"{each.figure} ({each.source})") for each in claim.published]
    told += [("contradicted", f"{each.figure} ({each.source})") for each in claim.contradicted_by]
    told += [("settled by", _settled(study, claim))]
    found = [each for each in result.claims if each.claim.id == claim.id] if result else []
    told += [("came to", f"{r.word} ({result.scale}) {r.reason}".strip()) for r in found if result]
    return "\n".join(lines + [f"{name:<14}{text}" for name, text in told if text])


def _settled(study: Study, claim: Claim) -> str:
    """What would decide a claim."""
    if claim.withheld:
        return f"not here: {claim.withheld}"
    parts = "one part" if claim.some else "every part"
    if claim.scope == "checkpoint" or all(one_seed(part) for part in claim.parts):
        return f"intervals of {parts} on the claimed side; no training seeds are needed"
    return (
        f"{MIN_SEEDS} seeds or more whose interval, over seeds and documents or items, lies on the claimed side in "
        f"{parts}; where a threshold stays inside, the result says how many seeds would do"
    )


def _all(options: Options) -> int:
    """Every study, quick ones first."""
    alone: dict[str, object] = {
        "--arms": options.arms,
        "--claims": options.claims,
        "--explain": options.explain,
        "--seeds": options.seeds,
    }
    alone |= {"--model": options.model, "--data": options.data}
    for option, value in alone.items():
        if value:
            raise UserError(f"study: {option} must be left out with `all`. Name one study.", exit_codes.USAGE)
    deadline = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    for study in sorted((STUDIES[name]() for name in STUDIES), key=lambda study: study.minutes):
        if not (options.full and not study.further(options.scale, 1)):
            _one(study, options, deadline)
    return exit_codes.DONE


def _one(study: Study, options: Options, deadline: float | None) -> int:
    """One study; `deadline` is of the monotonic clock."""
    if options.full and not study.further(options.scale, 1):
        raise UserError(f"study: {study.name} has no further arms, so --full must be left out.", exit_codes.USAGE)
    seeds = _seeds(study, options)
    again = command(study, options.scale, seeds, full=options.full) + f" --out {options.out}"
    with (
        user_error(exit_codes.BUSY, (FolderError,)),
        user_error(exit_codes.DATA, (DataError, CheckpointError, NonFiniteError, RowsError, StudyError)),
        user_error(exit_codes.SELF_TEST, (SelfTestError,)),
    ):
        choice = _choice(study, options, seeds, deadline)
        if options.dry_run:
            print("\n".join(_dry(study, options, seeds)))
            return exit_codes.DONE
        notice = few_seeds(study, seeds)
        if notice and options.scale != SMOKE:
            print(notice, file=sys.stderr)
        if options.predict_only:
            found = predict(study, options.scale, seeds, options.out, full=options.full, fresh=options.fresh)
            print(f"predictions.json  SHA-256 {found}")
            return exit_codes.DONE
        say: Callable[[str], None] = _silent if options.quiet else _say
        try:
            result = run_study(
                study,
                options.scale,
                seeds,
                options.out,
                full=options.full,
                choice=choice,
                place=options.executor,
                workers=_workers(options),
                fresh=options.fresh,
                say=say,
                seconds=forecaster(study, study_arms(study, options.scale, seeds, full=options.full)),
            )
        except WorkerDied as error:
            raise UserError(
                f"study: {error}\nFinished arms are safe. Go on with: {again}", exit_codes.UNEXPECTED
            ) from error
        except (KeyboardInterrupt, OSError):
            print(f"The same command goes on with what is missing.\nGo on with: {again}", file=sys.stderr)
            raise
    print(result)
    print(f"\nReport: {study_folder(options.out, study, options.scale, full=options.full) / PAGE}")
    refused = [arm for arm in result.arms if "refused" in arm.facts]
    return exit_codes.MODEL if refused and len(refused) == len(result.arms) else exit_codes.DONE


def _dry(study: Study, options: Options, seeds: tuple[int, ...]) -> list[str]:
    """What is missing and what it will take."""
    arms = study_arms(study, options.scale, seeds, full=options.full)
    folder = study_folder(options.out, study, options.scale, full=options.full)
    predictions = digest(predictions_text(study, options.scale, seeds, arms))
    left = missing(study, arms, folder, options.out, predictions)
    jobs, workers = sum(each.jobs for each in left), _workers(options)
    lines = [f"{study.name}, scale {options.scale}: {len(arms)} jobs, {len(arms) - jobs} done, {jobs} missing"]
    lines += [f"predictions {predictions}"]
    if left:
        lines += [f"{'arm':<24}{'jobs':>5}{'trained':>8}{'applications':>14}{'FLOPs':>11}{'memory':>10}{'minutes':>9}"]
    for each in left:
        counts = f"{each.applications:>14.3g}{each.flops:>11.3g}" if each.memory else f"{'-':>14}{'-':>11}"
        row = f"{each.name:<24}{each.jobs:>5}{each.trained:>8}{counts}{each.memory or '-':>10}"
        lines.append(f"{row}{each.seconds / 60:>9.1f}")
    minutes = sum(each.seconds for each in left) / 60
    flops = sum(each.flops for each in left)
    told = "1 worker" if workers == 1 else f"{workers} workers"
    lines.append(
        f"all: {flops:.3g} FLOPs, about {minutes / min(workers, max(1, jobs)):.0f} minutes on {told}; the study says "
        f"{study.minutes} on two cores. Audits and grids count where another seed is finished."
    )
    return lines


def _check(options: Options) -> None:
    if options.scale == "gpu" and not torch.cuda.is_available():
        raise UserError("study: scale gpu needs a CUDA device. Found cpu. Use --scale cpu.", exit_codes.USAGE)
    if options.minutes is not None and not options.minutes > 0:
        raise UserError(f"study: --minutes must be above 0. Got {options.minutes:g}.", exit_codes.USAGE)
    with user_error(exit_codes.USAGE, (ImportError,)):
        executor(options.executor, workers=_workers(options))  # refuses what is not installed


def _study(options: Options) -> Study:
    name = options.name
    if name not in STUDIES:
        hint = did_you_mean(name, [*STUDIES, EVERY])
        raise UserError(f"study: no study {name!r}.{hint} See: looplab study --list", exit_codes.USAGE)
    study = STUDIES[name]()
    if options.scale not in study.scales:
        known = ", ".join(study.scales)
        raise UserError(f"study: {name} has scales {known}. Got {options.scale}. Choose one.", exit_codes.USAGE)
    for option, given in (("--model", options.model), ("--data", options.data)):
        if given and option not in study.takes:
            raise UserError(f"study: {name} cannot use {option}, so it must be left out.", exit_codes.USAGE)
    if options.model or options.data:
        with user_error(exit_codes.USAGE, (ValueError,)):
            return study.with_given(named_paths("--model", options.model), named_paths("--data", options.data))
    return study


def _claim(study: Study, number: str) -> Claim:
    known = {claim.id.partition(".")[2]: claim for claim in study.claims}
    asked = number.removeprefix(f"{study.name}.")
    if asked not in known:
        hint = did_you_mean(asked, known)
        raise UserError(
            f"study: {study.name} has no claim {number!r}.{hint} Claims: {', '.join(known)}.", exit_codes.USAGE
        )
    return known[asked]


def _choice(study: Study, options: Options, seeds: tuple[int, ...], deadline: float | None) -> Choice:
    arms: tuple[str, ...] | None = None
    if options.arms:
        known = dict.fromkeys(arm.name for arm in study_arms(study, options.scale, seeds, full=options.full))
        arms = tuple(options.arms.split(","))
        for name in arms:
            if name not in known:
                raise UserError(
                    f"study: {study.name} has no arm {name!r}.{did_you_mean(name, known)} Arms: {', '.join(known)}.",
                    exit_codes.USAGE,
                )
    claims = tuple(_claim(study, number).id for number in options.claims.split(",")) if options.claims else None
    minutes = None if deadline is None else max(0.0, deadline - time.monotonic()) / 60
    return Choice(arms=arms, claims=claims, minutes=minutes)


def _seeds(study: Study, options: Options) -> tuple[int, ...]:
    text = options.seeds
    if not study.seeds:
        if text:
            raise UserError(f"study: {study.name} trains nothing, so --seeds must be left out.", exit_codes.USAGE)
        return ()
    if not text:
        return tuple(range(study.seeds[options.scale]))
    pieces = [piece.strip() for piece in text.removesuffix(",").split(",")]
    numbers = [int(piece) for piece in pieces if piece.isdecimal()]
    seeds = numbers if "," in text else [*range(min(numbers[0], TUNING_SEED + 1))] if numbers else []
    if len(numbers) < len(pieces) or not seeds or len(set(seeds)) < len(seeds) or max(seeds) >= TUNING_SEED:
        raise UserError(
            f"study: seeds must be different whole numbers, {TUNING_SEED} is kept for tuning. Got {text}.",
            exit_codes.USAGE,
        )
    return tuple(sorted(seeds))


def _workers(options: Options) -> int:
    if options.workers == "auto":
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not options.workers.isdecimal() or int(options.workers) < 1:
        raise UserError(f"study: --workers must be at least 1, or auto. Got {options.workers}.", exit_codes.USAGE)
    return int(options.workers)


def _stored(options: Options, study: Study) -> StudyResult | None:
    path = study_folder(options.out, study, options.scale, full=options.full) / RESULTS
    if not path.exists():
        return None
    with user_error(exit_codes.DATA, (ValueError, KeyError, TypeError, json.JSONDecodeError)):
        return StudyResult.from_json(path.read_text())


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _silent(line: str) -> None:
    pass
