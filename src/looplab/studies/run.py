"""A whole study in one folder: predictions first, then the arms that are missing, the words last.

    DIR/runs/<hash>/                 training runs, shared by all studies in DIR
    DIR/grids/<hash>-<hash>/         graded answers of a model, shared too
    DIR/<study>/<scale>[-full]/
        predictions.json             written and hashed before the first arm
        rows/<arm>.json              what an arm came to (`looplab.studies.rows`); such an arm is not run again
        audits/<arm>/                each audit with its own report
        ledger.json                  times and exact counts, arm by arm
        report.html  tables.tex  figures/  results.json

Arms run one after another, or on several workers of one thread each, with the same results.

Killed at any moment, the same call goes on: finished audits and runs are kept, a run that was cut short goes on from
its newest checkpoint to the same bits. Equal inputs give an equal results.json; times are in ledger.json alone. A call
that runs a part of the arms writes the page of all that are finished; claims on the others have no word but a reason.
"""

import dataclasses
import datetime
import fcntl
import json
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

import looplab
from looplab._config import config_hash
from looplab.audit.result import RESULTS
from looplab.executors import executor
from looplab.records import StudyArm, StudyResult, StudyRow, dump_json, write_atomic
from looplab.report.study import write_study
from looplab.studies import arms as work
from looplab.studies.arms import LEDGER, Say
from looplab.studies.base import SMOKE, Arm, Study
from looplab.studies.choice import ALL, Choice, Tasks
from looplab.studies.claims import DIVERGED, NOT_MEASURED, decide_claims, one_seed
from looplab.studies.matching import check_declared, matches
from looplab.studies.predictions import FILE, digest, predictions_text, register
from looplab.studies.rows import ROWS, code_hash, read_rows, write_rows
from looplab.studies.rules import MIN_SEEDS
from looplab.studies.trained import TrainedRun
from looplab.training.config import RunConfig
from looplab.training.folder import CONFIG, MODEL, FolderError

AUDITS, GRIDS, RUNS, LOCK = "audits", "grids", "runs", ".lock"
OWN = (FILE, RESULTS, LEDGER, "report.html", "tables.tex", "figures", AUDITS, ROWS)
"""Everything a study writes into its folder; `fresh` removes these and nothing else."""
SMOKE_NOTE = "Scale smoke: a run of seconds that shows that the study works. Nothing is shown about any model."
TUNING_SEED = 1000
OVER = 1.5
"""Times its estimate that a study may take before it says so."""


def study_folder(out: Path, study: Study, scale: str, *, full: bool = False) -> Path:
    """Where a study at a scale writes; with all arms it is another study."""
    return out / study.name / (f"{scale}-full" if full else scale)


def study_arms(study: Study, scale: str, seeds: int | Sequence[int], *, full: bool = False) -> tuple[Arm, ...]:
    """The arms that decide the claims, and with `full` all others.

    Args:
        seeds: Number of training seeds, or the seeds.
    Raises:
        StudyError: Arms of a seed differ in more than the study declares.
    """
    asked = as_seeds(seeds)
    number = max(asked, default=-1) + 1
    arms = study.arms(scale, number) + (study.further(scale, number) if full else ())
    chosen = tuple(arm for arm in arms if arm.seed is None or arm.seed in asked or arm.seed >= number)
    check_declared(study, chosen)
    return chosen


def as_seeds(seeds: int | Sequence[int]) -> tuple[int, ...]:
    """The seeds; a number says how many."""
    return tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)


def predict(
    study: Study, scale: str, seeds: int | Sequence[int], out: Path, *, full: bool = False, fresh: bool = False
) -> str:
    """Writes predictions.json alone and returns its SHA-256.

    Raises:
        FolderError: As for `run_study`.
    """
    with _claimed(study_folder(out, study, scale, full=full), out, fresh) as folder:
        text = predictions_text(study, scale, as_seeds(seeds), study_arms(study, scale, seeds, full=full))
        _register(folder, text)
        return digest(text)


