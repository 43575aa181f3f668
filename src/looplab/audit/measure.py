"""Measuring one model on one domain: walk, spool, fit, walk again, score.

    calibrate   all schedules over the calibration documents; hidden states of scored tokens are spooled
    fit         temperature (with its refits in every replicate) and affine probe of every schedule, from the spool
    evaluate    all schedules over the evaluation documents, batch by batch, each scored before the next

Both walks make every distinct prefix of the requested words once. Losses of all schedules and readouts refer to one
token table; with several noise seeds a document's sums run over the tokens of all seeds.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from looplab._types import Float, Int
from looplab.audit.bootstrap import (
    DocumentSums,
    ScheduleSums,
    TemperatureReplicates,
    TemperatureSums,
    refit_replicates,
)
from looplab.audit.config import AuditConfig
from looplab.audit.documents import Batch, Domain, Split
from looplab.audit.probes import (
    Affine,
    LogitChunks,
    Temperature,
    TokenScores,
    divergence,
    exact_refit,
    fit_affine,
    fit_temperature,
    leading_tokens,
    token_nll,
    token_scores,
)
from looplab.audit.result import RAW, ScheduleEntry
from looplab.audit.runner import Runner
from looplab.audit.schedules import FullPlan, Word, live_states, minimal_applications, naive_applications, trie
from looplab.audit.self_tests import check_finite
from looplab.audit.spool import Spool
from looplab.intervals import document_draws
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.loop import walk
from looplab.recurrence.plan import Plan, PlanNode

FULL, TEMPERATURE, AFFINE = "full", "temperature", "affine"


@dataclass(frozen=True, eq=False)
class Subject:
    """A model with the schedules that are run on it. `rows` is the whole map, struck-out rows included."""

    runner: Runner
    full: FullPlan
    rows: tuple[ScheduleEntry, ...]
    seeds: int

    @cached_property
    def words(self) -> dict[str, tuple[Plan, Word]]:
        """Plan and word of every schedule that is run; all words differ."""
        plans = {row.name: Plan.parse(row.plan) for row in self.rows if row.reason is None}
        return {name: (plan, self.full.word(plan)) for name, plan in plans.items()}

    @cached_property
    def tree(self) -> PlanNode:
        """The trie of all words."""
        return trie(self.words)

    @property
    def minimal(self) -> int:
        """Applications per document and seed of the shared walk."""
        return minimal_applications(word for _, word in self.words.values())

    @property
    def naive(self) -> int:
        """Applications per document and seed with every schedule of the map run alone."""
        return naive_applications(Plan.parse(row.plan) for row in self.rows)

    @property
    def live_states(self) -> int:
        """Most states held at once."""
        return live_states(self.tree)


@dataclass(frozen=True, eq=False)
class Fits:
    """The probes of one schedule."""

    temperature: Temperature | None
    replicates: TemperatureReplicates | None
    affine: Affine | None


@dataclass(eq=False)
class Work:
    """How a measurement is run, and what it leaves in passing."""

    config: AuditConfig
    batch_tokens: int
    spool_bytes: int
    ledgers: dict[str, Ledger]
    advanced: Callable[[str, str, int, int, str], None]
    keep_tokens: Callable[[str, str, dict[str, np.ndarray]], None] | None = None
    """Receives (domain, schedule, columns) of every scored batch."""

    def ledger(self, phase: str) -> Ledger:
        """The ledger of one phase."""
        return self.ledgers.setdefault(phase, Ledger())


def counting_head(runner: Runner, ledger: Ledger) -> Callable[[Tensor], Tensor]:
    """The head, counted."""

    def head(hidden: Tensor) -> Tensor:
        ledger.count_head(runner.spec, tokens=len(hidden), gradient=hidden.requires_grad)
        return runner.head(hidden)

    return head


def walk_batch(
    subject: Subject,
    batch: Batch,
    noise_seed: int,
    ledger: Ledger,
    diverged: dict[str, int],
    visit: Callable[[str, Float[Tensor, "tokens dim"]], None],
) -> None:
    """Runs every schedule over one batch; `visit` gets the hidden states of scored tokens, schedule by schedule.

    A schedule whose hidden states are not finite is entered in `diverged` with the application at fault, and skipped.

    Raises:
        NonFiniteError: That schedule is the full plan.
    """
    runner = subject.runner
    context, state = runner.start(batch.tokens, batch.valid, [d.item(noise_seed) for d in batch.documents], ledger)
    start = state

    def on_node(node: PlanNode, state: Any) -> None:
        hidden = runner.hidden(state, context)[batch.read]
        ledger.count_coda(runner.spec, rows=batch.tokens.shape[0], tokens=batch.tokens.shape[1])
        for name in node.wanted:
            if not bool(torch.isfinite(hidden).all()):
                if name == FULL:
                    for row, document in enumerate(batch.documents):
                        check_finite(hidden[batch.read[0] == row], document)
                diverged.setdefault(name, _first_bad(subject, name, batch, context, start))
            elif name not in diverged:
                visit(name, hidden)

    walk(runner.model, context, state, subject.tree, on_node, ledger=ledger)


def _first_bad(subject: Subject, name: str, batch: Batch, context: Any, state: Any) -> int:
    """Index of the first application of a schedule after which a scored token's hidden state is not finite."""
    plan = subject.words[name][0]
    for j in range(len(plan)):
        state = subject.runner.rollout(plan[j : j + 1], context, state)
        if not bool(torch.isfinite(subject.runner.hidden(state, context)[batch.read]).all()):
            break
    return j


