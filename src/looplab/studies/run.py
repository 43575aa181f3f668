"""A whole study in one folder: predictions first, arms one after another, the words last.

    DIR/runs/<hash>/                 training runs, shared by all studies in DIR
    DIR/grids/<hash>-<hash>/         graded answers of a model, shared too
    DIR/<study>/<scale>[-full]/
        predictions.json             written and hashed before the first arm
        audits/<arm>/                each audit with its own report
        ledger.json                  times and exact counts, arm by arm
        report.html  tables.tex  figures/  results.json

Arms run one after another, or on several workers of one thread each, with the same results.

Killed at any moment, the same call goes on: finished audits and runs are kept, a run that was cut short goes on from
its newest checkpoint to the same bits. Equal inputs give an equal results.json; times are in ledger.json alone.
"""

import datetime
import fcntl
import json
import platform
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

import looplab
from looplab._config import config_hash
from looplab.audit.result import RESULTS
from looplab.executors import executor
from looplab.records import Matched, StudyArm, StudyResult, StudyRow, dump_json, write_atomic
from looplab.report.study import write_study
from looplab.studies import arms as work
from looplab.studies.arms import LEDGER, Say
from looplab.studies.base import EQUAL, SMOKE, Arm, Study
from looplab.studies.claims import DIVERGED, decide_claims
from looplab.studies.predictions import FILE, digest, predictions_text, register
from looplab.training.config import RunConfig
from looplab.training.divergence import DivergedError
from looplab.training.folder import CONFIG, FolderError

AUDITS, GRIDS, RUNS, LOCK = "audits", "grids", "runs", ".lock"
OWN = (FILE, RESULTS, LEDGER, "report.html", "tables.tex", "figures", AUDITS)
"""Everything a study writes into its folder; `fresh` removes these and nothing else."""
SMOKE_NOTE = "Scale smoke: a run of seconds that shows that the study works. Nothing is shown about any model."


def study_folder(out: Path, study: Study, scale: str, *, full: bool = False) -> Path:
    """Where a study at a scale writes; with all arms it is another study."""
    return out / study.name / (f"{scale}-full" if full else scale)


def study_arms(study: Study, scale: str, seeds: int, *, full: bool = False) -> tuple[Arm, ...]:
    """The arms that decide the claims, and with `full` all others."""
    return study.arms(scale, seeds) + (study.further(scale, seeds) if full else ())


def predict(study: Study, scale: str, seeds: int, out: Path, *, full: bool = False, fresh: bool = False) -> str:
    """Writes predictions.json alone and returns its SHA-256.

    Raises:
        FolderError: As for `run_study`.
    """
    with _claimed(study_folder(out, study, scale, full=full), out, fresh) as folder:
        text = predictions_text(study, scale, seeds, study_arms(study, scale, seeds, full=full))
        _register(folder, text)
        return digest(text)


