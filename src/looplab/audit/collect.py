"""The parts of one case, put together: what the statistics start from."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from looplab.audit.bootstrap import DocumentSums, ScheduleSums, TemperatureSums
from looplab.audit.case import AFFINE, EVALUATION, FULL_RANK, TEMPERATURE, Case, Name
from looplab.audit.documents import Split
from looplab.audit.measure import MEANS, Fits, as_tensor, unpack_fits
from looplab.audit.result import RAW
from looplab.audit.strata import BUCKETS
from looplab.audit.work import CROSS, FITS
from looplab.journal import Journal, Part


@dataclass(eq=False)
class Scores:
    """Everything kept of one schedule on the evaluation documents. Arrays over tokens have one row per noise seed."""

    confidence: dict[str, np.ndarray]
    correct: np.ndarray
    losses: dict[str, np.ndarray]
    """Readout -> loss sums, "seeds documents"."""
    derivatives: np.ndarray
    """First to third derivative sums at the fitted beta, "3 documents"."""
    extra: np.ndarray
    """Loss sums at every exactly refitted beta, "documents refits"."""
    cross: dict[str, np.ndarray]
    """Other domain -> loss sums under its temperature, " documents"."""
    totals: dict[str, float]
    """Sums over all tokens of what is reported as a mean."""
    buckets: dict[str, np.ndarray]
    """Readout -> loss sums by position bucket, "documents buckets"."""
    samples: dict[str, Tensor]
    """Site (hidden, state) -> vectors of the sampled tokens, "tokens dim"; empty for a control."""
    right: dict[str, np.ndarray]
    """Readout -> right cells, "seeds documents"; empty where documents are no problems of a task."""
    updates: np.ndarray | None
    """See `UpdateMeter`, "documents applications components 3 2"; None where updates were not measured."""

    @classmethod
    def empty(cls, split: Split, seeds: int, readouts: Sequence[str], extras: int) -> "Scores":
        """Zeros for `extras` exact refits."""
        documents, tokens = len(split.documents), split.tokens
        return cls(
            confidence={name: np.zeros((seeds, tokens)) for name in (RAW, TEMPERATURE)},
            correct=np.zeros((seeds, tokens), dtype=bool),
            losses={name: np.zeros((seeds, documents)) for name in readouts},
            derivatives=np.zeros((3, documents)),
            extra=np.zeros((documents, extras)),
            cross={},
            totals=dict.fromkeys(MEANS, 0.0),
            buckets={name: np.zeros((documents, len(BUCKETS))) for name in readouts},
            samples={},
            right={},
            updates=None,
        )

    def add(self, part: Part, rows: np.ndarray, place: np.ndarray, noise_seed: int, sample: np.ndarray) -> None:
        """Adds one shard: `rows` are the documents of its rows, `place` its tokens, in the order of the split.

        Several rows may belong to one document.

        `sample`: for every token of the split, its place in the sample, or -1.
        """
        arrays = part.arrays
        for readout, losses in self.losses.items():
            np.add.at(losses[noise_seed], rows, arrays[f"loss.{readout}"])
        np.add.at(self.derivatives.T, rows, arrays["derivatives"].T)
        np.add.at(self.extra, rows, arrays["extra"])
        for readout, confidence in self.confidence.items():
            confidence[noise_seed, place] = arrays[f"confidence.{readout}"]
        self.correct[noise_seed, place] = arrays["correct"]
        for name, total in zip(MEANS, arrays["totals"], strict=True):
            self.totals[name] += float(total)
        for readout, sums in self.buckets.items():
            np.add.at(sums, rows, arrays[f"bucket.{readout}"])
        for site, dtype in part.facts.get("dtypes", {}).items():
            vectors = as_tensor(arrays[f"sample.{site}"], dtype)
            if site not in self.samples:
                self.samples[site] = torch.zeros(int((sample >= 0).sum()), vectors.shape[1], dtype=vectors.dtype)
            self.samples[site][torch.from_numpy(sample[place][sample[place] >= 0])] = vectors
        for readout in (RAW, AFFINE, FULL_RANK):
            if f"right.{readout}" in arrays:
                cells = self.right.setdefault(readout, np.zeros_like(self.losses[RAW]))
                np.add.at(cells[noise_seed], rows, arrays[f"right.{readout}"])
        if "updates" in arrays:
            if self.updates is None:
                self.updates = np.zeros((self.buckets[RAW].shape[0], *arrays["updates"].shape[1:]))
            np.add.at(self.updates, rows, arrays["updates"])


@dataclass(frozen=True, eq=False)
class Collected:
    """One case, measured."""

    case: Case
    fits: dict[str, Fits]
    scores: dict[str, Scores]
    diverged: dict[str, int]
    """Schedule -> application at which it diverged."""


def collect(journal: Journal, name: Name, case: Case) -> Collected:
    """Reads all parts of a case; KeyError if one is missing."""
    split = case.domain.evaluation
    document_of = {id(row): int(i) for row, i in zip(split.rows, split.row_owners, strict=True)}
    fits, scores, diverged = {}, {}, {}
    chosen = case.sample.numpy()
    sample = np.where(chosen, np.cumsum(chosen) - 1, -1)
    for schedule in case.subject.words:
        part = journal.get((*name, FITS, schedule))
        if "diverged" in part.facts:
            diverged[schedule] = int(part.facts["diverged"])
            continue
        fit = fits[schedule] = unpack_fits(part)
        exact = 0 if fit.replicates is None else len(fit.replicates.exact)
        kept = Scores.empty(split, case.subject.seeds, (RAW, *case.config.probes), exact)
        for key, shard in case.shards(EVALUATION).items():
            part = journal.get((*name, EVALUATION, key, schedule))
            if "diverged" in part.facts:
                diverged[schedule] = int(part.facts["diverged"])
                break
            rows = np.array([document_of[id(document)] for document in shard.batch.documents])
            kept.add(part, rows, shard.batch.place.numpy(), shard.noise_seed, sample)
            crossing = (*name, CROSS, key, schedule)
            if crossing in journal:
                for other, losses in journal.get(crossing).arrays.items():
                    np.add.at(kept.cross.setdefault(other, np.zeros(len(split.documents))), rows, losses)
        else:
            scores[schedule] = kept
    return Collected(case, fits, scores, diverged)


def schedule_sums(scores: Scores, fit: Fits, split: Split, seeds: int) -> ScheduleSums:
    """Per-document sums of one schedule, as the bootstrap takes them."""
    tokens = split.counts.astype(np.float64) * seeds
    summed = {readout: losses.sum(axis=0) for readout, losses in scores.losses.items()}
    temperature = None
    if fit.replicates is not None:
        first, second, third = scores.derivatives
        at_fit = DocumentSums(loss=summed[TEMPERATURE], first=first, second=second, third=third, tokens=tokens)
        temperature = TemperatureSums(at_fit=at_fit, exact=scores.extra, replicates=fit.replicates)
    total = float(split.counts.sum())
    by_seed = {readout: [float(x) for x in losses.sum(axis=1) / total] for readout, losses in scores.losses.items()}
    fixed = {readout: sums for readout, sums in summed.items() if readout not in (RAW, TEMPERATURE)}
    return ScheduleSums(raw=summed[RAW], fixed=fixed, temperature=temperature, seeds=by_seed)
