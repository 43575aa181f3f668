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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from looplab.audit.schedules import Schedule, check_grid, default_schedules, full_plan, schedule_map
from looplab.audit.self_tests import run as run_self_tests
from looplab.audit.verdict import agreements
from looplab.audit.watch import Silent, Watcher
from looplab.data.documents import DataError, Document, DocumentSet
from looplab.data.tokenizers import ByteTokenizer, Tokenizer
from looplab.intervals import document_draws
from looplab.records import Finding
from looplab.recurrence.ledger import Ledger

__all__ = ["AuditConfig", "AuditResult", "CannotAudit", "Tables", "audit_model"]

MAX_TOKENS = 1024


class CannotAudit(ValueError):
    """A model that no audit can say anything about."""


@dataclass(frozen=True, eq=False)
class Opened:
    """A model with the tokenizer it is read with."""

    model: Any
    tokenizer: Tokenizer
    name: str
    findings: tuple[Finding, ...] = ()


class Tables:
    """Where token and document tables, and fitted probes, go while an audit runs; this one keeps nothing."""

    keeps_tokens = False

    def tokens(self, domain: str, schedule: str, columns: dict[str, np.ndarray]) -> None:
        """Columns of one batch: one row per scored token."""

    def documents(self, domain: str, schedule: str, columns: dict[str, Any]) -> None:
        """Columns over the evaluation documents of a domain."""

    def probes(self, domain: str, schedule: str, fit: Fits) -> None:
        """The fitted probes of one schedule."""


def audit_model(
    model: Any,
    documents: Mapping[str, DocumentSet] | DocumentSet | Sequence[str | Document],
    config: AuditConfig | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    calibration: Mapping[str, DocumentSet] | None = None,
    control: Any = None,
    control_tokenizer: Tokenizer | None = None,
    name: str = "",
    batch_tokens: int = 8192,
    spool_bytes: int = 2**30,
    tables: Tables | None = None,
    watcher: Watcher | None = None,
    ledgers: dict[str, Ledger] | None = None,
    command: str = "",
) -> AuditResult:
    """Audits one model.

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
        spool_bytes: Hidden states beyond this go to temporary files.
        tables: Receives what is too large for a result.
        watcher: Receives progress.
        ledgers: Filled with the counts and times of every phase.
        command: The command line, for the record.

    Raises:
        CannotAudit: The model is too small for any question, or has no tokenizer.
        ValueError: A setting that this model cannot take, naming its option.
        DataError: Documents that cannot be used.
        SelfTestError: A self-test failed; nothing was measured.
        NonFiniteError: The full plan gives numbers that are not finite.
    """
    audit = _Audit(
        opened=_open(model, tokenizer, name),
        config=config or AuditConfig(),
        control=None if control is None else _open(control, control_tokenizer or tokenizer, ""),
        tables=tables or Tables(),
        watcher=watcher or Silent(),
        ledgers={} if ledgers is None else ledgers,
        batch_tokens=batch_tokens,
        spool_bytes=spool_bytes,
    )
    return audit.run(_domain_sets(documents), calibration or {}, command)


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
    return Opened(inner.eval(), tokenizer, name or (model.name if loaded else inner.spec.name), findings)


def _domain_sets(
    documents: Mapping[str, DocumentSet] | DocumentSet | Sequence[str | Document],
) -> dict[str, DocumentSet]:
    if isinstance(documents, DocumentSet):
        return {"text": documents}
    if isinstance(documents, Mapping):
        return dict(documents)
    made = tuple(text if isinstance(text, Document) else Document(text, line=i) for i, text in enumerate(documents, 1))
    return {"text": DocumentSet("given texts", made, "")}


