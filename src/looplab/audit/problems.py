"""Problems of a task as documents: each difficulty a domain, scored where the answer stands.

    row           the problem's tokens; labels at the positions of its answer, cell by cell, -100 elsewhere
    calibration   problems of the validation split        evaluation   problems of the test split
                  with the full-rank probe: the half with u >= 1/2 of the first, and its training problems the other

A difficulty that is only tested, or that has too few problems for splits, has one split. Its sides are halves, as of
texts: u < 1/2 calibrates, u >= 1/2 evaluates, where u is a hash of the canonical form. So neither a problem nor its
image under a symmetry of the task is on both sides. Problem number `index` of the audit's seed is the same in every
audit, and the first ones are taken: smaller runs are subsets of larger ones.

A token that answers with several cells counts once: its loss is the sum of theirs, and it is right if all are.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from looplab._config import config_hash, to_dict
from looplab.audit.documents import MIN_CALIBRATION, MIN_EVALUATION, Domain, Split, unit
from looplab.audit.reading import ScoredDocument
from looplab.audit.result import TaskFacts
from looplab.data.documents import DataError
from looplab.recurrence.philox import stream_key
from looplab.tasks.base import IGNORED, Example, Task

REPEATS = 400
"""Draws in a row without a problem that is new and wanted, after which there are no more."""
THIRD = 0.5
"""With the full-rank probe: share of the calibration side that trains it."""


@dataclass(frozen=True, kw_only=True)
class Problems:
    """Problems of one difficulty.

    Raises:
        ValueError: A difficulty that the task does not have.
    """

    task: Task
    difficulty: int

    def __post_init__(self) -> None:
        self.task.check(self.difficulty)

    @property
    def domain(self) -> str:
        """The usual name of their domain."""
        return f"{self.task.name}-{self.difficulty}"

    @property
    def split(self) -> bool:
        """Whether the task keeps validation and test problems of this difficulty apart."""
        return self.difficulty in self.task.train_difficulties and self.task.held_out(self.difficulty)


def prepare_problems(
    name: str,
    problems: Problems,
    *,
    seed: int = 0,
    evaluation: int = 200,
    calibration: int = 200,
    calibration_tokens: int = 50_000,
    training: int = 0,
    puzzle_ids: bool | None = None,
) -> Domain:
    """Draws problems of one difficulty and puts them on their sides.

    Args:
        name: Of the domain.
        training: Problems of the full-rank probe, at most; they come from the calibration side.
        puzzle_ids: Whether the model reads puzzle ids, which are 0 then; None where it takes none.

    Raises:
        DataError: Too few problems of this difficulty exist.
    """
    task, difficulty = problems.task, problems.difficulty
    cut = THIRD if training else 0.0
    wanted = {"evaluation": evaluation, "calibration": calibration, "training": training}
    drawn = _Drawn(problems, stream_key(seed, "audit") >> 1, None if puzzle_ids is None else 0)

    def place(problem: Any) -> float:
        return unit(seed, task.canonical(problem).hex())

    if problems.split:
        near = {name: wanted[name] for name in ("calibration", "training")}
        found = drawn.take("test", {"evaluation": evaluation}, lambda problem: "evaluation")
        found |= drawn.take("validation", near, lambda p: "training" if place(p) < cut else "calibration")
    else:
        found = drawn.take(
            None,
            wanted,
            lambda p: "evaluation" if place(p) >= 0.5 else "training" if place(p) < cut / 2 else "calibration",
        )
    least = {"evaluation": MIN_EVALUATION, "calibration": MIN_CALIBRATION, "training": MIN_CALIBRATION * (training > 0)}
    if any(len(found[side]) < number for side, number in least.items()):
        needed = ", ".join(f"{number} {side}" for side, number in least.items() if number)
        got = ", ".join(str(len(found[side])) for side, number in least.items() if number)
        raise DataError(
            f"domain {name} needs different problems: {needed}. Got {got}: {task.name} has few of difficulty "
            f"{difficulty}. Give a larger --difficulty."
        )
    sides = {side: Split(tuple(rows)) for side, rows in found.items()}
    return Domain(
        name=name,
        source=f"task {task.name} version {task.version}, difficulty {difficulty}",
        data_hash=f"{task.name}-{task.version}-{config_hash(task)}-{difficulty}",
        read=drawn.drawn,
        duplicates=drawn.duplicates,
        empty=0,
        unscored=0,
        evaluation=sides["evaluation"],
        calibration=sides["calibration"].head(calibration_tokens),
        training=sides["training"],
        overlap=None,
        task=TaskFacts(
            name=task.name,
            version=task.version,
            options=to_dict(task),
            difficulty=difficulty,
            chance=float(task.chance(difficulty)),
            cells=task.cells,
            num_steps=task.num_steps(difficulty),
            sides="splits" if problems.split else "halves",
            trained=not task.held_out(difficulty),
        ),
    )


class _Drawn:
    """Problems drawn by number, each taken once."""

    def __init__(self, problems: Problems, key: int, puzzle_id: int | None):
        self._problems, self._key, self._puzzle_id = problems, key, puzzle_id
        self._seen: set[str] = set()
        self.drawn = self.duplicates = 0

    def take(
        self, split: Any, wanted: Mapping[str, int], side_of: Callable[[Any], str]
    ) -> dict[str, list[ScoredDocument]]:
        """The first problems of every side, until all have what is wanted or nothing new comes any more."""
        found: dict[str, list[ScoredDocument]] = {side: [] for side in wanted}
        misses = 0
        for index, problem in self._stream(split):
            row = self._row(self._problems.task.example(problem), index)
            new = row.key not in self._seen
            self._seen.add(row.key)
            self.drawn, self.duplicates = self.drawn + 1, self.duplicates + (not new)
            side = side_of(problem)
            misses = 0 if (useful := new and len(found[side]) < wanted[side]) else misses + 1
            if useful:
                found[side].append(row)
            if misses == REPEATS or all(len(found[side]) == number for side, number in wanted.items()):
                break
        return found

    def _stream(self, split: Any) -> Iterator[tuple[int, Any]]:
        task, difficulty = self._problems.task, self._problems.difficulty
        return ((index, task.sample(difficulty, self._key, index, split)) for index in itertools.count())

    def _row(self, example: Example, index: int) -> ScoredDocument:
        labels = np.full_like(example.labels, IGNORED)
        labels[example.answer] = example.labels[example.answer]
        scored = (labels != IGNORED).reshape(len(labels), -1)
        if bool((scored.any(axis=1) != scored.all(axis=1)).any()):
            raise ValueError(
                f"audit: a position of {self._problems.task.name} must answer with all of its cells. Got some that "
                "are not scored. Give every cell a label."
            )
        key = hashlib.sha256(example.tokens.astype("<i8").tobytes()).hexdigest()
        return ScoredDocument(
            key=key,
            content_key=key,
            tokens=example.tokens.astype(np.int32),
            first=0,
            text_bytes=0,
            text="",
            line=index,
            cut=False,
            labels=labels.astype(np.int32),
            puzzle_id=self._puzzle_id,
        )
