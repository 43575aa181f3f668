"""From measurements of one domain to its part of the result: losses, metrics, contrasts, decomposition, verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from looplab._types import Bool, Float
from looplab.audit.bootstrap import Losses, estimate, halley_steps
from looplab.audit.card import is_dense
from looplab.audit.case import AFFINE, TEMPERATURE, Case, Subject
from looplab.audit.collect import Collected, Scores
from looplab.audit.config import AuditConfig
from looplab.audit.control import compare_dense, gaps_per_byte
from looplab.audit.decompose import contrasts, decompositions, identify, probe_gains
from looplab.audit.depth_value import depth_value
from looplab.audit.documents import Domain
from looplab.audit.factorial import factorials
from looplab.audit.four_way import four_ways
from looplab.audit.geometry import Reference, geometry
from looplab.audit.measure import Fits
from looplab.audit.probes import Affine, FullRank
from looplab.audit.result import (
    DENSE_MESSAGE,
    RAW,
    AffineFit,
    Answers,
    AnswerScore,
    Contrast,
    ControlComparison,
    Decomposition,
    DenseControl,
    DepthValue,
    DocumentCounts,
    DomainResult,
    Estimate,
    FullRankFit,
    ModelCard,
    ProbeGain,
    ProbeLoss,
    ReliabilityBin,
    ScheduleResult,
    Stratum,
    TemperatureFit,
    TokenMetrics,
    Verdict,
)
from looplab.audit.strata import BUCKETS, StratumSums, position_buckets, strata
from looplab.audit.updates import token_components, updates
from looplab.audit.verdict import verdict
from looplab.intervals import Draws, expected_calibration_error, wilson
from looplab.recurrence.plan import Plan

BINS = 15


@dataclass(frozen=True, eq=False, kw_only=True)
class Measured:
    """One case with its losses in all replicates."""

    collected: Collected
    losses: Losses
    answers: Mapping[tuple[str, str], Estimate] = field(default_factory=dict)
    """(readout, schedule) -> share of problems that are answered right; empty where documents are none."""
    cross: tuple[str, ...]
    """Other domains whose temperatures were scored here."""

    @property
    def case(self) -> Case:
        """What was measured."""
        return self.collected.case

    @property
    def subject(self) -> Subject:
        """The model with its schedules."""
        return self.case.subject

    @property
    def domain(self) -> Domain:
        """The documents."""
        return self.case.domain

    @property
    def config(self) -> AuditConfig:
        """The settings."""
        return self.case.config

    @property
    def fits(self) -> dict[str, Fits]:
        """The probes of every schedule."""
        return self.collected.fits

    @property
    def scores(self) -> dict[str, Scores]:
        """The scores of every schedule."""
        return self.collected.scores

    @property
    def diverged(self) -> dict[str, int]:
        """Schedule -> application at which it diverged."""
        return self.collected.diverged

    @property
    def unmeasured(self) -> dict[str, str]:
        """Schedules without a number, aliases included."""
        missing = {name: f"diverged at application {j}" for name, j in self.diverged.items()}
        return {
            row.name: missing[origin] for row in self.subject.rows if (origin := row.same_as or row.name) in missing
        }

    @property
    def reasons(self) -> dict[tuple[str, str], str]:
        """Contrasts that the words cannot tell apart."""
        return identify(self.subject.rows, units=self.subject.full.M, kmid=self.subject.full.kmid)

    @property
    def grid(self) -> tuple[int, ...]:
        """Every k below M at which a prefix was measured."""
        names = self.scores
        return tuple(row.k for row in self.subject.rows if row.family == "prefix" and row.k and row.name in names)


def domain_result(
    part: Measured,
    controlled: Measured | None,
    control_card: ModelCard | None,
    card: ModelCard,
    milliseconds: Mapping[str, float] | None = None,
) -> DomainResult:
    """Statistics and verdict of one domain.

    Args:
        controlled: The dense control on the same documents.
        milliseconds: Schedule -> measured milliseconds per token, where the result is to hold times.
    """
    full, losses = part.subject.full, part.losses
    dense = is_dense(full)
    split: tuple[Decomposition, ...] = ()
    if not dense:
        split = decompositions(
            losses,
            units=full.M,
            kmid=full.kmid,
            reasons=part.reasons,
            unmeasured=part.unmeasured,
            config=part.config,
        )
    gains = _gains(part)
    control = None
    if controlled is not None and control_card is not None:
        control = _control_result(part, controlled, control_card)
    square, no_square = ((), None) if dense else factorials(part.losses, part.subject.rows, **_structure(part))
    return DomainResult(
        name=part.domain.name,
        documents=_document_counts(part),
        schedules=_schedule_results(part),
        contrasts=_contrasts(part),
        decompositions=split,
        gains=gains,
        gaps_per_byte=_gaps_per_byte(part),
        control=control,
        verdict=_verdict(part, split, gains, control.comparisons if control else ()),
        four_way=() if dense else four_ways(part.losses, part.subject.rows, **_structure(part)),
        factorials=square,
        no_factorial=no_square,
        strata=() if dense else _strata(part),
        depth_value=_depth_value(part, card, milliseconds),
        answers=_answers(part),
    )


def exact_matches(part: Collected, draws: Draws) -> dict[tuple[str, str], Estimate]:
    """(readout, schedule) -> share of problems with every cell right; a problem counts once, however many seeds."""
    level, split, found = part.case.config.level, part.case.domain.evaluation, {}
    cells = split.counts * part.case.subject.runner.spec.cells
    for schedule, kept in part.scores.items():
        for readout, right in kept.right.items():
            exact = (right == cells).mean(axis=0)
            replicates = draws.sums(exact[:, None])[:, 0] / len(exact)
            found[readout, schedule] = estimate(float(exact.mean()), replicates, units=len(exact), level=level)
    return found


def _answers(part: Measured) -> Answers | None:
    task = part.domain.task
    if task is None:
        return None
    level, seeds = part.config.level, part.subject.seeds
    cells = part.domain.evaluation.counts * task.cells
    scores = []
    for (readout, schedule), exact in part.answers.items():
        right = part.scores[schedule].right[readout]
        score = None
        if seeds == 1:
            interval = wilson(int((right == cells).sum()), right.size, level=level)
            score = (interval.low, interval.high)
        share = float(right.sum() / (seeds * cells.sum()))
        scores.append(AnswerScore(schedule=schedule, probe=readout, exact=exact, wilson=score, cells=share))
    return Answers(task=task, scores=tuple(scores))


def _structure(part: Measured) -> dict[str, Any]:
    """What every decomposition is told about the model."""
    full = part.subject.full
    return {
        "units": full.M,
        "kmid": full.kmid,
        "reasons": part.reasons,
        "unmeasured": part.unmeasured,
        "config": part.config,
    }


def _strata(part: Measured) -> tuple[Stratum, ...]:
    split = part.domain.evaluation
    origin = {row.name: row.same_as or row.name for row in part.subject.rows}
    full = part.subject.full
    wanted = {"prefix(1)", "repeat(1)", f"repeat({full.kmid})", "full"}
    losses = {
        (readout, name): sums
        for name, own in origin.items()
        if name in wanted and own in part.scores
        for readout, sums in part.scores[own].buckets.items()
    }
    place = split.owners.numpy() * len(BUCKETS) + position_buckets(split.positions.numpy())
    tokens = np.bincount(place, minlength=len(split.documents) * len(BUCKETS)).reshape(-1, len(BUCKETS))
    sums = StratumSums(losses=losses, tokens=tokens, lengths=split.lengths, seeds=part.subject.seeds)
    return strata(sums, domain=part.domain.name, **_structure(part))


def _depth_value(part: Measured, card: ModelCard, milliseconds: Mapping[str, float] | None) -> DepthValue | None:
    spec, weights = part.subject.runner.spec, part.subject.runner.weights
    longest = max(len(row.tokens) for row in part.domain.evaluation.rows)
    return depth_value(
        part.losses,
        part.subject.rows,
        domain=part.domain.name,
        full=part.subject.full,
        spec=spec,
        unmeasured=part.unmeasured,
        trained_units=card.trained_units,
        config=part.config,
        context_tokens=longest,
        itemsize=weights.element_size(),
        milliseconds=milliseconds,
    )


def _gains(part: Measured) -> tuple[ProbeGain, ...]:
    units = part.subject.full.M
    return probe_gains(part.losses, grid=part.grid, units=units, reasons=part.reasons, config=part.config)


def _gaps_per_byte(part: Measured) -> dict[str, Estimate]:
    if not part.losses.num_bytes:
        return {}  # grids
    units = part.subject.full.M
    return gaps_per_byte(part.losses, grid=part.grid, units=units, reasons=part.reasons, config=part.config)


def _contrasts(part: Measured) -> tuple[Contrast, ...]:
    return contrasts(
        part.losses, part.subject.rows, reasons=part.reasons, unmeasured=part.unmeasured, config=part.config
    )


def _control_result(part: Measured, controlled: Measured, card: ModelCard) -> DenseControl:
    comparisons: tuple[ControlComparison, ...] = ()
    if part.grid and controlled.grid:
        comparisons = compare_dense(
            part.losses,
            controlled.losses,
            looped_grid=part.grid,
            dense_grid=controlled.grid,
            config=part.config,
        )
    return DenseControl(
        model=card,
        schedule_map=controlled.subject.rows,
        schedules=_schedule_results(controlled),
        contrasts=_contrasts(controlled),
        gains=_gains(controlled),
        gaps_per_byte=_gaps_per_byte(controlled),
        comparisons=comparisons,
    )


def _document_counts(part: Measured) -> DocumentCounts:
    domain = part.domain
    evaluation, calibration = domain.evaluation, domain.calibration
    everything = (*evaluation.documents, *calibration.documents)
    affine = AFFINE in part.config.probes
    return DocumentCounts(
        source=domain.source,
        data_hash=domain.data_hash,
        read=domain.read,
        duplicates=domain.duplicates,
        empty=domain.empty,
        unscored=domain.unscored,
        evaluation=len(evaluation.documents),
        calibration=len(calibration.documents),
        evaluation_tokens=evaluation.tokens,
        calibration_tokens=calibration.tokens,
        evaluation_bytes=int(evaluation.text_bytes.sum()) or None,
        affine_tokens=calibration.head(part.config.affine_tokens).tokens if affine else 0,
        longest=int(max(evaluation.lengths.max(), calibration.lengths.max())),
        cut=sum(document.cut for document in everything),
        overlap=domain.overlap,
        padding=evaluation.padding(part.case.batch_tokens, padded=part.subject.runner.pads),
    )


def _schedule_results(part: Measured) -> tuple[ScheduleResult, ...]:
    results = []
    samples = part.scores["full"].samples
    references = {site: Reference(vectors) for site, vectors in samples.items()}
    for row in part.subject.rows:
        if row.name in part.diverged:
            results.append(_diverged(row.name, row.k, part.diverged[row.name]))
        elif row.name in part.scores:
            results.append(_schedule_result(part, row.name, row.k, references))
    return tuple(results)


def _schedule_result(part: Measured, name: str, k: int | None, references: Mapping[str, Reference]) -> ScheduleResult:
    losses, kept, fit = part.losses, part.scores[name], part.fits[name]
    per_byte = losses.tokens / losses.num_bytes if losses.num_bytes else None
    return ScheduleResult(
        name=name,
        k=k,
        diverged_at=None,
        losses=tuple(
            ProbeLoss(
                probe=readout,
                loss=losses.estimate({(readout, name): 1.0}, part.config.level),
                per_byte=None if per_byte is None else losses.points[readout, name] * per_byte,
                seeds=tuple(losses.tables[name].seeds[readout]),
            )
            for readout in losses.readouts
        ),
        temperature=_temperature(part, name),
        affine=None if fit.affine is None else _affine(fit.affine),
        full_rank=None if fit.full_rank is None else _full_rank(fit.full_rank),
        metrics=tuple(_metrics(kept, probe) for probe in (RAW, TEMPERATURE) if probe in losses.readouts),
        geometry=tuple(geometry(kept.samples[site], reference, site=site) for site, reference in references.items()),
        updates=() if kept.updates is None else updates(kept.updates, *_plan_and_components(part, name)),
    )


def _plan_and_components(part: Measured, name: str) -> tuple[Plan, tuple[str, ...]]:
    return part.subject.words[name][0], token_components(part.subject.runner.spec.state)


def _temperature(part: Measured, name: str) -> TemperatureFit | None:
    fit, kept = part.fits[name], part.scores[name]
    if fit.temperature is None or fit.replicates is None:
        return None
    low = high = None
    if not fit.temperature.boundary:
        units = len(part.domain.calibration.documents)
        betas = estimate(fit.temperature.beta, fit.replicates.betas, units=units, level=part.config.level)
        low, high = (1 / beta if beta > 0 else None for beta in (betas.high, betas.low))
    cross = {other: float(kept.cross[other].sum() / part.losses.tokens) for other in part.cross if other in kept.cross}
    return TemperatureFit(
        beta=fit.temperature.beta,
        temperature=fit.temperature.temperature,
        status=fit.temperature.status,
        low=low,
        high=high,
        passes=fit.temperature.passes,
        in_sample=_in_sample(fit, kept),
        cross=cross,
    )


def _verdict(
    part: Measured,
    split: Sequence[Decomposition],
    gains: Sequence[ProbeGain],
    comparisons: Sequence[ControlComparison],
) -> Verdict:
    if is_dense(part.subject.full):
        return Verdict(sentence=DENSE_MESSAGE, words={}, best_probe=None, probe_words={}, recurrence="not measured")
    return verdict(
        part.domain.name,
        applications=len(part.subject.full.plan),
        first=len(part.subject.full.units[0]),
        decomposition=split[0] if split else None,
        gains=gains,
        comparisons=comparisons,
        reason=part.unmeasured.get("prefix(1)", ""),
    )


def _diverged(name: str, k: int | None, j: int) -> ScheduleResult:
    return ScheduleResult(name=name, k=k, diverged_at=j, losses=(), temperature=None, affine=None, metrics=())


def _affine(found: Affine) -> AffineFit:
    return AffineFit(
        penalty=found.strength if np.isfinite(found.strength) else None,
        converged=found.converged,
        convex=found.convex,
        iterations=found.iterations,
    )


def _full_rank(found: FullRank) -> FullRankFit:
    return FullRankFit(
        objective=found.objective,
        penalty=found.strength if np.isfinite(found.strength) else None,
        converged=found.converged,
        convex=found.convex,
        iterations=found.iterations,
        tokens=found.tokens,
    )


def _in_sample(fit: Fits, kept: Scores) -> float | None:
    """Temperature of the evaluation tokens themselves: one Halley step from the fitted beta, on their exact sums."""
    assert fit.temperature is not None
    if fit.temperature.boundary:
        return None
    sums = np.stack([kept.losses[TEMPERATURE].sum(), *kept.derivatives.sum(axis=1)])[None]
    beta = fit.temperature.beta + float(halley_steps(sums)[0])
    return 1 / beta if np.isfinite(beta) and beta > 0 else None


def _metrics(kept: Scores, probe: str) -> TokenMetrics:
    confidence, correct = kept.confidence[probe].ravel(), kept.correct.ravel()
    mean = {label: total / len(correct) for label, total in kept.totals.items()}
    raw = probe == RAW
    return TokenMetrics(
        probe=probe,
        accuracy=float(correct.mean()),
        confidence=float(confidence.mean()),
        ece=expected_calibration_error(confidence, correct, bins=BINS),
        ece_equal_mass=expected_calibration_error(confidence, correct, bins=BINS, mass=True),
        brier=mean[f"{probe} brier"],
        entropy=mean[f"{probe} entropy"],
        logit_norm=mean["logit norm"] if raw else None,
        logit_norm_centred=mean["centred norm"] if raw else None,
        kl_to_full=mean["kl"] if raw else None,
        agreement_to_full=mean["agree"] if raw else None,
        bins=_bins(confidence, correct),
    )


def _bins(confidence: Float[np.ndarray, " tokens"], correct: Bool[np.ndarray, " tokens"]) -> tuple[ReliabilityBin, ...]:
    edges = np.linspace(0, 1, BINS + 1)
    index = np.clip(np.searchsorted(edges, confidence, side="left") - 1, 0, BINS - 1)
    counts, hits, sums = (np.bincount(index, weights=w, minlength=BINS) for w in (None, correct, confidence))
    return tuple(
        ReliabilityBin(
            low=float(edges[b]),
            high=float(edges[b + 1]),
            count=int(counts[b]),
            accuracy=float(hits[b] / max(1, counts[b])),
            confidence=float(sums[b] / max(1, counts[b])),
        )
        for b in range(BINS)
    )
