"""One model on one domain, cut into shards: what is measured, independent of when, where and in which order.

A shard is one launch of the documents under one noise seed, fixed by the documents and `batch_tokens`. Whatever is
measured of it under one schedule is one part of the audit; the parts of all shards together are the measurement.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from looplab._types import Bool, Int
from looplab.audit.config import AuditConfig
from looplab.audit.documents import Batch, Domain, Split
from looplab.audit.geometry import chosen_tokens
from looplab.audit.result import ScheduleEntry
from looplab.audit.runner import Runner
from looplab.audit.schedules import FullPlan, Word, live_states, minimal_applications, naive_applications, trie
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.plan import Plan, PlanNode

MODEL, CONTROL = "model", "control"
"""Roles."""
TRAINING, CALIBRATION, EVALUATION = "training", "calibration", "evaluation"
"""Splits: of the full-rank probe, of all other fits, and of everything that is reported."""
FULL, TEMPERATURE, AFFINE, FULL_RANK = "full", "temperature", "affine", "full_rank"

Name = tuple[str, str]
"""A case: (role, domain)."""


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
    def chain(self) -> tuple[str, ...]:
        """Schedules that other domains' temperatures are scored under: full and its prefixes."""
        return tuple(row.name for row in self.rows if row.name in self.words and row.family in ("full", "prefix"))

    def tree(self, names: Sequence[str] | None = None) -> PlanNode:
        """The trie of the words of `names`, in the order of the map; default: of all."""
        return trie({name: pair for name, pair in self.words.items() if names is None or name in names})

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
        return live_states(self.tree())


@dataclass(frozen=True, eq=False)
class Shard:
    """One launch: rows of similar length, under one noise seed."""

    name: str
    batch: Batch
    noise_seed: int

    @property
    def rows(self) -> int:
        """Rows: documents, or windows of them."""
        return len(self.batch.documents)

    @property
    def items(self) -> list[int]:
        """What names the noise of every row."""
        return [document.item(self.noise_seed) for document in self.batch.documents]


@dataclass(frozen=True, eq=False, kw_only=True)
class Case:
    """One model on one domain."""

    role: str
    subject: Subject
    domain: Domain
    config: AuditConfig
    batch_tokens: int

    def split(self, name: str) -> Split:
        """The documents of one split."""
        return {
            TRAINING: self.domain.training,
            CALIBRATION: self.domain.calibration,
            EVALUATION: self.domain.evaluation,
        }[name]

    @cached_property
    def fitted_splits(self) -> tuple[str, ...]:
        """Splits whose hidden states the probes are fitted on."""
        if not self.config.probes:
            return ()
        return (TRAINING, CALIBRATION) if FULL_RANK in self.config.probes else (CALIBRATION,)

    @cached_property
    def sample(self) -> Bool[Tensor, " tokens"]:
        """Which rows of the evaluation token table geometry is measured on."""
        return chosen_tokens(self.domain.evaluation)

    def shards(self, split: str) -> dict[str, Shard]:
        """The shards of one split, by name, in order."""
        return self._shards[split]

    @cached_property
    def _shards(self) -> dict[str, dict[str, Shard]]:
        found: dict[str, dict[str, Shard]] = {}
        for split in (*self.fitted_splits, EVALUATION):
            batches = self.split(split).batches(self.batch_tokens, padded=self.subject.runner.pads)
            pairs = ((i, j) for i in range(len(batches)) for j in range(self.subject.seeds))
            named = (Shard(f"{i:05d}.{j}", batches[i], j) for i, j in pairs)
            found[split] = {shard.name: shard for shard in named}
        return found


class Cases:
    """The cases of an audit by name. Sent to another process, it takes the recipe along and not the models.

    `progress` receives (schedule, applications made) inside a task; only in the process that made the cases.
    """

    def __init__(self, make: Callable[[], Mapping[Name, Case]] | None = None, made: Mapping[Name, Case] | None = None):
        self._make, self._made = make, made
        self.progress: Callable[[str, int], None] = _silent

    def __getitem__(self, name: Name) -> Case:
        if self._made is None:
            assert self._make is not None
            self._made = self._make()
        return self._made[name]

    def __reduce__(self) -> tuple[Any, ...]:
        if self._make is None:
            raise ValueError("audit: several workers need a way to open the model. Audit with one worker.")
        return Cases, (self._make,)


def _silent(schedule: str, applications: int) -> None:
    pass


def owned(subject: Subject, shard: Shard, names: Sequence[str], done: Sequence[str]) -> dict[str, Ledger]:
    """What a walk over `names` does for the first time, after one over `done`, each node under its first schedule.

    The encoding belongs to the first schedule of the first walk. Sums over all schedules of a shard do not depend on
    how often it was interrupted.
    """
    spec = subject.runner.spec
    rows, tokens = shard.batch.tokens.shape
    seen = {subject.words[name][1][:n] for name in done for n in range(1, len(subject.words[name][1]) + 1)}
    ledgers = {}
    for name in (name for name in subject.words if name in names):
        ledger = ledgers[name] = Ledger()
        if not done and len(ledgers) == 1:
            ledger.count_encode(spec, rows=rows, tokens=tokens)
        plan, word = subject.words[name]
        for n, (block, _) in enumerate(plan, 1):
            if word[:n] not in seen:
                seen.add(word[:n])
                ledger.count_step(spec, block, rows=rows, tokens=tokens)
        ledger.count_coda(spec, rows=rows, tokens=tokens)
    return ledgers


@dataclass(frozen=True, eq=False)
class Table:
    """The token table of a split for several noise seeds: document after document, seed after seed inside each."""

    split: Split
    seeds: int

    @cached_property
    def rows(self) -> int:
        """Scored tokens of all seeds."""
        return self.seeds * self.split.tokens

    @cached_property
    def targets(self) -> Int[Tensor, "rows *cells"]:
        """The scored token of every row."""
        targets = torch.empty(self.rows, *self.split.targets.shape[1:], dtype=torch.int64)
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