def run_study(
    study: Study,
    scale: str,
    seeds: int,
    out: Path,
    *,
    full: bool = False,
    workers: int = 1,
    fresh: bool = False,
    say: Say,
) -> StudyResult:
    """Runs what is missing of a study and writes its page.

    Args:
        seeds: Training seeds 0 .. seeds - 1; 0 for a study that trains nothing.
        out: Folder of studies.
        full: Run all arms instead of those that decide the claims.
        workers: Arms that run at once, in processes of one thread each.
        fresh: Remove what is in the study's folder first; training runs are kept.
        say: Receives lines of progress; with several workers it is sent to them, so it must be a plain function.

    Raises:
        FolderError: The folder is in use, or holds other predictions or something else.
        DataError: This Python ships without the text of the built-in corpus.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # equal bits need an equal number
    try:
        with _claimed(study_folder(out, study, scale, full=full), out, fresh) as folder:
            return _run(study, scale, seeds, out, folder, full, workers, say)
    finally:
        torch.set_num_threads(threads)


class _Job(NamedTuple):
    """What all arms of a study have in common."""

    study: Study
    out: Path
    folder: Path
    say: Say
    number: int


class _Finished(NamedTuple):
    arm: StudyArm
    rows: tuple[StudyRow, ...]
    times: dict[str, Any]


def _run(
    study: Study, scale: str, seeds: int, out: Path, folder: Path, full: bool, workers: int, say: Say
) -> StudyResult:
    arms = study_arms(study, scale, seeds, full=full)
    text = predictions_text(study, scale, seeds, arms)
    _register(folder, text)
    say(f"{study.name}, scale {scale}, {len(arms)} arms; predictions {digest(text)}")
    job = _Job(study, out, folder, say, len(arms))
    done: dict[int, _Finished] = {}
    with executor("local", workers=workers, threads=1) as pool:
        for index, finished in pool.run(_arm, list(enumerate(arms)), shared=job, describe=_described):
            done[index] = finished
            _enter(folder, arms[index].folder, finished.times)
    result = _result(study, scale, seeds, digest(text), [done[i] for i in range(len(arms))], full)
    write_study(result, folder)
    write_atomic(folder / RESULTS, dump_json(result))
    return result


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
    except DivergedError as error:
        job.say(f"{place} diverged: {error}")
        facts = {"config": config_hash(arm.source), DIVERGED: str(error)}
        lost = StudyArm(name=arm.name, title=arm.title, seed=arm.seed, audit="", sentence="", facts=facts)
        finished = _Finished(lost, _no_rows(job.study, arm), {})
    finished.times["this_call_seconds"] = time.perf_counter() - began
    job.say(f"{place} done in {finished.times['this_call_seconds']:.1f} s")
    return finished


def _no_rows(study: Study, arm: Arm) -> tuple[StudyRow, ...]:
    """What the claims ask of an arm, without numbers."""
    asked = dict.fromkeys(part.quantity for claim in study.claims for part in claim.parts if arm.name in part.arms)
    return tuple(
        StudyRow(arm=arm.name, seed=arm.seed, quantity=quantity, unit="fact", value=None, reason=DIVERGED)
        for quantity in asked
    )


def _measured(job: _Job, arm: Arm) -> _Finished:
    def say(line: str) -> None:
        job.say(f"  {arm.folder} {line.strip()}")

    facts: dict[str, str] = {}
    times: dict[str, Any] = {"train_seconds": 0.0}
    rows: list[StudyRow] = []
    audit, sentence = "", ""
    model: str | Path
    if isinstance(arm.source, RunConfig):
        model, record = work.train_arm(arm.source, job.out / RUNS, say)
        times["train_seconds"] = record.seconds
        facts |= work.training_facts(arm.source, record)
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
    finished = StudyArm(name=arm.name, title=arm.title, seed=arm.seed, audit=audit, sentence=sentence, facts=facts)
    return _Finished(finished, tuple(rows), times)


def _times(name: str, folder: Path) -> dict[str, Any]:
    counts = json.loads((folder / LEDGER).read_text())
    return {f"{name}_seconds": counts["seconds"], f"{name}_counts": counts["counts"]}


def _result(
    study: Study, scale: str, seeds: int, predictions: str, done: Sequence[_Finished], full: bool
) -> StudyResult:
    arms, rows = tuple(each.arm for each in done), tuple(row for each in done for row in each.rows)
    matched = matches(arms, study.equal)
    further = " --full" if full else ""
    seeded = f" --seeds {seeds}" if study.seeds else ""
    return StudyResult(
        study=study.name,
        version=study.version,
        scale=scale,
        question=study.question,
        references=study.references,
        predictions=predictions,
        arms=arms,
        rows=rows,
        claims=decide_claims(study.claims, rows, scale=scale, matched=matched),
        matched=matched,
        columns=study.columns,
        plots=study.plots,
        notes=(*((SMOKE_NOTE,) if scale == SMOKE else ()), *study.notes),
        versions={"looplab": looplab.__version__, "python": platform.python_version(), "torch": torch.__version__},
        command=f"looplab study {study.name} --scale {scale}{seeded}{further}",
    )


def matches(arms: Sequence[StudyArm], equal: Sequence[str] = EQUAL) -> tuple[Matched, ...]:
    """Whether the trained arms of each seed share what they must; nothing where no arm was trained."""
    trained = [arm for arm in arms if arm.seed is not None and DIVERGED not in arm.facts]
    found = []
    for name in equal if trained else ():
        by_seed: dict[int | None, set[str]] = {}
        for arm in trained:
            by_seed.setdefault(arm.seed, set()).add(arm.facts[name])
        shared = all(len(values) == 1 for values in by_seed.values())
        found.append(Matched(name=name, equal=shared, values={arm.label: arm.facts[name] for arm in trained}))
    return tuple(found)


def _register(folder: Path, text: str) -> None:
    if register(folder, text):
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        write_atomic(folder / LEDGER, dump_json({"predictions_written": now, "hardware": _hardware(), "arms": {}}))


def _enter(folder: Path, arm: str, facts: dict[str, Any]) -> None:
    """Puts an arm's times into ledger.json."""
    ledger = json.loads((folder / LEDGER).read_text())
    ledger["arms"][arm] = facts
    write_atomic(folder / LEDGER, dump_json(ledger))


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
