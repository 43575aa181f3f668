"""The Depth Control Protocol, in order: identify, test, calibrate, fit, evaluate, decide.

    1 identify    full plan, schedules, words; what cannot be told apart is struck out and never run
    2 self-test   nine checks on four documents; a failure stops the audit before any number
    3 calibrate   shared walk over calibration documents, probes fitted per schedule
    4 evaluate    shared walk over evaluation documents, every schedule scored on one token table
    5 statistics  shared document draws: contrasts, decomposition, net probe gains, equivalence
    6 control     the dense model under the same interventions, on the same documents
    7 verdict     words of a fixed vocabulary, one sentence per domain

Reference: Dau, Khuat, Dung, "Beyond Depth Truncation", arXiv:2609.19934.
"""

import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import looplab
from looplab._config import config_hash, from_dict
from looplab.audit.assemble import Measured, domain_result, exact_matches
from looplab.audit.bootstrap import Losses, bootstrap_losses
from looplab.audit.card import is_dense, model_card
from looplab.audit.case import CONTROL, EVALUATION, FULL_RANK, MODEL, Case, Name, Subject
from looplab.audit.collect import Collected, collect, schedule_sums
from looplab.audit.config import AuditConfig
from looplab.audit.control import dense_depths
from looplab.audit.decompose import gap_findings
from looplab.audit.documents import PUZZLE_IDS, Domain, check_domain_name, prepare
from looplab.audit.findings import (
    byte_tokens,
    domain_findings,
    geometry_findings,
    not_identifiable,
    other_task,
    task_findings,
)
from looplab.audit.problems import Problems, prepare_problems
from looplab.audit.result import AuditCounts, AuditResult, ModelCard, PhaseCounts, SelfTest
from looplab.audit.runner import Runner
from looplab.audit.schedules import FullPlan, Schedule, check_grid, default_schedules, full_plan, schedule_map
from looplab.audit.self_tests import run as run_self_tests
from looplab.audit.timing import milliseconds
from looplab.audit.verdict import agreements
from looplab.audit.watch import Silent, Watcher
from looplab.audit.work import Work, total_counts
from looplab.data.documents import DataError, Document, DocumentSet, Grid
from looplab.data.tokenizers import ByteTokenizer, Tokenizer
from looplab.executors import Executor, Serial
from looplab.intervals import Draws, document_draws
from looplab.journal import Journal, Part
from looplab.records import Finding, encode_json
from looplab.recurrence.ledger import Ledger
from looplab.tasks.base import Task

__all__ = ["AuditConfig", "AuditPlan", "AuditResult", "CannotAudit", "audit_model", "plan_audit"]

MAX_TOKENS = 1024

Documents = Mapping[str, DocumentSet | Problems] | DocumentSet | Problems | Sequence[str | Document | Grid]


class CannotAudit(ValueError):
    """A model that no audit can say anything about."""


@dataclass(frozen=True, eq=False)
class Opened:
    """A model with the tokenizer it is read with; None for a model of grids, or of a task."""

    model: Any
    tokenizer: Tokenizer | None
    name: str
    findings: tuple[Finding, ...] = ()
    task: str = ""
    """Name of the task whose problems it answers."""

    @property
    def scoring(self) -> str:
        """What it predicts, in words."""
        if self.task:
            return f"answers of {self.task}"
        if self.tokenizer is None:
            return "labels of grids"
        return "next tokens" if self.model.mask_token is None else "masked tokens"