@dataclass(frozen=True, eq=False)
class Table:
    """The token table of a split for several noise seeds: document after document, seed after seed inside each."""

    split: Split
    seeds: int

    @cached_property
    def targets(self) -> Int[Tensor, " rows"]:
        """The scored token of every row."""
        targets = torch.empty(self.seeds * self.split.tokens, dtype=torch.int64)
        for j in range(self.seeds):
            targets[self.place(torch.arange(self.split.tokens), j)] = self.split.targets
        return targets

    @cached_property
    def owners(self) -> Int[Tensor, " rows"]:
        """The document of every row."""
        return torch.arange(len(self.split.documents)).repeat_interleave(
            torch.from_numpy(self.seeds * self.split.counts)
        )

    def place(self, places: Int[Tensor, " tokens"], noise_seed: int) -> Int[Tensor, " tokens"]:
        """Rows of tokens, given by their places in the split's own table."""
        owner = self.split.owners[places]
        counts = torch.from_numpy(self.split.counts)
        starts = counts.cumsum(0) - counts
        return places + (self.seeds - 1) * starts[owner] + noise_seed * counts[owner]


def calibrate(
    subject: Subject, domain: Domain, work: Work, *, phase: str = "calibrate"
) -> tuple[dict[str, Fits], dict[str, int]]:
    """Walks the calibration documents and fits every probe.

    Returns:
        Schedule -> fits, and schedule -> application at which it diverged.
    """
    config, split = work.config, domain.calibration
    table = Table(split, subject.seeds)
    diverged: dict[str, int] = {}
    rows = subject.seeds * split.tokens
    with Spool(rows, len(subject.words), budget=work.spool_bytes) as spool:
        if config.probes:
            for batch, j, progress in _launches(subject, domain.name, split, work, phase):
                place = table.place(batch.place, j)

                def visit(name: str, hidden: Tensor, place: Tensor = place, progress: Any = progress) -> None:
                    spool.put(name, place, hidden)
                    progress(name)

                walk_batch(subject, batch, j, work.ledger(phase), diverged, visit)
        fits = {}
        running = [name for name in subject.words if name not in diverged]
        for done, name in enumerate(running, 1):
            with work.ledger(_fit(phase)).phase(_fit(phase)):
                fits[name] = _fits(
                    subject, domain, table, spool.get(name) if config.probes else None, work, _fit(phase)
                )
            spool.drop(name)
            work.advanced(_fit(phase), domain.name, done, len(running), name)
    return fits, diverged


def _fit(phase: str) -> str:
    return "fit" if phase == "calibrate" else phase


def _launches(
    subject: Subject, domain: str, split: Split, work: Work, phase: str
) -> Iterator[tuple[Batch, int, Callable[[str], None]]]:
    """Every batch for every noise seed, timed, with a callback that reports the phase's applications."""
    ledger = work.ledger(phase)
    total = subject.minimal * len(split.documents) * subject.seeds
    before = ledger.row_applications
    for batch in split.batches(work.batch_tokens):
        for j in range(subject.seeds):
            with ledger.phase(phase):
                yield batch, j, lambda name: work.advanced(phase, domain, ledger.row_applications - before, total, name)


