"""The work of an audit as tasks: what is missing in the journal is done, in any process, and entered part by part.

    hidden states   one task per shard of every split that probes are fitted on
    fits            one task per schedule; then the hidden states of the schedule are dropped
    scores          one task per shard of evaluation documents

    <role>/<domain>/<split>/<shard>/<schedule>         hidden states
    <role>/<domain>/fits/<schedule>                    probes; only the fact for a schedule that diverged
    <role>/<domain>/evaluation/<shard>/<schedule>      scores
    <role>/<domain>/cross/<shard>/<schedule>           losses under the temperatures of other domains

Tasks do not depend on each other within a stage, so their parts are the same bits whoever does them, in any order.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from looplab.audit import measure
from looplab.audit.case import (
    CONTROL,
    EVALUATION,
    FULL,
    FULL_RANK,
    MODEL,
    TEMPERATURE,
    TRAINING,
    Case,
    Cases,
    Name,
    Table,
)
from looplab.audit.measure import Fits, Wanted
from looplab.audit.schedules import minimal_applications
from looplab.audit.watch import Watcher
from looplab.executors import Executor
from looplab.journal import Journal, Key, Part
from looplab.recurrence.ledger import Ledger

FITS, CROSS = "fits", "cross"
WALKED = "walked"
"""Fact of a fit: the counts of the walks that made its hidden states."""

Done = tuple[list[tuple[Key, Part]], Ledger]


@dataclass(frozen=True, eq=False, kw_only=True)
class WalkTask:
    """Walk one shard for a fit."""

    case: Name
    split: str
    shard: str
    names: tuple[str, ...]
    done: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.split} documents of {self.case[1]}, shard {self.shard}"

    def run(self, cases: Cases) -> Done:
        """The hidden states of every name."""
        case, ledger = cases[self.case], Ledger()
        shard = case.shards(self.split)[self.shard]
        parts = measure.hidden_states(case, self.split, shard, self.names, self.done, ledger, cases.progress)
        return [((*self.case, self.split, self.shard, name), part) for name, part in parts.items()], ledger


@dataclass(frozen=True, eq=False, kw_only=True)
class FitTask:
    """Fit the probes of one schedule."""

    case: Name
    schedule: str
    tables: dict[str, Part]
    full: dict[str, Part]
    walked: dict[str, object]

    def __str__(self) -> str:
        return f"probes of {self.schedule} on {self.case[1]}"

    def run(self, cases: Cases) -> Done:
        """The fits."""
        case, ledger = cases[self.case], Ledger()
        tables, full = ({split: _tensor(part) for split, part in side.items()} for side in (self.tables, self.full))
        part = measure.pack_fits(measure.fit(case, tables, full, ledger))
        part.facts.update({"counts": ledger.to_dict(times=False), WALKED: self.walked})
        return [((*self.case, FITS, self.schedule), part)], ledger


@dataclass(frozen=True, eq=False, kw_only=True)
class ScoreTask:
    """Walk and score one evaluation shard."""

    case: Name
    shard: str
    wanted: Wanted
    fits: dict[str, Fits]
    keep_tokens: bool
    spool_bytes: int

    def __str__(self) -> str:
        return f"evaluation documents of {self.case[1]}, shard {self.shard}"

    def run(self, cases: Cases) -> Done:
        """Scores, and losses under other domains' temperatures."""
        case, ledger = cases[self.case], Ledger()
        found, crossed = measure.scores(
            case,
            case.shards(EVALUATION)[self.shard],
            self.wanted,
            self.fits,
            ledger,
            cases.progress,
            keep_tokens=self.keep_tokens,
            spool_bytes=self.spool_bytes,
        )
        parts: list[tuple[Key, Part]] = [
            ((*self.case, CROSS, self.shard, name), part) for name, part in crossed.items()
        ]
        parts += [((*self.case, EVALUATION, self.shard, name), part) for name, part in found.items()]
        return parts, ledger


Task = WalkTask | FitTask | ScoreTask


def perform(cases: Cases, task: Task) -> Done:
    """Runs a task, in whatever process."""
    return task.run(cases)


def _tensor(part: Part) -> Tensor:
    return measure.as_tensor(part.arrays["hidden"], part.facts["dtype"])


