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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

import looplab
from looplab._config import config_hash
from looplab.audit.assemble import Measured, domain_result
from looplab.audit.bootstrap import Losses, bootstrap_losses
from looplab.audit.card import is_dense, model_card
from looplab.audit.config import AuditConfig
from looplab.audit.control import dense_depths
from looplab.audit.decompose import gap_findings
from looplab.audit.documents import Domain, prepare
from looplab.audit.findings import byte_tokens, domain_findings, not_identifiable
from looplab.audit.measure import Fits, Scores, Subject, Work, calibrate, evaluate, schedule_sums
from looplab.audit.result import AuditCounts, AuditResult, ModelCard, PhaseCounts
from looplab.audit.runner import Runner
from looplab.audit.schedules import FullPlan, Schedule, check_grid, default_schedules, full_plan, schedule_map
from looplab.audit.self_tests import run as run_self_tests
from looplab.audit.tables import NoTables, Tables
from looplab.audit.verdict import agreements
from looplab.audit.watch import Silent, Watcher
from looplab.data.documents import DataError, Document, DocumentSet
from looplab.data.tokenizers import ByteTokenizer, Tokenizer
from looplab.intervals import document_draws
from looplab.records import Finding
from looplab.recurrence.ledger import Ledger

__all__ = ["AuditConfig", "AuditPlan", "AuditResult", "CannotAudit", "audit_model", "plan_audit"]

MAX_TOKENS = 1024

Documents = Mapping[str, DocumentSet] | DocumentSet | Sequence[str | Document]


class CannotAudit(ValueError):
    """A model that no audit can say anything about."""


@dataclass(frozen=True, eq=False)
class Opened:
    """A model with the tokenizer it is read with."""

    model: Any
    tokenizer: Tokenizer
    name: str
    findings: tuple[Finding, ...] = ()


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
        documents: Domain name -> documents; a single set, or plain texts, are the domain "text".
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
    opened = _open(model, tokenizer, name)
    dense = None if control is None else _open(control, control_tokenizer or tokenizer, "")
    sets = _domain_sets(documents)
    unknown = [name for name in calibration or {} if name not in sets]
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
    )


def _open(model: Any, tokenizer: Tokenizer | None, name: str) -> Opened:
    loaded = not isinstance(model, nn.Module)
    inner = model.model if loaded else model
    tokenizer = tokenizer or (model.tokenizer if loaded else None)
    findings: tuple[Finding, ...] = ()
    if tokenizer is None:
        size = inner.spec.vocab[0]
        if size < 256:
            raise CannotAudit(
                f"a model without a tokenizer needs a vocabulary of at least 256 to be read as bytes. Got {size}. "
                "Pass --tokenizer PATH."
            )
        tokenizer = ByteTokenizer(specials=False)
        findings = (byte_tokens(),)
    return Opened(inner.eval(), tokenizer, name or (model.folder.name if loaded else inner.spec.name), findings)