def audit_model(
    model: Any,
    documents: Documents,
    config: AuditConfig | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    calibration: Mapping[str, DocumentSet] | None = None,
    control: Any = None,
    control_tokenizer: Tokenizer | None = None,
    name: str = "",
    batch_tokens: int = 8192,
) -> AuditResult:
    """Audits one model: `plan_audit(...).run()`.

    Args:
        model: What `looplab.load` returns, or any model of the contract.
        documents: Domain name -> documents; a single set, or plain texts or grids, are the domain "text". A model that
            is not causal and has no mask token is one of grids. `Problems` of a task are documents for any model that
            reads its tokens and answers with its symbols; then no domain is of another kind.
        config: What to run (default: `AuditConfig()`).
        tokenizer: Default: the loaded model's own; raw bytes for a vocabulary of at least 256.
        calibration: Domain name -> documents to calibrate on, instead of splitting that domain by hash.
        control: A dense model, as `model`; run on the same documents.
        control_tokenizer: Default: the control's own.
        name: Shown for the model.
        batch_tokens: Most positions of a launch.

    Raises:
        CannotAudit: The model is too small for any question, or has no tokenizer.
        ValueError: A setting that this model cannot take, naming its option.
        DataError: Documents that cannot be used.
        SelfTestError: A self-test failed; nothing was measured.
        NonFiniteError: The full plan gives numbers that are not finite.
    """
    plan = plan_audit(
        model,
        documents,
        config or AuditConfig(),
        tokenizer=tokenizer,
        calibration=calibration,
        control=control,
        control_tokenizer=control_tokenizer,
        name=name,
        batch_tokens=batch_tokens,
    )
    return plan.run()


def plan_audit(
    model: Any,
    documents: Documents,
    config: AuditConfig,
    *,
    tokenizer: Tokenizer | None = None,
    calibration: Mapping[str, DocumentSet] | None = None,
    control: Any = None,
    control_tokenizer: Tokenizer | None = None,
    name: str = "",
    batch_tokens: int = 8192,
) -> "AuditPlan":
    """Everything that is decided before anything runs; arguments and errors as in `audit_model`."""
    sets = _domain_sets(documents)
    for domain in sets:
        check_domain_name(domain)
    task = _task_of(sets)
    opened = _open(model, tokenizer, name, task)
    dense = None if control is None else _open(control, control_tokenizer or tokenizer, "", task)
    if dense is not None:
        _check_scoring(opened, dense)
    for domain, given in sets.items():
        _check_answers(opened, domain, given, config)
    unknown = [name for name in calibration or {} if name not in sets]
    if task and calibration:
        raise ValueError(f"--calibration takes texts. Got problems of {task}, which have a split. Leave it out.")
    if unknown:
        raise ValueError(f"--calibration must name a domain of --data ({', '.join(sets)}). Got {unknown[0]!r}.")
    subject = _subject(opened, config)
    control_subject = None if dense is None else _control_subject(dense, config)
    longest = _max_tokens(config, [o for o in (opened, dense) if o is not None])
    domains = {n: _domain(n, d, (calibration or {}).get(n), opened, config, longest) for n, d in sets.items()}
    control_domains = {}
    if dense is not None:
        control_domains = {
            n: _domain(n, d, (calibration or {}).get(n), dense, config, longest) for n, d in sets.items()
        }
        _check_same_documents(domains, control_domains)
    return AuditPlan(
        config=config,
        opened=opened,
        subject=subject,
        domains=domains,
        control=dense,
        control_subject=control_subject,
        control_domains=control_domains,
        batch_tokens=batch_tokens,
        max_tokens=longest,
    )


def _open(model: Any, tokenizer: Tokenizer | None, name: str, task: str) -> Opened:
    loaded = not isinstance(model, nn.Module)
    inner = model.model if loaded else model
    if task:
        trained = trained_task(model.facts) if loaded else None
        others = () if trained is None or trained.name == task else (other_task(task, trained.name),)
        return Opened(inner.eval(), None, name or (model.folder.name if loaded else inner.spec.name), others, task)
    tokenizer = tokenizer or (model.tokenizer if loaded else None)
    findings: tuple[Finding, ...] = ()
    grids = not inner.spec.causal and inner.mask_token is None
    if grids:
        tokenizer = None
    elif tokenizer is None:
        size = inner.spec.vocab[0]
        if size < 256:
            raise CannotAudit(
                f"a model without a tokenizer needs a vocabulary of at least 256 to be read as bytes. Got {size}. "
                "Pass --tokenizer PATH."
            )
        tokenizer = ByteTokenizer(specials=False)
        findings = (byte_tokens(),)
    return Opened(inner.eval(), tokenizer, name or (model.folder.name if loaded else inner.spec.name), findings)


