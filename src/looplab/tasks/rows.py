"""Rows of a task for training: batches that are a pure function of the step, with nothing to save.

    row r of step t is problem number t * rows + r of the run's key

All problems of a step have one difficulty, so no row is padded; where several are trained, each step draws one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from looplab._config import config_hash
from looplab._types import Int
from looplab.data.documents import DataError
from looplab.data.packing import Batch, DataState, Position, SourceHash, checked_rows
from looplab.recurrence.philox import stream_key, uniforms
from looplab.tasks.base import Split, Task, to_torch
from looplab.tasks.evaluation import answer_labels


@dataclass(frozen=True, kw_only=True)
class TaskRows:
    """A task, the difficulties to train at, and the rows of the global batch."""

    task: Task
    rows: int
    difficulties: tuple[int, ...] | None = None
    """Each step draws one, with equal probability; None: those of the task."""
    split: Split = "train"
    answer_only: bool = False
    """Drop the labels of intermediate values."""

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"TaskRows.rows must be at least 1. Got {self.rows}. Raise it.")
        if self.difficulties is not None and not self.difficulties:
            raise ValueError("TaskRows.difficulties must name at least one, or be None. Got none.")
        for difficulty in self.drawn:
            self.task.check(difficulty)
            if self.split == "train" and difficulty not in self.task.train_difficulties:
                trained = ", ".join(map(str, self.task.train_difficulties))
                raise ValueError(
                    f"TaskRows.difficulties must be among those that {self.task.name} trains at ({trained}), as the "
                    f"others are for tests. Got {difficulty}. Change the task's own range"
                )

    @property
    def drawn(self) -> tuple[int, ...]:
        """The difficulties that steps draw from."""
        return self.task.train_difficulties if self.difficulties is None else self.difficulties

    @property
    def seq_len(self) -> int:
        """Tokens of the longest row."""
        return max(self.task.length(difficulty) for difficulty in self.drawn)

    @property
    def tokenizer(self) -> str:
        """Tasks state problems in tokens of their own."""
        return "task"

    def load(self, *, seed: int, vocab_size: int) -> "TaskLoader":
        """The batches of a run.

        Args:
            vocab_size: Token ids that the model reads.
        Raises:
            DataError: The task has more tokens than that.
        """
        return TaskLoader(self, seed=seed, vocab_size=vocab_size)


class TaskLoader:
    """Batches by step number.

    Attributes:
        hash: Of the task and its version.
        num_tokens: Tokens until rows would repeat: they never do.
    """

    def __init__(self, config: TaskRows, *, seed: int, vocab_size: int):
        self._config, self._seed = config, seed
        task = config.task
        if len(task.tokens) > vocab_size:
            raise DataError(
                f"{task.name} has {len(task.tokens)} tokens, but the model reads {vocab_size}: give it as many."
            )
        self.task = task
        self.hash = f"{task.name}-{task.version}-{config_hash(config)}"
        self.tokenizer_hash = f"{task.name}-{task.version}"
        self.num_tokens = 2**63 - 1

    def batch(self, step: int, *, rows: Int[Tensor, " batch"] | None = None) -> Batch:
        """Some rows of the global batch of a step (from 0), in this order; None: all of them."""
        if step < 0:
            raise ValueError(f"batch: step must be at least 0. Got {step}. Steps count from 0.")
        first, wanted = step * self._config.rows, checked_rows(rows, self._config.rows)
        batch = self.numbered(self.difficulty(step), [first + int(row) for row in wanted])
        return replace(batch, rows=torch.from_numpy(wanted), start=Position(0, first, 0))

    def numbered(self, difficulty: int, numbers: Sequence[int]) -> Batch:
        """The rows of these numbers, in this order."""
        tokens, labels = self.task.batch(difficulty, self._seed, numbers, self._config.split)
        if self._config.answer_only:
            labels = answer_labels(self.task, difficulty, labels)
        rows = np.arange(len(numbers), dtype=np.int64)
        return Batch(
            tokens=to_torch(tokens),
            labels=to_torch(labels),
            positions=torch.arange(tokens.shape[1]).expand(tokens.shape).contiguous(),
            document_ids=None,
            rows=torch.from_numpy(rows),
            start=Position(0, int(numbers[0]), 0),
            data_hash=self.hash,
            task=self.task,
            difficulty=difficulty,
        )

    def difficulty(self, step: int) -> int:
        """What the rows of a step have in common."""
        drawn = self._config.drawn
        u = uniforms(stream_key(self._seed, "task"), step, np.zeros(1, np.int64))[0]
        return drawn[int(u * len(drawn))]

    def state(self, step: int) -> DataState:
        """What to keep in a checkpoint whose next step is `step`."""
        source = SourceHash(name=self.task.name, hash=self.hash)
        return DataState(
            step=step,
            position=Position(0, step * self._config.rows, 0),
            sources=(source,),
            tokenizer=self.tokenizer_hash,
        )

    def check(self, saved: DataState) -> None:
        """Make sure that resuming continues the same problems.

        Raises:
            DataError: The task, or its version, is another.
        """
        now = self.state(saved.step)
        if saved != now:
            raise DataError(
                f"the task changed since step {saved.step}: was {saved.sources[0].hash}, is {now.sources[0].hash}. "
                "Resume with the version that began."
            )
