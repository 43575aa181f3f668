"""A whole study in one folder: predictions first, arms one after another, the words last.

    DIR/runs/<hash>/                 training runs, shared by all studies in DIR
    DIR/<study>/<scale>/
        predictions.json             written and hashed before the first arm
        audits/<arm>/                each audit with its own report
        ledger.json                  times and exact counts, arm by arm
        report.html  tables.tex  figures/  results.json

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
from typing import Any

import torch

import looplab
from looplab.audit.result import RESULTS, AuditResult
from looplab.records import Matched, StudyArm, StudyResult, StudyRow, dump_json, write_atomic
from looplab.report.study import write_study
from looplab.studies import arms as work
from looplab.studies.arms import LEDGER, Say
from looplab.studies.base import SMOKE, Arm, Study
from looplab.studies.claims import decide_claims
from looplab.studies.predictions import FILE, digest, predictions_text, register
from looplab.training.config import RunConfig
from looplab.training.folder import CONFIG, FolderError

AUDITS, RUNS, LOCK = "audits", "runs", ".lock"
OWN = (FILE, RESULTS, LEDGER, "report.html", "tables.tex", "figures", AUDITS)
"""Everything a study writes into its folder; `fresh` removes these and nothing else."""
EQUAL = ("init", "data_order", "steps", "tokens", "parameters")
"""Facts that the trained arms of a seed must share."""
SMOKE_NOTE = "Scale smoke: a run of seconds that shows that the study works. Nothing is shown about any model."


def study_folder(out: Path, study: Study, scale: str) -> Path:
    """Where a study at a scale writes."""
    return out / study.name / scale


def predict(study: Study, scale: str, seeds: int, out: Path, *, fresh: bool = False) -> str:
    """Writes predictions.json alone and returns its SHA-256.

    Raises:
        FolderError: As for `run_study`.
    """
    with _claimed(study_folder(out, study, scale), out, fresh) as folder:
        text = predictions_text(study, scale, seeds, study.arms(scale, seeds))
        _register(folder, text)
        return digest(text)


def run_study(study: Study, scale: str, seeds: int, out: Path, *, fresh: bool = False, say: Say) -> StudyResult:
    """Runs what is missing of a study and writes its page.

    Args:
        seeds: Training seeds 0 .. seeds - 1; 0 for a study that trains nothing.
        out: Folder of studies.
        fresh: Remove what is in the study's folder first; training runs are kept.
        say: Receives lines of progress.

    Raises:
        FolderError: The folder is in use, or holds other predictions or something else.
        DivergedError: A training run gave no finite loss.
        DataError: This Python ships without the text of the built-in corpus.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # equal bits need an equal number
    try:
        with _claimed(study_folder(out, study, scale), out, fresh) as folder:
            return _run(study, scale, seeds, out, folder, say)
    finally:
        torch.set_num_threads(threads)


def _run(study: Study, scale: str, seeds: int, out: Path, folder: Path, say: Say) -> StudyResult:
    arms = study.arms(scale, seeds)
    text = predictions_text(study, scale, seeds, arms)
    _register(folder, text)
    say(f"{study.name}, scale {scale}, {len(arms)} arms; predictions {digest(text)}")
    done: list[StudyArm] = []
    rows: list[StudyRow] = []
    for number, arm in enumerate(arms, 1):
        say(f"[{number}/{len(arms)}] {arm.folder}: {arm.title}")
        began = time.perf_counter()
        finished, audit = _arm(arm, out, folder, say)
        done.append(finished)
        rows += study.measure(arm, audit)
        say(f"[{number}/{len(arms)}] {arm.folder} done in {time.perf_counter() - began:.1f} s")
    result = _result(study, scale, seeds, digest(text), done, rows)
    write_study(result, folder)
    write_atomic(folder / RESULTS, dump_json(result))
    return result


def _arm(arm: Arm, out: Path, folder: Path, say: Say) -> tuple[StudyArm, AuditResult]:
    """Trains if the arm is a run, audits, and enters the times."""
    began = time.perf_counter()
    place = Path(AUDITS) / arm.folder
    facts: dict[str, str] = {}
    trained_seconds = 0.0
    if isinstance(arm.source, RunConfig):
        model, record = work.train_arm(arm.source, out / RUNS, say)
        trained_seconds = record.seconds
        facts |= work.training_facts(arm.source, record)
        result = work.audit_arm(arm, model, folder / place, say)
    else:
        result = work.audit_arm(arm, arm.source, folder / place, say)
    facts |= {"weights": result.model.weight_hash, "audit settings": result.config_hash}
    counts = json.loads((folder / place / LEDGER).read_text())
    _enter(
        folder,
        arm.folder,
        {
            "train_seconds": trained_seconds,
            "audit_seconds": counts["seconds"],
            "audit_counts": counts["counts"],
            "this_call_seconds": time.perf_counter() - began,
        },
    )
    finished = StudyArm(
        name=arm.name,
        title=arm.title,
        seed=arm.seed,
        audit=str(place),
        sentence=result.domains[0].verdict.sentence,
        facts=facts,
    )
    return finished, result


def _result(
    study: Study, scale: str, seeds: int, predictions: str, arms: Sequence[StudyArm], rows: Sequence[StudyRow]
) -> StudyResult:
    matched = matches(arms)
    seeded = f" --seeds {seeds}" if study.seeds else ""
    return StudyResult(
        study=study.name,
        version=study.version,
        scale=scale,
        question=study.question,
        references=study.references,
        predictions=predictions,
        arms=tuple(arms),
        rows=tuple(rows),
        claims=decide_claims(study.claims, rows, scale=scale, matched=matched),
        matched=matched,
        columns=study.columns,
        plots=study.plots,
        notes=(*((SMOKE_NOTE,) if scale == SMOKE else ()), *study.notes),
        versions={"looplab": looplab.__version__, "python": platform.python_version(), "torch": torch.__version__},
        command=f"looplab study {study.name} --scale {scale}{seeded}",
    )


def matches(arms: Sequence[StudyArm]) -> tuple[Matched, ...]:
    """Whether the trained arms of each seed share what they must; nothing where no arm was trained."""
    trained = [arm for arm in arms if arm.seed is not None]
    found = []
    for name in EQUAL if trained else ():
        by_seed: dict[int | None, set[str]] = {}
        for arm in trained:
            by_seed.setdefault(arm.seed, set()).add(arm.facts[name])
        equal = all(len(values) == 1 for values in by_seed.values())
        found.append(Matched(name=name, equal=equal, values={arm.label: arm.facts[name] for arm in trained}))
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