def trained_task(facts: Mapping[str, Any]) -> Task | None:
    """The task that a checkpoint was trained on, as its settings say; None for text."""
    written = (facts.get("trained") or {}).get("task")
    return None if written is None else from_dict(Task, written)  # type: ignore[type-abstract]


def _task_of(sets: Mapping[str, DocumentSet | Problems]) -> str:
    """The name of the task whose problems are the documents, or ""."""
    names = {given.task.name if isinstance(given, Problems) else "" for given in sets.values()}
    if len(names) > 1:
        told = ", ".join(sorted(name or "text" for name in names))
        raise ValueError(f"domains must be problems of one task, or none of them. Got {told}. Audit them one by one.")
    return next(iter(names), "")


def _check_answers(opened: Opened, domain: str, given: DocumentSet | Problems, config: AuditConfig) -> None:
    """Refuses documents that the model has no tokens, no answers or no room for."""
    spec = opened.model.spec
    each = spec.vocab[0] // spec.cells
    if not isinstance(given, Problems):
        if spec.cells > 1:
            raise CannotAudit(
                f"domain {domain} must hold problems of a task for this model, which answers with {spec.cells} cells "
                f"at a position. Got {given.name}. Pass --task."
            )
        return
    task = given.task
    read = spec.vocab[0] if spec.token_ids is None else spec.token_ids
    if len(task.tokens) > read:
        raise CannotAudit(
            f"MODEL must read the {len(task.tokens)} tokens of {task.name}. Got {opened.name}, which reads {read}. "
            "Pass a model of this task, or another --task."
        )
    if task.cells != spec.cells or len(task.symbols) > each:
        raise CannotAudit(
            f"MODEL must answer {task.name} with {_cells(task.cells, len(task.symbols))}. Got {opened.name}, which "
            f"answers with {_cells(spec.cells, each)}. Pass a model of this task, or another --task."
        )
    length, difficulty = task.length(given.difficulty), given.difficulty
    if spec.fixed_length not in (None, length):
        raise CannotAudit(
            f"problems must have {spec.fixed_length} tokens, the only size that {opened.name} takes. Got {length} at "
            f"difficulty {difficulty} of {task.name}. Give another --difficulty."
        )
    if spec.max_positions is not None and length > spec.max_positions:
        raise CannotAudit(
            f"problems must have at most {spec.max_positions} tokens, the trained context of {opened.name}. "
            f"Got {length} at difficulty {difficulty} of {task.name}. Give a smaller --difficulty."
        )
    if config.max_tokens is not None and length > config.max_tokens:
        raise ValueError(
            f"--max-tokens must be at least {length} for difficulty {difficulty} of {task.name}: a problem is never "
            f"cut. Got {config.max_tokens}. Leave it out."
        )


def _cells(cells: int, symbols: int) -> str:
    return f"{symbols} symbols" if cells == 1 else f"{cells} cells of {symbols} symbols"


def _check_scoring(opened: Opened, dense: Opened) -> None:
    if opened.task:
        raise CannotAudit(
            f"--control compares gaps in nats per byte. Got {opened.name} on {opened.task}, whose problems have no "
            "bytes. Leave it out."
        )
    if opened.tokenizer is None:
        raise CannotAudit(
            f"--control compares gaps in nats per byte. Got {opened.name}, a model of grids, which have no bytes. "
            "Leave it out."
        )
    if dense.scoring != opened.scoring:
        raise CannotAudit(
            f"--control must predict {opened.scoring}, as {opened.name} does. Got {dense.name}, which predicts "
            f"{dense.scoring}. Leave it out or pass another checkpoint."
        )