@dataclass(eq=False, kw_only=True)
class Work:
    """What is to be done, with what, and where it is entered."""

    cases: Mapping[Name, Case]
    journal: Journal
    executor: Executor
    watcher: Watcher
    make: Callable[[], Mapping[Name, Case]] | None = None
    """Makes the cases again in another process."""
    keep_tokens: bool = False
    keep_hidden: bool = False
    spool_bytes: int = 2**30
    ran: dict[str, Ledger] = field(default_factory=dict)
    """What this process and its workers ran, by phase."""

    def run(self) -> None:
        """Does everything that the journal lacks."""
        self._run_all("calibrate", [task for name in self.cases for task in self._walks(name)])
        self._run_all("fit", self._fits(), total=sum(len(self._unfitted(name)) for name in self.cases))
        if not self.keep_hidden:  # what was left where a process was killed between a fit and its tidying up
            for name, case in self.cases.items():
                for split in case.fitted_splits:
                    self.journal.drop((*name, split))
        self._run_all("evaluate", [task for name in self.cases for task in self._scores(name)])

    def fits(self, name: Name) -> dict[str, Fits]:
        """The fits of every schedule that did not diverge on calibration documents."""
        parts = {schedule: self.journal.get((*name, FITS, schedule)) for schedule in self.cases[name].subject.words}
        return {s: measure.unpack_fits(part) for s, part in parts.items() if "diverged" not in part.facts}

    def _unfitted(self, name: Name) -> list[str]:
        return [s for s in self.cases[name].subject.words if (*name, FITS, s) not in self.journal]

    def _walks(self, name: Name) -> Iterable[WalkTask]:
        case, unfitted = self.cases[name], self._unfitted(name)
        fitted = [s for s in case.subject.words if s not in unfitted]
        for split in case.fitted_splits:
            target = [FULL] if split == TRAINING and unfitted and _fits_to_full(case) else []
            for shard in case.shards(split):
                have = [s for s in case.subject.words if (*name, split, shard, s) in self.journal]
                missing = tuple(s for s in dict.fromkeys([*target, *unfitted]) if s not in have)
                if missing:
                    done = tuple(s for s in case.subject.words if s in (*have, *fitted))
                    yield WalkTask(case=name, split=split, shard=shard, names=missing, done=done)

    def _fits(self) -> Iterable[FitTask]:
        """Fit tasks, each made when it is asked for; enters what needs no fit."""
        for name, case in self.cases.items():
            for schedule in self._unfitted(name):
                keys = {
                    split: [(*name, split, shard, schedule) for shard in case.shards(split)]
                    for split in case.fitted_splits
                }
                facts = [self.journal.get(key, arrays=False).facts for found in keys.values() for key in found]
                walked = sum((Ledger.from_dict(fact["counts"]) for fact in facts), Ledger()).to_dict(times=False)
                diverged = [fact["diverged"] for fact in facts if "diverged" in fact]
                if diverged or not case.config.probes:
                    known = {"diverged": diverged[0]} if diverged else {}
                    part = Part(facts={**known, "counts": Ledger().to_dict(times=False), WALKED: walked})
                    self.journal.put((*name, FITS, schedule), part)
                    continue
                tables = {split: self._gather(name, split, schedule) for split in keys}
                full = {TRAINING: self._gather(name, TRAINING, FULL)} if _fits_to_full(case) else {}
                yield FitTask(case=name, schedule=schedule, tables=tables, full=full, walked=walked)

    def _gather(self, name: Name, split: str, schedule: str) -> Part:
        """The hidden states of all shards, in the order of the split's token table."""
        case = self.cases[name]
        table = Table(case.split(split), case.subject.seeds)
        parts = {shard: self.journal.get((*name, split, shard, schedule)) for shard in case.shards(split)}
        first = next(iter(parts.values()))
        whole = np.empty((table.rows, first.arrays["hidden"].shape[1]), dtype=first.arrays["hidden"].dtype)
        for shard_name, part in parts.items():
            shard = case.shards(split)[shard_name]
            whole[table.place(shard.batch.place, shard.noise_seed).numpy()] = part.arrays["hidden"]
        return Part({"hidden": whole}, {"dtype": first.facts["dtype"]})

    def _scores(self, name: Name) -> Iterable[ScoreTask]:
        case, fits = self.cases[name], self.fits(name)
        others = self._betas_elsewhere(name)
        for shard in case.shards(EVALUATION):
            have = [s for s in fits if (*name, EVALUATION, shard, s) in self.journal]
            missing = tuple(s for s in fits if s not in have)
            crossed = {s: betas for s, betas in others.items() if self._lacks(name, shard, s, betas)}
            if missing or crossed:
                yield ScoreTask(
                    case=name,
                    shard=shard,
                    wanted=Wanted(missing, tuple(have), crossed),
                    fits={s: fits[s] for s in missing},
                    keep_tokens=self.keep_tokens and name[0] == MODEL,
                    spool_bytes=self.spool_bytes,
                )

    def _betas_elsewhere(self, name: Name) -> dict[str, dict[str, float]]:
        """Schedule -> other domain -> the beta fitted there, for full and its prefixes."""
        role, domain = name
        case = self.cases[name]
        if role == CONTROL or TEMPERATURE not in case.config.probes:
            return {}
        found: dict[str, dict[str, float]] = {}
        for other in (n for n in self.cases if n[0] == role and n[1] != domain):
            for schedule, fit in self.fits(other).items():
                if schedule in case.subject.chain and fit.temperature is not None:
                    found.setdefault(schedule, {})[other[1]] = fit.temperature.beta
        return {s: betas for s, betas in found.items() if "diverged" not in self._fit_facts(name, s)}

    def _fit_facts(self, name: Name, schedule: str) -> dict[str, object]:
        return self.journal.get((*name, FITS, schedule), arrays=False).facts

    def _lacks(self, name: Name, shard: str, schedule: str, betas: Mapping[str, float]) -> bool:
        key = (*name, CROSS, shard, schedule)
        return key not in self.journal or not set(betas) <= set(self.journal.get(key).arrays)

    def _run_all(self, phase: str, tasks: Iterable[Task], total: int | None = None) -> None:
        """Runs tasks and enters their parts, telling the watcher how many of `total` (default: applications) are done.

        Fits are counted one by one, and made while the ones before run.
        """
        if total is None:
            tasks = list(tasks)
            total = sum(map(self._size, tasks))
        if total == 0:
            return
        self.watcher.advanced(phase, "", 0, total, "")
        finished = 0
        sent: list[Task] = []
        pool = Cases(self.make, self.cases)
        pool.progress = lambda schedule, n: self.watcher.advanced(
            phase, _title(sent[-1]), finished + n, total, schedule
        )
        for outcome in self.executor.run(perform, _noted(tasks, sent), shared=pool, describe=str):
            task, (parts, ledger) = sent[outcome.index], outcome.value
            for key, part in parts:
                self.journal.put(key, part)
            self.ran.setdefault(CONTROL if task.case[0] == CONTROL else phase, Ledger()).add(ledger)
            finished += self._size(task)
            if isinstance(task, FitTask):
                self._free(task)
            self.watcher.advanced(phase, _title(task), finished, total, getattr(task, "schedule", ""))

    def _free(self, task: FitTask) -> None:
        """Drops the hidden states that no fit needs any more; the full plan's may be the target of all others."""
        case = self.cases[task.case]
        if self.keep_hidden:
            return
        free = [task.schedule]
        if _fits_to_full(case):
            free = [s for s in free if s != FULL] + ([] if self._unfitted(task.case) else [FULL])
        for schedule in free:
            for split in case.fitted_splits:
                for shard in case.shards(split):
                    self.journal.drop((*task.case, split, shard, schedule))

    def _size(self, task: Task) -> int:
        """Applications that a walk makes; 1 for a fit."""
        if isinstance(task, FitTask):
            return 1
        case = self.cases[task.case]
        if isinstance(task, WalkTask):
            names, split = task.names, task.split
        else:
            wanted = task.wanted
            names, split = (*wanted.scores, *wanted.cross, *((FULL,) if wanted.scores else ())), EVALUATION
        words = (case.subject.words[name][1] for name in dict.fromkeys(names))
        return minimal_applications(words) * case.shards(split)[task.shard].rows