def run_study(
    study: Study,
    scale: str,
    seeds: int | Sequence[int],
    out: Path,
    *,
    full: bool = False,
    choice: Choice = ALL,
    place: str = "local",
    workers: int = 1,
    fresh: bool = False,
    say: Say,
    seconds: Callable[[Arm], float] | None = None,
) -> StudyResult:
    """Runs what is missing of a study and writes its page.

    Args:
        seeds: Number of training seeds, or the seeds; 0 for a study that trains nothing.
        out: Folder of studies; every worker must see it.
        full: Run all arms instead of those that decide the claims.
        choice: The part of the arms to run.
        place: "local" or "ray".
        workers: Arms that run at once, in processes of one thread each.
        fresh: Remove what is in the study's folder first; training runs are kept.
        say: Receives lines of progress; with several workers it is sent to them, so it must be a plain function.
        seconds: Predicts how long an arm takes of which no seed is finished; needed with `choice.minutes`.

    Raises:
        FolderError: The folder is in use, or holds other predictions or something else.
        RowsError: A file of rows was edited.
        StudyError: The study contradicts its own declaration.
        DataError: This Python ships without the text of the built-in corpus.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # equal bits need an equal number
    try:
        with _claimed(study_folder(out, study, scale, full=full), out, fresh) as folder:
            asked = _Asked(study, scale, as_seeds(seeds), full, choice)
            return _run(asked, out, folder, place, workers, say, seconds)
    finally:
        torch.set_num_threads(threads)


class _Asked(NamedTuple):
    """What a call is about."""

    study: Study
    scale: str
    seeds: tuple[int, ...]
    full: bool
    choice: Choice


class _Job(NamedTuple):
    """What all arms of a study have in common."""

    study: Study
    out: Path
    folder: Path
    say: Say
    number: int
    predictions: str


class _Finished(NamedTuple):
    arm: StudyArm
    rows: tuple[StudyRow, ...]
    times: dict[str, Any]


def _run(
    asked: _Asked,
    out: Path,
    folder: Path,
    place: str,
    workers: int,
    say: Say,
    seconds: Callable[[Arm], float] | None,
) -> StudyResult:
    study = asked.study
    arms = study_arms(study, asked.scale, asked.seeds, full=asked.full)
    text = predictions_text(study, asked.scale, asked.seeds, arms)
    _register(folder, text)
    say(f"{study.name}, scale {asked.scale}, {len(arms)} arms; predictions {digest(text)}")
    job = _Job(study, out, folder, say, len(arms), digest(text))
    stored = {i: finished_arm(folder, arm, job.predictions) for i, arm in enumerate(arms)}
    done = {i: _Finished(*found, {}) for i, found in stored.items() if found is not None}
    reasons = {i: asked.choice.reason(study, arm) for i, arm in enumerate(arms) if i not in done}
    left_out = {i: reason for i, reason in reasons.items() if reason}
    tasks = Tasks(arms, [i for i, reason in reasons.items() if not reason], asked.choice, folder / LEDGER, seconds)
    with executor(place, workers=workers, threads=1) as pool:
        for position, finished in pool.run(_arm, tasks, shared=job, describe=_described):
            index = tasks.order[position]
            done[index] = finished
            _enter(folder, arms[index].folder, finished.times)
    left_out |= dict.fromkeys(tasks.postponed, f"{NOT_MEASURED} (--minutes)")
    result = _result(asked, digest(text), [done[i] for i in sorted(done)], _not_run(asked, arms, left_out))
    write_study(result, folder)
    write_atomic(folder / RESULTS, dump_json(result))
    _tell_minutes(study, folder, asked.scale, say)
    return result


def finished_arm(folder: Path, arm: Arm, predictions: str) -> tuple[StudyArm, tuple[StudyRow, ...]] | None:
    """What is stored of an arm, if it was measured by this code and its audit is still there.

    Raises:
        RowsError: The file was edited.
    """
    found = read_rows(folder, arm.folder, predictions)
    if found is None or (found[0].audit and not (folder / found[0].audit / RESULTS).exists()):
        return None
    return found


def _not_run(asked: _Asked, arms: Sequence[Arm], left_out: Mapping[int, str]) -> dict[str, str]:
    """Arm -> why it was not run."""
    found: dict[str, str] = {}
    if not asked.full:
        number = max(asked.seeds, default=-1) + 1
        found = {arm.name: f"{NOT_MEASURED} (--full)" for arm in asked.study.further(asked.scale, number)}
    return found | {arms[i].name: reason for i, reason in left_out.items()}


def _described(task: tuple[int, Arm]) -> str:
    return task[1].folder


def _arm(job: _Job, task: tuple[int, Arm]) -> _Finished:
    """Trains if the arm is a run, then audits and grades it as far as it asks for; a run may diverge."""
    index, arm = task
    place = f"[{index + 1}/{job.number}] {arm.folder}"
    job.say(f"{place}: {arm.title}")
    began = time.perf_counter()
    try:
        finished = _measured(job, arm)
    except (KeyError, ValueError, OSError) as error:
        if not arm.theirs:
            raise
        finished = _refused(job, arm, str(error.args[0] if isinstance(error, KeyError) else error))
    finished.times["this_call_seconds"] = time.perf_counter() - began
    write_rows(job.folder, arm.folder, job.predictions, finished.arm, finished.rows)
    job.say(f"{place} done in {finished.times['this_call_seconds']:.1f} s")
    return finished


def _refused(job: _Job, arm: Arm, why: str) -> _Finished:
    """A model of the user's that cannot be opened or audited."""
    job.say(f"  {arm.folder} refused: {why}")
    facts = {"model": str(arm.source), "refused": why}
    refused = StudyArm(name=arm.name, title=arm.title, seed=arm.seed, audit="", sentence="", facts=facts)
    return _Finished(refused, _empty(job.study, arm, f"refused: {why}"), {})