def _domain_sets(documents: Documents) -> dict[str, DocumentSet | Problems]:
    if isinstance(documents, DocumentSet):
        return {"text": documents}
    if isinstance(documents, Problems):
        return {documents.domain: documents}
    if isinstance(documents, Mapping):
        return dict(documents)
    made = tuple(Document(text, line=i) if isinstance(text, str) else text for i, text in enumerate(documents, 1))
    kind = "grids" if any(isinstance(document, Grid) for document in made) else "texts"
    return {"text": DocumentSet(f"given {kind}", made, "")}


def _subject(opened: Opened, config: AuditConfig) -> Subject:
    spec, steps = opened.model.spec, config.num_steps
    full = full_plan(spec, steps[0] if steps is not None and len(steps) == 1 else steps)
    if len(full.plan) < 2:
        raise CannotAudit(
            f"the full plan must have at least 2 applications. Got {len(full.plan)}. Pass --num-steps 2 or more."
        )
    extra = [Schedule.parse(text) for text in config.schedules]
    if is_dense(full):
        return _dense_subject(opened, config, extra)
    schedules = default_schedules(
        full,
        grid=config.grid,
        controls=config.controls,
        permutations=config.permutations,
        extend=config.extend,
        extra=extra,
    )
    return _with_schedules(opened, config, full, schedules)


def _dense_subject(opened: Opened, config: AuditConfig, extra: Sequence[Schedule]) -> Subject:
    full = full_plan(opened.model.spec)
    grid = dense_depths(full.M) if config.grid is None else check_grid(full, config.grid)
    schedules = default_schedules(full, grid=grid, controls=("suffix",), extra=extra, landmarks=False)
    return _with_schedules(opened, config, full, schedules)


def _control_subject(opened: Opened, config: AuditConfig) -> Subject:
    full = full_plan(opened.model.spec)
    if not is_dense(full) or len(full.plan) < 2:
        raise CannotAudit(
            f"--control must be a dense model of at least 2 layers. Got {opened.name}, which repeats a block or "
            "has one layer. Leave it out or pass a dense checkpoint."
        )
    return _dense_subject(opened, replace(config, grid=None), ())


def _with_schedules(opened: Opened, config: AuditConfig, full: FullPlan, schedules: Sequence[Schedule]) -> Subject:
    runner = Runner(opened.model, config.seed, config.init == "zero")
    seeds = config.init_seeds if opened.model.spec.noise_width and config.init == "model" else 1
    return Subject(runner, full, schedule_map(full, schedules), seeds)


def _max_tokens(config: AuditConfig, models: Sequence[Opened]) -> int:
    contexts = [opened.model.spec.max_positions for opened in models]
    trained = min((context for context in contexts if context is not None), default=None)
    asked = config.max_tokens
    if asked is None:
        return MAX_TOKENS if trained is None else min(MAX_TOKENS, trained)
    if trained is not None and asked > trained:
        raise ValueError(f"--max-tokens must be at most {trained}, the trained context. Got {asked}.")
    return asked


def _domain(
    name: str,
    documents: DocumentSet | Problems,
    calibration: DocumentSet | None,
    opened: Opened,
    config: AuditConfig,
    longest: int,
) -> Domain:
    if isinstance(documents, Problems):
        return prepare_problems(
            name,
            documents,
            seed=config.seed,
            evaluation=config.documents,
            calibration=config.calibration_documents,
            calibration_tokens=config.calibration_tokens,
            training=config.calibration_documents if FULL_RANK in config.probes else 0,
            puzzle_ids=opened.model.spec.extras.get(PUZZLE_IDS),
        )
    return prepare(
        name,
        documents,
        opened.tokenizer,
        mask_token=opened.model.mask_token,
        puzzle_ids=opened.model.spec.extras.get(PUZZLE_IDS),
        grid_tokens=opened.model.spec.fixed_length,
        seed=config.seed,
        evaluation=config.documents,
        calibration=config.calibration_documents,
        calibration_tokens=config.calibration_tokens,
        max_tokens=longest,
        windows=config.windows,
        vocabulary=opened.model.spec.vocab[0],
        calibration_set=calibration,
        training=config.calibration_documents if FULL_RANK in config.probes else 0,
    )