@dataclass(eq=False, kw_only=True)
class _Audit:
    """The steps of one audit."""

    opened: Opened
    config: AuditConfig
    control: Opened | None
    tables: Tables
    watcher: Watcher
    ledgers: dict[str, Ledger]
    batch_tokens: int
    spool_bytes: int

    def run(self, sets: dict[str, DocumentSet], calibration: Mapping[str, DocumentSet], command: str) -> AuditResult:
        """All steps."""
        subject = self._subject(self.opened)
        control = None if self.control is None else self._control_subject(self.control)
        domains = self._domains(sets, calibration, self.opened)
        control_domains = None if self.control is None else self._control_domains(sets, calibration, domains)
        card = self._card(self.opened, subject)
        self.watcher.planned(card, subject.rows, subject.minimal, subject.naive)
        first = next(iter(domains.values()))
        with self._ledger("self-test").phase("self-test"):
            tests, findings = run_self_tests(
                subject.runner, subject.full, first.evaluation.documents, self._ledger("self-test"), self.watcher.tested
            )
        measured = self._measure(subject, domains, "")
        controlled = {} if control is None else self._measure(control, control_domains or {}, "control")
        control_card = None if control is None or self.control is None else self._card(self.control, control)
        with self._ledger("statistics").phase("statistics"):
            self.watcher.advanced("statistics", "", 0, 1, "")
            results = tuple(domain_result(measured[name], controlled.get(name), control_card) for name in measured)
        counts = self._counts(subject, measured)
        split = results[0].decompositions
        found = [*self.opened.findings, *findings, *not_identifiable(subject.rows, split[0].parts if split else ())]
        for result in results:
            part = measured[result.name]
            found += domain_findings(part.domain, part.fits, part.diverged, part.losses.findings)
            found += gap_findings(result.decompositions, result.name, self.config)
        return AuditResult(
            model=card,
            config=self.config,
            config_hash=config_hash(self.config),
            schedule_map=subject.rows,
            domains=results,
            agreements=agreements({result.name: result.decompositions for result in results}),
            self_tests=tests,
            findings=tuple(found),
            counts=counts,
            versions={"looplab": looplab.__version__, "python": platform.python_version(), "torch": torch.__version__},
            command=command,
        )

    def _ledger(self, phase: str) -> Ledger:
        return self.ledgers.setdefault(phase, Ledger())

    def _work(self, keep_tokens: Callable[[str, str, dict[str, np.ndarray]], None] | None) -> Work:
        return Work(self.config, self.batch_tokens, self.spool_bytes, self.ledgers, self.watcher.advanced, keep_tokens)

    def _subject(self, opened: Opened) -> Subject:
        config, spec = self.config, opened.model.spec
        steps = config.num_steps
        full = full_plan(spec, steps[0] if steps is not None and len(steps) == 1 else steps)
        if len(full.plan) < 2:
            raise CannotAudit(
                f"the full plan must have at least 2 applications. Got {len(full.plan)}. Pass --num-steps 2 or more."
            )
        extra = [Schedule.parse(text) for text in config.schedules]
        if is_dense(full):
            return self._dense_subject(opened, extra)
        schedules = default_schedules(
            full, grid=config.grid, controls=config.controls, permutations=config.permutations, extra=extra
        )
        return Subject(self._runner(opened), full, schedule_map(full, schedules), self._seeds(spec))

    def _dense_subject(self, opened: Opened, extra: Sequence[Schedule]) -> Subject:
        full = full_plan(opened.model.spec)
        grid = dense_depths(full.M) if self.config.grid is None else check_grid(full, self.config.grid)
        schedules = default_schedules(full, grid=grid, controls=("suffix",), extra=extra, landmarks=False)
        return Subject(self._runner(opened), full, schedule_map(full, schedules), self._seeds(opened.model.spec))

    def _control_subject(self, opened: Opened) -> Subject:
        full = full_plan(opened.model.spec)
        if not is_dense(full) or len(full.plan) < 2:
            raise CannotAudit(
                f"--control must be a dense model of at least 2 layers. Got {opened.name}, which repeats a block or "
                "has one layer. Leave it out or pass a dense checkpoint."
            )
        control = replace(self.config, grid=None)
        return _Audit(**{**vars(self), "config": control})._dense_subject(opened, ())

    def _runner(self, opened: Opened) -> Runner:
        return Runner(opened.model, self.config.seed, self.config.init == "zero")

    def _seeds(self, spec: Any) -> int:
        return self.config.init_seeds if spec.noise_width and self.config.init == "model" else 1

    def _card(self, opened: Opened, subject: Subject) -> ModelCard:
        return model_card(
            subject.runner, subject.full, name=opened.name, source=opened.name, tokenizer=opened.tokenizer.name
        )

    def _max_tokens(self) -> int:
        contexts = [o.model.spec.max_positions for o in (self.opened, self.control) if o is not None]
        trained = min((context for context in contexts if context is not None), default=None)
        asked = self.config.max_tokens
        if asked is None:
            return MAX_TOKENS if trained is None else min(MAX_TOKENS, trained)
        if trained is not None and asked > trained:
            raise ValueError(f"--max-tokens must be at most {trained}, the trained context. Got {asked}.")
        return asked

    def _domains(
        self, sets: dict[str, DocumentSet], calibration: Mapping[str, DocumentSet], opened: Opened
    ) -> dict[str, Domain]:
        unknown = [name for name in calibration if name not in sets]
        if unknown:
            raise ValueError(f"--calibration must name a domain of --data ({', '.join(sets)}). Got {unknown[0]!r}.")
        return {
            name: prepare(
                name,
                documents,
                opened.tokenizer,
                seed=self.config.seed,
                evaluation=self.config.documents,
                calibration=self.config.calibration_documents,
                calibration_tokens=self.config.calibration_tokens,
                max_tokens=self._max_tokens(),
                vocabulary=opened.model.spec.vocab[0],
                calibration_set=calibration.get(name),
            )
            for name, documents in sets.items()
        }

    def _control_domains(
        self, sets: dict[str, DocumentSet], calibration: Mapping[str, DocumentSet], own: dict[str, Domain]
    ) -> dict[str, Domain]:
        assert self.control is not None
        domains = self._domains(sets, calibration, self.control)
        for name, domain in domains.items():
            keys, other = ([d.content_key for d in side.evaluation.documents] for side in (own[name], domain))
            if keys != other:
                raise DataError(
                    f"the control must score the same documents of {name}. Got {len(other)} documents where the model "
                    f"has {len(keys)}, or others. Raise --max-tokens so that every prompt fits both tokenizers."
                )
        return domains

    def _measure(self, subject: Subject, domains: dict[str, Domain], control: str) -> dict[str, Measured]:
        """Calibrates on every domain, then evaluates every domain under its own fits and the others' temperatures."""
        keep = self.tables.tokens if self.tables.keeps_tokens and not control else None
        work = self._work(keep)
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
                config=self.config,
                batch_tokens=self.batch_tokens,
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
        split = domain.evaluation
        sums = {name: schedule_sums(kept, fits[name], split, subject.seeds) for name, kept in scores.items()}
        origin = {row.name: row.same_as or row.name for row in subject.rows}
        draws = document_draws(
            len(split.documents), self.config.replicates, seed=self.config.seed, domain=domain.name, split="evaluation"
        )
        return bootstrap_losses(
            {name: sums[own] for name, own in origin.items() if own in sums},
            draws,
            tokens=split.counts.astype(np.float64) * subject.seeds,
            num_bytes=int(split.text_bytes.sum()) * subject.seeds,
            weighting=self.config.weighting,
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

    def _counts(self, subject: Subject, measured: Mapping[str, Measured]) -> AuditCounts:
        documents = sum(
            len(part.domain.evaluation.documents)
            + (len(part.domain.calibration.documents) if self.config.probes else 0)
            for part in measured.values()
        )
        applications = sum(self._ledger(phase).row_applications for phase in ("calibrate", "evaluate"))
        return AuditCounts(
            minimal_applications=subject.minimal,
            naive_applications=subject.naive,
            readouts=len(subject.words),
            live_states=subject.live_states,
            documents=documents,
            seeds=subject.seeds,
            applications=applications,
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