def _empty(study: Study, arm: Arm, reason: str, known: Sequence[StudyRow] = ()) -> tuple[StudyRow, ...]:
    """What claims ask of an arm and nobody measured, without numbers."""
    cells = [cell for claim in study.claims for part in claim.parts for cell in part.cells]
    asked = dict.fromkeys(quantity for name, quantity in cells if name == arm.name)
    return tuple(
        StudyRow(arm=arm.name, seed=arm.seed, quantity=quantity, unit="fact", value=None, reason=reason)
        for quantity in asked
        if quantity not in {row.quantity for row in known}
    )


def _lost(job: _Job, arm: Arm, run: TrainedRun) -> _Finished:
    """A run that diverged: what the study measures of it, and no number for whatever else claims ask."""
    job.say(f"  {arm.folder} diverged: {run.diverged}")
    rows = job.study.trained(arm, run)
    empty = _empty(job.study, arm, DIVERGED, rows)
    facts = {"config": config_hash(arm.source), DIVERGED: run.diverged}
    lost = StudyArm(name=arm.name, title=arm.title, seed=arm.seed, audit="", sentence="", facts=facts)
    return _Finished(lost, (*rows, *empty), {})


def _measured(job: _Job, arm: Arm) -> _Finished:
    def say(line: str) -> None:
        job.say(f"  {arm.folder} {line.strip()}")

    facts: dict[str, str] = {}
    times: dict[str, Any] = {"train_seconds": 0.0}
    rows: list[StudyRow] = []
    audit, sentence = "", ""
    model: str | Path
    began = time.perf_counter()
    if isinstance(arm.source, RunConfig):
        run = work.train_arm(arm.source, job.out / RUNS, say)
        began = time.perf_counter()
        if run.record is None:
            return _lost(job, arm, run)
        model = run.folder / MODEL
        times["train_seconds"] = run.record.seconds
        facts |= work.training_facts(arm.source, run.record)
        rows += job.study.trained(arm, run)
        for step, audited in arm.earlier:
            before = dataclasses.replace(arm, audit=audited)
            part = job.folder / AUDITS / f"{arm.folder}-step-{step}"
            rows += job.study.measure_earlier(arm, step, work.audit_arm(before, run.folder / f"step_{step}", part, say))
    else:
        model = arm.source
    if arm.audit is not None:
        audit = str(Path(AUDITS) / arm.folder)
        result = work.audit_arm(arm, model, job.folder / audit, say)
        facts |= {"weights": result.model.weight_hash, "audit settings": result.config_hash}
        sentence = result.domains[0].verdict.sentence
        rows += job.study.measure(arm, result)
        times |= _times("audit", job.folder / audit)
    if arm.grid is not None:
        grid, graded = work.grade_arm(arm, model, job.out / GRIDS, say)
        facts |= {"weights": graded.weight_hash, "grid settings": graded.config_hash}
        rows += job.study.grade(arm, graded)
        times |= _times("grid", grid)
    times["measure_seconds"] = time.perf_counter() - began
    finished = StudyArm(name=arm.name, title=arm.title, seed=arm.seed, audit=audit, sentence=sentence, facts=facts)
    return _Finished(finished, tuple(rows), times)