def _domain_sets(documents: Documents) -> dict[str, DocumentSet]:
    if isinstance(documents, DocumentSet):
        return {"text": documents}
    if isinstance(documents, Mapping):
        return dict(documents)
    made = tuple(text if isinstance(text, Document) else Document(text, line=i) for i, text in enumerate(documents, 1))
    return {"text": DocumentSet("given texts", made, "")}


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
        full, grid=config.grid, controls=config.controls, permutations=config.permutations, extra=extra
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
    documents: DocumentSet,
    calibration: DocumentSet | None,
    opened: Opened,
    config: AuditConfig,
    longest: int,
) -> Domain:
    return prepare(
        name,
        documents,
        opened.tokenizer,
        seed=config.seed,
        evaluation=config.documents,
        calibration=config.calibration_documents,
        calibration_tokens=config.calibration_tokens,
        max_tokens=longest,
        vocabulary=opened.model.spec.vocab[0],
        calibration_set=calibration,
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
        """Documents that are walked, of all domains and both splits."""
        calibrated = [d.calibration for d in self.domains.values()] if self.config.probes else []
        return sum(len(split.documents) for split in [d.evaluation for d in self.domains.values()] + calibrated)

    @property
    def identity(self) -> dict[str, Any]:
        """Everything the numbers depend on, besides the configuration."""
        facts = {
            "model": self.card.weight_hash,
            "control": self.control_card.weight_hash if self.control_card else None,
            "tokenizer": self.opened.tokenizer.hash,
            "dtype": self.card.dtype,
            "device": self.subject.runner.weights.device.type,
            "batch_tokens": self.batch_tokens,
        }
        return facts | {f"data.{name}": domain.data_hash for name, domain in self.domains.items()}

    def run(
        self,
        *,
        tables: Tables | None = None,
        watcher: Watcher | None = None,
        ledgers: dict[str, Ledger] | None = None,
        spool_bytes: int = 2**30,
        command: str = "",
    ) -> AuditResult:
        """All steps.

        Args:
            tables: Receives what is too large for a result.
            watcher: Receives progress.
            ledgers: Filled with the counts and times of every phase.
            spool_bytes: Hidden states beyond this go to temporary files.
            command: The command line, for the record.
        """
        run = _Run(self, tables or NoTables(), watcher or Silent(), {} if ledgers is None else ledgers, spool_bytes)
        return run.result(command)


def _card(opened: Opened, subject: Subject) -> ModelCard:
    return model_card(
        subject.runner, subject.full, name=opened.name, source=opened.name, tokenizer=opened.tokenizer.name
    )


@dataclass(frozen=True, eq=False)
class _Run:
    """One run of a plan."""

    plan: AuditPlan
    tables: Tables
    watcher: Watcher
    ledgers: dict[str, Ledger]
    spool_bytes: int

    def result(self, command: str) -> AuditResult:
        plan, subject = self.plan, self.plan.subject
        self.watcher.planned(plan.card, subject.rows, subject.minimal, subject.naive)
        first = next(iter(plan.domains.values()))
        with self._ledger("self-test").phase("self-test"):
            tests, findings = run_self_tests(
                subject.runner, subject.full, first.evaluation.documents, self._ledger("self-test"), self.watcher.tested
            )
        measured = self._measure(subject, plan.domains, "")
        controlled = {}
        if plan.control_subject is not None:
            controlled = self._measure(plan.control_subject, plan.control_domains, "control")
        with self._ledger("statistics").phase("statistics"):
            self.watcher.advanced("statistics", "", 0, 1, "")
            results = tuple(domain_result(measured[n], controlled.get(n), plan.control_card) for n in measured)
        split = results[0].decompositions
        found = [*plan.opened.findings, *findings, *not_identifiable(subject.rows, split[0].parts if split else ())]
        for result in results:
            part = measured[result.name]
            found += domain_findings(part.domain, part.fits, part.diverged, part.losses.findings)
            found += gap_findings(result.decompositions, result.name, plan.config)
        return AuditResult(
            model=plan.card,
            config=plan.config,
            config_hash=config_hash(plan.config),
            schedule_map=subject.rows,
            domains=results,
            agreements=agreements({result.name: result.decompositions for result in results}),
            self_tests=tests,
            findings=tuple(found),
            counts=self._counts(),
            versions={"looplab": looplab.__version__, "python": platform.python_version(), "torch": torch.__version__},
            command=command,
        )

    def _ledger(self, phase: str) -> Ledger:
        return self.ledgers.setdefault(phase, Ledger())

    def _measure(self, subject: Subject, domains: Mapping[str, Domain], control: str) -> dict[str, Measured]:
        """Calibrates on every domain, then evaluates every domain under its own fits and the others' temperatures."""
        keep = self.tables.tokens if self.tables.keeps_tokens and not control else None
        plan = self.plan
        work = Work(plan.config, plan.batch_tokens, self.spool_bytes, self.ledgers, self.watcher.advanced, keep)
        fitted = {
            name: calibrate(subject, domain, work, phase=control or "calibrate") for name, domain in domains.items()
        }
        measured = {}
        for name, domain in domains.items():
            fits, diverged = fitted[name]
            others = {other: fitted[other][0] for other in domains if other != name}
            cross = {schedule: _other_betas(others, schedule) for schedule in fits}
            scores = evaluate(subject, domain, fits, diverged, work, cross=cross, phase=control or "evaluate")
            with self._ledger("statistics").phase("statistics"):
                losses = self._losses(subject, domain, fits, scores)
            measured[name] = Measured(
                config=plan.config,
                batch_tokens=plan.batch_tokens,
                subject=subject,
                domain=domain,
                fits=fits,
                scores=scores,
                diverged=diverged,
                losses=losses,
                cross=tuple(others),
            )
            if not control:
                self._keep(measured[name])
        return measured

    def _losses(
        self, subject: Subject, domain: Domain, fits: Mapping[str, Fits], scores: Mapping[str, Scores]
    ) -> Losses:
        split, config = domain.evaluation, self.plan.config
        sums = {name: schedule_sums(kept, fits[name], split, subject.seeds) for name, kept in scores.items()}
        origin = {row.name: row.same_as or row.name for row in subject.rows}
        draws = document_draws(
            len(split.documents), config.replicates, seed=config.seed, domain=domain.name, split="evaluation"
        )
        return bootstrap_losses(
            {name: sums[own] for name, own in origin.items() if own in sums},
            draws,
            tokens=split.counts.astype(np.float64) * subject.seeds,
            num_bytes=int(split.text_bytes.sum()) * subject.seeds,
            weighting=config.weighting,
        )

    def _keep(self, part: Measured) -> None:
        split = part.domain.evaluation
        for name, kept in part.scores.items():
            sums = {readout: losses.sum(axis=0) for readout, losses in kept.losses.items()}
            columns = {
                "document": [document.content_key for document in split.documents],
                "tokens": split.counts,
                "bytes": split.text_bytes,
                **{f"nll_{readout}": values for readout, values in sums.items()},
                **dict(zip(("first", "second", "third"), kept.derivatives, strict=True)),
            }
            self.tables.documents(part.domain.name, name, columns)
            self.tables.probes(part.domain.name, name, part.fits[name])

    def _counts(self) -> AuditCounts:
        subject = self.plan.subject
        first_time = sum(self._ledger(phase).row_applications for phase in ("calibrate", "evaluate"))
        assert first_time == subject.minimal * self.plan.documents * subject.seeds, "an application was made twice"
        return AuditCounts(
            minimal_applications=subject.minimal,
            naive_applications=subject.naive,
            readouts=len(subject.words),
            live_states=subject.live_states,
            documents=self.plan.documents,
            seeds=subject.seeds,
            applications=first_time,
            phases=tuple(
                PhaseCounts(
                    phase=phase,
                    applications=ledger.row_applications,
                    tokens=ledger.encoded_tokens,
                    readouts=ledger.readouts,
                    head_tokens=ledger.head_tokens,
                    flops=ledger.flops_forward + ledger.flops_backward,
                )
                for phase, ledger in self.ledgers.items()
                if phase != "statistics"
            ),
        )


def _other_betas(others: Mapping[str, Mapping[str, Fits]], schedule: str) -> list[float]:
    """The schedule's beta on every other domain; 1 where it has none there."""
    found = []
    for fits in others.values():
        temperature = fits[schedule].temperature if schedule in fits else None
        found.append(1.0 if temperature is None else temperature.beta)
    return found