def _fits_to_full(case: Case) -> bool:
    """Whether a probe is fitted to the output of the full plan."""
    return FULL_RANK in case.config.probes and case.config.objective == "kl"


def _title(task: Task) -> str:
    role, domain = task.case
    return f"{domain} (control)" if role == CONTROL else domain


def _noted(tasks: Iterable[Task], sent: list[Task]) -> Iterator[Task]:
    for task in tasks:
        sent.append(task)
        yield task


def total_counts(journal: Journal, cases: Mapping[Name, Case]) -> dict[str, Ledger]:
    """First-time counts of all parts by phase: the same however often the audit was interrupted."""
    found: dict[str, Ledger] = {}
    for name, case in cases.items():
        for schedule in case.subject.words:
            facts = journal.get((*name, FITS, schedule), arrays=False).facts
            calibrated = [("calibrate", facts[WALKED]), ("fit", facts["counts"])] if case.config.probes else []
            keys = [(*name, EVALUATION, shard, schedule) for shard in case.shards(EVALUATION)]
            scored = [("evaluate", journal.get(key, arrays=False).facts["counts"]) for key in keys if key in journal]
            for phase, counts in (*calibrated, *scored):
                ledger = found.setdefault(CONTROL if name[0] == CONTROL else phase, Ledger())
                ledger.add(Ledger.from_dict(counts))
    return found