def _times(name: str, folder: Path) -> dict[str, Any]:
    counts = json.loads((folder / LEDGER).read_text())
    return {f"{name}_seconds": counts["seconds"], f"{name}_counts": counts["counts"]}


def _result(asked: _Asked, predictions: str, done: Sequence[_Finished], not_run: Mapping[str, str]) -> StudyResult:
    study, scale = asked.study, asked.scale
    arms, rows = tuple(each.arm for each in done), tuple(row for each in done for row in each.rows)
    rows += study.combined(rows)
    named = dict.fromkeys((*study.equal, *(name for claim in study.claims for name in claim.equal or ())))
    matched = matches(arms, tuple(named))
    return StudyResult(
        study=study.name,
        version=study.version,
        scale=scale,
        question=study.question,
        references=study.references,
        predictions=predictions,
        arms=arms,
        rows=rows,
        claims=decide_claims(study.claims, rows, scale=scale, matched=matched, equal=study.equal, not_run=not_run),
        matched=matched,
        columns=study.columns,
        plots=study.plots,
        notes=(*((SMOKE_NOTE,) if scale == SMOKE else ()), *study.notes),
        versions={"looplab": looplab.__version__, "python": platform.python_version(), "torch": torch.__version__},
        command=command(study, scale, asked.seeds, full=asked.full),
        code=code_hash(),
    )


def command(study: Study, scale: str, seeds: Sequence[int], *, full: bool = False) -> str:
    """The line that runs the whole study again."""
    counted = list(seeds) == list(range(len(seeds)))
    listed = str(len(seeds)) if counted else ",".join(map(str, seeds)) + ("," if len(seeds) == 1 else "")
    seeded = f" --seeds {listed}" if study.seeds else ""
    given = "".join(f" {option} {name}={path}" for option, named in study.given.items() for name, path in named.items())
    return f"looplab study {study.name} --scale {scale}{seeded}{given}{' --full' if full else ''}"


def few_seeds(study: Study, seeds: Sequence[int]) -> str:
    """A notice where claims about recipes have too few seeds to be decided."""
    if not study.seeds or len(seeds) >= MIN_SEEDS:
        return ""
    open_ = [c for c in study.claims if c.scope == "recipe" and any(not one_seed(part) for part in c.parts)]
    said = "1 seed" if len(seeds) == 1 else f"{len(seeds)} seeds"
    return f"{said}: {len(open_)} of {len(study.claims)} claims can only end as undecided ({MIN_SEEDS} needed)"


def _register(folder: Path, text: str) -> None:
    if register(folder, text):
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        write_atomic(folder / LEDGER, dump_json({"predictions_written": now, "hardware": _hardware(), "arms": {}}))


def _enter(folder: Path, arm: str, facts: dict[str, Any]) -> None:
    """Puts an arm's times into ledger.json."""
    ledger = json.loads((folder / LEDGER).read_text())
    ledger["arms"][arm] = {**facts, "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    write_atomic(folder / LEDGER, dump_json(ledger))


def _tell_minutes(study: Study, folder: Path, scale: str, say: Say) -> None:
    """A line where a study at scale cpu took much longer than it declares."""
    arms = json.loads((folder / LEDGER).read_text())["arms"].values()
    took = sum(facts.get("train_seconds", 0.0) + facts.get("measure_seconds", 0.0) for facts in arms) / 60 / 2
    if scale != SMOKE and took > OVER * study.minutes:
        say(f"{study.name} took {took:.0f} minutes of two cores, {study.minutes} were estimated.")


def _hardware() -> str:
    return f"{platform.machine()}, {torch.get_num_threads()} thread, {platform.system()}"


@contextmanager
def _claimed(folder: Path, out: Path, fresh: bool) -> Iterator[Path]:
    """Holds the study's folder, made if missing; the lock ends with the process."""
    for name in (CONFIG, RESULTS, FILE):
        if (out / name).exists():
            raise FolderError(f"{out} holds something else ({name}). Give --out a folder of studies, or a new one.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise FolderError(f"{folder} must be a folder. Got a file in its place. Choose another --out.") from None
    with (folder / LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderError(f"{folder} is in use by another process. Wait or choose another --out.") from None
        if fresh:
            _clear(folder)
        yield folder


def _clear(folder: Path) -> None:
    for name in OWN:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