def _check_same_documents(own: Mapping[str, Domain], others: Mapping[str, Domain]) -> None:
    for name, domain in others.items():
        keys, other = ([d.content_key for d in side.evaluation.documents] for side in (own[name], domain))
        if keys != other:
            raise DataError(
                f"the control must score the same documents of {name}. Got {len(other)} documents where the model has "
                f"{len(keys)}, or others. Raise --max-tokens so that every prompt fits both tokenizers."
            )


@dataclass(frozen=True, eq=False, kw_only=True)
class AuditPlan:
    """An audit that is decided and not yet run."""

    config: AuditConfig
    opened: Opened
    subject: Subject
    domains: dict[str, Domain]
    control: Opened | None
    control_subject: Subject | None
    control_domains: dict[str, Domain]
    batch_tokens: int
    max_tokens: int
    """Longest document in tokens."""

    @cached_property
    def card(self) -> ModelCard:
        """The model's card."""
        return _card(self.opened, self.subject)

    @cached_property
    def control_card(self) -> ModelCard | None:
        """The control's card."""
        if self.control is None or self.control_subject is None:
            return None
        return _card(self.control, self.control_subject)

    @property
    def documents(self) -> int:
        """Documents that are walked, of all domains and splits; every window or masked pass of one counts."""
        return self.walked(MODEL)

    def walked(self, role: str) -> int:
        """The same for one of the models."""
        cases = [case for (own, _), case in self.cases.items() if own == role]
        return sum(len(case.split(name).rows) for case in cases for name in (*case.fitted_splits, EVALUATION))

    @property
    def identity(self) -> dict[str, Any]:
        """Everything the numbers depend on, besides the configuration."""
        facts = {
            "model": self.card.weight_hash,
            "notes": list(self.card.notes),  # equal weights may be read in more than one way
            "control": self.control_card.weight_hash if self.control_card else None,
            "tokenizer": self.opened.tokenizer.hash if self.opened.tokenizer else None,
            "mask_token": self.opened.model.mask_token,
            "dtype": self.card.dtype,
            "device": self.subject.runner.weights.device.type,
            "batch_tokens": self.batch_tokens,
        }
        return facts | {f"data.{name}": domain.data_hash for name, domain in self.domains.items()}

    @cached_property
    def cases(self) -> dict[Name, Case]:
        """Every model on every domain."""
        sides = ((MODEL, self.subject, self.domains), (CONTROL, self.control_subject, self.control_domains))
        return {
            (role, name): Case(
                role=role, subject=subject, domain=domain, config=self.config, batch_tokens=self.batch_tokens
            )
            for role, subject, domains in sides
            if subject is not None
            for name, domain in domains.items()
        }

    def run(self, *, watcher: Watcher | None = None, command: str = "", spool_bytes: int = 2**30) -> AuditResult:
        """Measures in a temporary folder and returns the result.

        Args:
            watcher: Receives progress.
            command: The command line, for the record.
            spool_bytes: Hidden states of one shard beyond this go to temporary files.
        """
        with tempfile.TemporaryDirectory(prefix="looplab-audit-") as folder:
            journal = Journal(Path(folder))
            return self.measure(journal, watcher=watcher, spool_bytes=spool_bytes).result(command)

    def measure(
        self,
        journal: Journal,
        *,
        executor: Executor | None = None,
        make: Callable[[], Mapping[Name, Case]] | None = None,
        watcher: Watcher | None = None,
        keep_tokens: bool = False,
        keep_hidden: bool = False,
        spool_bytes: int = 2**30,
    ) -> "Measurement":
        """Does what the journal lacks.

        Args:
            journal: Of this audit; a journal of another one gives nonsense.
            executor: Where tasks run; entered and left here. Default: this process, one after another.
            make: Makes the cases in another process, for executors that have some.
            watcher: Receives progress.
            keep_tokens: Keep the columns of `tokens.parquet`.
            keep_hidden: Keep the hidden states of calibration documents.
            spool_bytes: Hidden states of one shard beyond this go to temporary files.

        Raises:
            SelfTestError: A self-test failed; nothing was measured.
            NonFiniteError: The full plan gives numbers that are not finite.
        """
        watcher = watcher or Silent()
        subject = self.subject
        watcher.planned(self.card, subject.rows, subject.minimal, subject.naive)
        ran: dict[str, Ledger] = {"self-test": Ledger()}
        self._self_tests(journal, watcher, ran["self-test"])
        with executor or Serial() as pool:
            Work(
                cases=self.cases,
                journal=journal,
                executor=pool,
                watcher=watcher,
                make=make,
                keep_tokens=keep_tokens,
                keep_hidden=keep_hidden,
                spool_bytes=spool_bytes,
                ran=ran,
            ).run()
        return Measurement(self, journal, watcher, ran)

    def _self_tests(self, journal: Journal, watcher: Watcher, ran: Ledger) -> None:
        if SELF_TESTS in journal:
            return
        first = next(iter(self.domains.values()))
        ledger = Ledger()
        with ran.phase("self-test"):
            tests, findings = run_self_tests(
                self.subject.runner, self.subject.full, first.evaluation.documents, ledger, watcher.tested
            )
        ran.add(ledger)
        facts = {
            "tests": [encode_json(test) for test in tests],
            "findings": [finding.to_dict() for finding in findings],
            "counts": ledger.to_dict(times=False),
        }
        journal.put(SELF_TESTS, Part(facts=facts))