def _fits(subject: Subject, domain: Domain, table: Table, hidden: Tensor | None, work: Work, phase: str) -> Fits:
    config = work.config
    if hidden is None:
        return Fits(None, None, None)
    head = counting_head(subject.runner, work.ledger(phase))
    temperature = replicates = affine = None
    if TEMPERATURE in config.probes:
        chunks = LogitChunks(hidden, head)
        temperature = fit_temperature(chunks, table.targets, table.owners)
        draws = document_draws(
            len(table.split.documents), config.replicates, seed=config.seed, domain=domain.name, split="calibration"
        )
        replicates = refit_replicates(temperature, draws, exact_refit(chunks, table.targets, table.owners))
    if AFFINE in config.probes:
        used = leading_tokens(table.owners, config.affine_tokens)
        keys = [document.key for document in table.split.documents[: int(table.owners[used - 1]) + 1]]
        affine = fit_affine(hidden[:used], head, table.targets[:used], table.owners[:used], keys)
    return Fits(temperature, replicates, affine)


@dataclass(eq=False)
class Scores:
    """Everything kept of one schedule on the evaluation documents.

    Arrays over tokens have one row per noise seed. `extra` are loss sums at further betas, in the order asked for.
    """

    confidence: dict[str, np.ndarray]
    correct: np.ndarray
    losses: dict[str, np.ndarray]
    """Readout -> loss sums, "seeds documents"."""
    derivatives: np.ndarray
    """First to third derivative sums at the fitted beta, "3 documents"."""
    extra: np.ndarray
    totals: dict[str, float] = field(default_factory=dict)
    """Sums over all tokens of what is reported as a mean."""

    @classmethod
    def empty(cls, split: Split, seeds: int, readouts: Sequence[str], extras: int) -> "Scores":
        """Zeros for `extras` further betas."""
        documents, tokens = len(split.documents), split.tokens
        return cls(
            confidence={name: np.zeros((seeds, tokens)) for name in (RAW, TEMPERATURE)},
            correct=np.zeros((seeds, tokens), dtype=bool),
            losses={name: np.zeros((seeds, documents)) for name in readouts},
            derivatives=np.zeros((3, documents)),
            extra=np.zeros((documents, extras)),
        )

    def add(self, name: str, values: np.ndarray) -> None:
        """Adds to a total."""
        self.totals[name] = self.totals.get(name, 0.0) + float(values.sum(dtype=np.float64))


def evaluate(
    subject: Subject,
    domain: Domain,
    fits: Mapping[str, Fits],
    diverged: dict[str, int],
    work: Work,
    *,
    cross: Mapping[str, Sequence[float]] | None = None,
    phase: str = "evaluate",
) -> dict[str, Scores]:
    """Walks and scores the evaluation documents.

    Args:
        diverged: Schedules to leave out; more are entered where they turn up here.
        cross: Schedule -> betas fitted on other domains, scored here too.
    """
    split = domain.evaluation
    readouts = (RAW, *work.config.probes)
    betas = {name: _betas(fit, (cross or {}).get(name, ())) for name, fit in fits.items()}
    scores = {name: Scores.empty(split, subject.seeds, readouts, len(betas[name])) for name in fits}
    document_of = {id(document): i for i, document in enumerate(split.documents)}
    for batch, j, progress in _launches(subject, domain.name, split, work, phase):
        rows = np.array([document_of[id(document)] for document in batch.documents])
        with Spool(len(batch.place), len(subject.words), budget=work.spool_bytes) as spool:
            everything = torch.arange(len(batch.place))

            def visit(
                name: str, hidden: Tensor, spool: Spool = spool, place: Tensor = everything, progress: Any = progress
            ) -> None:
                spool.put(name, place, hidden)
                progress(name)

            walk_batch(subject, batch, j, work.ledger(phase), diverged, visit)
            for name in subject.words:
                if name not in diverged:
                    _score(
                        subject, domain, batch, j, rows, name, spool, fits[name], betas[name], scores[name], work, phase
                    )
    return {name: kept for name, kept in scores.items() if name not in diverged}


def _betas(fit: Fits, cross: Sequence[float]) -> list[float]:
    exact = [] if fit.replicates is None else [float(beta) for beta in fit.replicates.exact_betas]
    return [*exact, *cross]


