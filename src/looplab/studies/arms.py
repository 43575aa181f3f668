"""Training, auditing and grading one arm, each once: what is finished is kept, what was cut short goes on.

runs/<hash of the run's configuration>/      the training run, shared by all studies below one folder;
                                             diverged.json marks one that gave no finite loss
<study>/<scale>/audits/<arm>[-<seed>]/       the audit with its own report; results.json is written last, and until then
                                             partial/ holds what is finished
grids/<hash of the weights>-<of the grid>/   the answers of a model, shared by all studies too
"""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import looplab
from looplab._config import config_hash
from looplab.audit.folder import PARTIAL
from looplab.audit.problems import Problems
from looplab.audit.protocol import plan_audit
from looplab.audit.result import RESULTS, AuditResult
from looplab.audit.runner import weight_hash
from looplab.audit.watch import Silent
from looplab.data.corpus import builtin_corpus
from looplab.data.documents import DocumentSet, read_documents
from looplab.journal import Journal
from looplab.records import RunRecord, dump_json, write_atomic
from looplab.report import write_report
from looplab.studies.base import Arm
from looplab.studies.grid import GridResult, measure_grid
from looplab.studies.trained import TrainedRun
from looplab.tasks.rows import TaskRows
from looplab.training.config import RunConfig
from looplab.training.display import Display
from looplab.training.display import line as training_line
from looplab.training.divergence import DivergedError
from looplab.training.trainer import train

Say = Callable[[str], None]
LEDGER, LOST = "ledger.json", "diverged.json"
DOMAIN = "text"


class TrainingLines(Display):
    """A line every `log_every` steps."""

    def __init__(self, say: Say, every: int):
        self._say, self._every = say, every

    def step(self, record: Mapping[str, Any], *, steps: int, tokens_per_second: float, seconds_left: float) -> None:
        """A line, if it is its turn."""
        if record["step"] % self._every == 0 or record["step"] == steps:
            rest = training_line(record, steps=steps, tokens_per_second=tokens_per_second, seconds_left=seconds_left)
            self._say(f"  {rest}")

    def say(self, line: str) -> None:
        """A line, at once."""
        self._say(f"  {line}")


class AuditLines(Silent):
    """A line for every phase of an audit."""

    def __init__(self, say: Say):
        self._say, self._phase = say, ""

    def advanced(self, phase: str, *rest: Any) -> None:
        """A line, if the phase is a new one."""
        if phase != self._phase:
            self._phase = phase
            self._say(f"  {phase}")


def train_arm(config: RunConfig, runs: Path, say: Say) -> TrainedRun:
    """A run that was trained to its end, or that diverged; neither is run again."""
    run = runs / config_hash(config)
    if (run / LOST).is_file():
        return TrainedRun(config, run, None, json.loads((run / LOST).read_text())["diverged"])
    try:
        record = train(config, run, display=TrainingLines(say, config.log_every))
    except DivergedError as error:
        write_atomic(run / LOST, dump_json({"diverged": str(error)}))
        return TrainedRun(config, run, None, str(error))
    return TrainedRun(config, run, record)


def audit_arm(arm: Arm, model: str | Path, folder: Path, say: Say) -> AuditResult:
    """The audit of one model on the arm's problems or the held-out corpus; a finished one is read back."""
    assert arm.audit is not None
    if (folder / RESULTS).exists():
        result = AuditResult.load(folder)
        if result.config_hash == config_hash(arm.audit):
            return result
    folder.mkdir(parents=True, exist_ok=True)
    control = None if arm.control is None else looplab.load(arm.control)
    documents: DocumentSet | Problems | dict[str, DocumentSet]
    if arm.documents is not None:
        name, file = arm.documents
        documents = {name: read_documents(file, option=f"--data {name}={file}")}
    else:
        documents = {DOMAIN: builtin_corpus("heldout")} if arm.problems is None else arm.problems
    plan = plan_audit(looplab.load(model), documents, arm.audit, control=control, name=arm.folder)
    began = time.perf_counter()
    parts = folder / PARTIAL / f"{config_hash(arm.audit)}-{plan.card.weight_hash}"
    result = plan.measure(Journal(parts), watcher=AuditLines(say)).result()
    seconds = time.perf_counter() - began
    write_atomic(folder / LEDGER, dump_json({"seconds": seconds, "counts": result.counts}))
    write_report(result, folder)
    result.save(folder)
    shutil.rmtree(folder / PARTIAL)
    return result


def grade_arm(arm: Arm, model: str | Path, grids: Path, say: Say) -> tuple[Path, GridResult]:
    """The grid of one model and its folder; a finished one is read back."""
    assert arm.grid is not None
    opened = looplab.load(model).model
    folder = grids / f"{weight_hash(opened)}-{config_hash(arm.grid)}"
    if (folder / RESULTS).exists():
        return folder, GridResult.load(folder)
    folder.mkdir(parents=True, exist_ok=True)
    say(f"  grade {', '.join(str(line.length) for line in arm.grid.lines)}")
    began = time.perf_counter()
    result = measure_grid(opened, arm.grid)
    write_atomic(folder / LEDGER, dump_json({"seconds": time.perf_counter() - began, "counts": result.counts}))
    result.save(folder)
    return folder, result


def training_facts(config: RunConfig, record: RunRecord) -> dict[str, str]:
    """Hashes and counts of one run; `init` and `data_order` are of the weights and batches themselves."""
    model = config.build_model()
    read = model.spec.token_ids or record.vocab_size
    return {
        "config": config_hash(config),
        "init": weight_hash(model),
        "data_order": data_order_hash(config, read),
        "steps": f"{config.steps:,}",
        "tokens": f"{record.tokens:,}",
        "parameters": f"{record.n_once + record.n_rec:,}",
        "mean applications": f"{record.num_steps:.3f}",
        "gradient applications": f"{record.window * config.steps:,.0f}",
        "training FLOPs": f"{record.train_flops:.4g}",
        "held-out loss": f"{record.loss:.4f}",
    }


def data_order_hash(config: RunConfig, vocab_size: int) -> str:
    """Hash of the tokens of all batches, in order; of every 16th where problems are drawn, which takes longer."""
    loader: Any = config.data.load(seed=config.seed, vocab_size=vocab_size)
    found = hashlib.blake2b(digest_size=8)
    for step in range(0, config.steps, 16 if isinstance(config.data, TaskRows) else 1):
        found.update(loader.batch(step).tokens.numpy().tobytes())
    return found.hexdigest()