SELF_TESTS, TIMES = ("self-tests",), ("times",)
COUNTED = ("self-test", "calibrate", "fit", "evaluate", CONTROL)
"""Phases whose counts the result holds; whatever is done for the control is one of them."""


def _card(opened: Opened, subject: Subject) -> ModelCard:
    return model_card(
        subject.runner,
        subject.full,
        name=opened.name,
        source=opened.name,
        tokenizer=opened.tokenizer.name if opened.tokenizer else f"none: {opened.task or 'grids'} of token ids",
    )


@dataclass(frozen=True, eq=False)
class Measurement:
    """A finished measurement: all parts are in the journal."""

    plan: AuditPlan
    journal: Journal
    watcher: Watcher = field(default_factory=Silent)
    ran: dict[str, Ledger] = field(default_factory=dict)
    """What was run now, by phase; less than the counts of the result where the journal had parts already."""

    @cached_property
    def collected(self) -> dict[Name, Collected]:
        """Every case put together."""
        return {name: collect(self.journal, name, case) for name, case in self.plan.cases.items()}

    @cached_property
    def measured(self) -> dict[Name, Measured]:
        """Every case with its losses in all replicates."""
        domains = list(self.plan.domains)
        return {
            (role, domain): _measured(part, tuple(d for d in domains if d != domain) if role == MODEL else ())
            for (role, domain), part in self.collected.items()
        }

    @cached_property
    def milliseconds(self) -> dict[str, float]:
        """Measured milliseconds per token of every depth; once per journal."""
        if TIMES not in self.journal:
            case = next(case for (role, _), case in self.plan.cases.items() if role == MODEL)
            self.journal.put(TIMES, Part(facts=milliseconds(case)))
        return self.journal.get(TIMES).facts

    def result(self, command: str = "", *, times: bool = False) -> AuditResult:
        """Statistics and verdict.

        Args:
            command: For the record.
            times: Let the value of depth hold measured times; equal audits then no longer give equal bytes.
        """
        plan, subject = self.plan, self.plan.subject
        with self._timed("statistics"):
            self.watcher.advanced("statistics", "", 0, 1, "")
            measured_times = self.milliseconds if times else None
            results = tuple(
                domain_result(
                    self.measured[MODEL, name],
                    self.measured.get((CONTROL, name)),
                    plan.control_card,
                    plan.card,
                    measured_times,
                )
                for name in plan.domains
            )
        facts = self.journal.get(SELF_TESTS).facts
        split = results[0].decompositions
        found = [*plan.opened.findings, *(Finding.from_dict(finding) for finding in facts["findings"])]
        found += not_identifiable(subject.rows, split[0].parts if split else ())
        for result in results:
            part = self.measured[MODEL, result.name]
            found += domain_findings(part.domain, part.fits, part.diverged, part.losses.findings)
            found += geometry_findings(part.scores["full"].samples, result.name)
            found += gap_findings(result.decompositions, result.name, plan.config)
            found += task_findings(part.domain, subject.full)
        return AuditResult(
            model=plan.card,
            config=plan.config,
            config_hash=config_hash(plan.config),
            schedule_map=subject.rows,
            domains=results,
            agreements=agreements(
                {result.name: result.decompositions for result in results},
                gains={result.name: result.gains for result in results},
            ),
            self_tests=tuple(from_dict(SelfTest, test) for test in facts["tests"]),
            findings=tuple(found),
            counts=self._counts(Ledger.from_dict(facts["counts"])),
            versions={"looplab": looplab.__version__, "python": platform.python_version(), "torch": torch.__version__},
            command=command,
        )

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        with self.ran.setdefault(phase, Ledger()).phase(phase):
            yield

    def _counts(self, self_tests: Ledger) -> AuditCounts:
        subject = self.plan.subject
        phases = {"self-test": self_tests, **total_counts(self.journal, self.plan.cases)}
        order = [phase for phase in COUNTED if phase in phases]
        return AuditCounts(
            minimal_applications=subject.minimal,
            naive_applications=subject.naive,
            readouts=len(subject.words),
            live_states=subject.live_states,
            documents=self.plan.documents,
            seeds=subject.seeds,
            applications=sum(phases[p].row_applications for p in ("calibrate", "evaluate") if p in phases),
            phases=tuple(
                PhaseCounts(
                    phase=phase,
                    applications=phases[phase].row_applications,
                    tokens=phases[phase].encoded_tokens,
                    readouts=phases[phase].readouts,
                    head_tokens=phases[phase].head_tokens,
                    flops=phases[phase].flops_forward + phases[phase].flops_backward,
                )
                for phase in order
            ),
        )


def _measured(part: Collected, cross: tuple[str, ...]) -> Measured:
    """Everything of one case that has intervals, from one matrix of draws."""
    case = part.case
    documents, config = len(case.split(EVALUATION).documents), case.config
    draws = document_draws(documents, config.replicates, seed=config.seed, domain=case.domain.name, split="evaluation")
    return Measured(collected=part, losses=_losses(part, draws), answers=exact_matches(part, draws), cross=cross)


def _losses(part: Collected, draws: Draws) -> Losses:
    case = part.case
    split, config, subject = case.split(EVALUATION), case.config, case.subject
    sums = {name: schedule_sums(kept, part.fits[name], split, subject.seeds) for name, kept in part.scores.items()}
    origin = {row.name: row.same_as or row.name for row in subject.rows}
    return bootstrap_losses(
        {name: sums[own] for name, own in origin.items() if own in sums},
        draws,
        tokens=split.counts.astype(np.float64) * subject.seeds,
        num_bytes=int(split.text_bytes.sum()) * subject.seeds,
        weighting=config.weighting,
    )