def _score(
    subject: Subject,
    domain: Domain,
    batch: Batch,
    noise_seed: int,
    rows: Int[np.ndarray, " batch"],
    name: str,
    spool: Spool,
    fit: Fits,
    betas: Sequence[float],
    kept: Scores,
    work: Work,
    phase: str,
) -> None:
    """Scores one schedule on one batch and adds it up."""
    head = counting_head(subject.runner, work.ledger(phase))
    targets, owners, place = domain.evaluation.targets[batch.place], batch.read[0], batch.place.numpy()
    hidden = spool.get(name)
    beta = 1.0 if fit.temperature is None else fit.temperature.beta
    scored = token_scores(hidden, head, targets, owners, beta=beta, extra_betas=betas)
    losses = {RAW: scored.raw.nll}
    if fit.temperature is not None:
        losses[TEMPERATURE] = scored.temperature.nll
    if fit.affine is not None:
        losses[AFFINE] = token_nll(fit.affine.apply(hidden), head, targets)
    kl, agree = divergence(hidden, spool.get(FULL), head)
    documents = owners.numpy()
    for readout, nll in losses.items():
        kept.losses[readout][noise_seed, rows] = np.bincount(documents, weights=nll, minlength=len(rows))
    kept.derivatives[:, rows] += np.stack([scored.sums.first, scored.sums.second, scored.sums.third])
    kept.extra[rows] += scored.extra
    kept.confidence[RAW][noise_seed, place] = scored.raw.confidence
    kept.confidence[TEMPERATURE][noise_seed, place] = scored.temperature.confidence
    kept.correct[noise_seed, place] = scored.correct
    for label, values in _means(scored, kl, agree):
        kept.add(label, values)
    if work.keep_tokens is not None:
        columns = _columns(domain.evaluation, batch, noise_seed, losses, scored, kl, agree)
        work.keep_tokens(domain.name, name, columns)


def _means(scored: TokenScores, kl: np.ndarray, agree: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    for readout, part in ((RAW, scored.raw), (TEMPERATURE, scored.temperature)):
        yield f"{readout} entropy", part.entropy
        yield f"{readout} brier", part.brier
    yield "logit norm", scored.logit_norm
    yield "centred norm", scored.centred_norm
    yield "kl", kl
    yield "agree", agree


def _columns(
    split: Split,
    batch: Batch,
    noise_seed: int,
    losses: Mapping[str, np.ndarray],
    scored: TokenScores,
    kl: np.ndarray,
    agree: np.ndarray,
) -> dict[str, np.ndarray]:
    """One row per scored token, for `tokens.parquet`."""
    place = batch.place
    columns: dict[str, np.ndarray] = {
        "document": split.owners[place].numpy().astype(np.int32),
        "position": split.positions[place].numpy().astype(np.int32),
        "token": split.targets[place].numpy().astype(np.int32),
        "noise_seed": np.full(len(place), noise_seed, dtype=np.int8),
        **{f"nll_{readout}": nll.astype(np.float32) for readout, nll in losses.items()},
    }
    for readout, part in ((RAW, scored.raw), (TEMPERATURE, scored.temperature)):
        if readout in losses:
            columns[f"confidence_{readout}"] = part.confidence.astype(np.float32)
            columns[f"entropy_{readout}"] = part.entropy.astype(np.float32)
            columns[f"brier_{readout}"] = part.brier.astype(np.float32)
    columns |= {
        "correct": scored.correct,
        "logit_norm": scored.logit_norm.astype(np.float32),
        "centred_norm": scored.centred_norm.astype(np.float32),
        "kl_to_full": kl.astype(np.float32),
        "agree_with_full": agree,
    }
    return columns


def schedule_sums(scores: Scores, fit: Fits, split: Split, seeds: int) -> ScheduleSums:
    """Per-document sums of one schedule, as the bootstrap takes them."""
    tokens = split.counts.astype(np.float64) * seeds
    summed = {readout: losses.sum(axis=0) for readout, losses in scores.losses.items()}
    temperature = None
    if fit.replicates is not None:
        first, second, third = scores.derivatives
        at_fit = DocumentSums(loss=summed[TEMPERATURE], first=first, second=second, third=third, tokens=tokens)
        exact = scores.extra[:, : len(fit.replicates.exact)]
        temperature = TemperatureSums(at_fit=at_fit, exact=exact, replicates=fit.replicates)
    total = float(split.counts.sum())
    by_seed = {readout: [float(x) for x in losses.sum(axis=1) / total] for readout, losses in scores.losses.items()}
    fixed = {readout: sums for readout, sums in summed.items() if readout not in (RAW, TEMPERATURE)}
    return ScheduleSums(raw=summed[RAW], fixed=fixed, temperature=temperature, seeds=by_seed)
