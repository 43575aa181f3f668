"""The contract of a task: problems out of nothing but (version, difficulty, key, index), and exact answers to them.

    problem = sample(difficulty, key, index)      the same bytes alone, in a batch, on any machine
    example = example(problem)                    tokens, and labels that stand at the position that answers
    trace   = reference(problem)                  every intermediate value, from the definition
    grade   = grade(problem, cells)               exact match and cells, never one word for both

Split: blake2b(version | canonical form) mod 100 puts a problem into train (0-79), validation (80-89) or test (90-99),
where the canonical form is the same for all problems that are equal up to a symmetry. So no problem is in two splits,
whatever the seed. A difficulty that is only ever tested (`test_difficulties`) needs no hash.

Where the intermediate values follow a rule that is local in position, a task also says how one iteration advances them
(`Progress`): value[j, k] = operation j applied to value[j - 1, k - 1].
"""

import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from looplab._config import config_hash
from looplab._registry import Registry
from looplab._types import Int
from looplab.recurrence.philox import philox, stream_key

TASKS: Registry[type["Task"]] = Registry("task", package="looplab.tasks")

IGNORED = -100
"""Label of a position that is not scored."""

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
SMALL_SPACE = 2000
"""A difficulty with fewer problems has no split: all of them are for training."""
ATTEMPTS = 100_000
"""Draws until a problem of the wanted split must have come."""


class Draws:
    """Random integers of one item: a pure function of its key and how many were drawn before."""

    def __init__(self, key: int, item: int, attempt: int = 0):
        self._key, self._item, self._attempt = key, item, attempt
        self._block, self._words = 0, np.empty(0, np.uint64)

    def integers(self, high: int, size: int) -> NDArray[np.int64]:
        """`size` integers, uniform on 0 .. high - 1 (up to a bias below high / 2^53)."""
        if not 1 <= high < 2**32:
            raise ValueError(f"Draws.integers: high must be from 1 to 2**32 - 1. Got {high}.")
        wide = self._take(2 * size).reshape(size, 2)
        fraction = ((wide[:, 0] >> np.uint64(5)) * 2.0**26 + (wide[:, 1] >> np.uint64(6))) * 2.0**-53
        return (fraction * high).astype(np.int64)

    def integer(self, high: int) -> int:
        """One integer, uniform on 0 .. high - 1."""
        return int(self.integers(high, 1)[0])

    def between(self, low: int, high: int) -> int:
        """One integer, uniform on low .. high, both included."""
        return low + self.integer(high - low + 1)

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self.integer(2**30) < probability * 2**30

    def choice(self, values: Sequence[Any]) -> Any:
        """One of the values."""
        return values[self.integer(len(values))]

    def permutation(self, size: int) -> list[int]:
        """The numbers 0 .. size - 1 in random order."""
        order = list(range(size))
        for last in range(size - 1, 0, -1):
            other = self.integer(last + 1)
            order[last], order[other] = order[other], order[last]
        return order

    def sample(self, values: Sequence[Any], count: int) -> list[Any]:
        """`count` different ones of the values, in random order."""
        return [values[i] for i in self.permutation(len(values))[:count]]

    def _take(self, count: int) -> NDArray[np.uint64]:
        while len(self._words) < count:
            blocks = np.arange(self._block, self._block + max(8, -(-count // 4)), dtype=np.uint64)
            counter = np.zeros((len(blocks), 4), np.uint64)
            counter[:, 0], counter[:, 1] = blocks, self._attempt
            counter[:, 2], counter[:, 3] = self._item & 0xFFFFFFFF, self._item >> 32
            self._words = np.concatenate([self._words, philox(counter, self._key).ravel()])
            self._block += len(blocks)
        taken, self._words = self._words[:count], self._words[count:]
        return taken


@dataclass(frozen=True, kw_only=True)
class Example:
    """One problem as a model reads it."""

    tokens: NDArray[np.int64]
    """[seq]"""
    labels: NDArray[np.int64]
    """[seq], or [seq, cells] where a position answers with several symbols; at the tokens' places, else IGNORED."""
    answer: slice
    """Positions whose labels are the answer; other labels are intermediate values."""


@dataclass(frozen=True)
class Trace:
    """What the reference interpreter found on its way."""

    values: tuple[Any, ...]
    """Value after 0, 1, .. operations (rounds, moves)."""
    answer: Any


@dataclass(frozen=True, kw_only=True)
class Grade:
    """How good a prediction is. "Accuracy" alone would not say which of the two it is."""

    exact: bool
    cells_right: int
    cells_total: int
    valid: bool | None = None
    """Where several answers are legal: whether this one is. None: there is one answer."""
    first_illegal: int | None = None
    """Move lists: number of the first illegal move."""
    truncated: bool = False
    """The reply was cut by its length limit: neither right nor wrong."""


class Task(ABC):
    """A family of problems. Concrete tasks are frozen keyword-only dataclasses: their fields are the task's options."""

    version: ClassVar[int] = 1
    """Raised when a problem of some (difficulty, key, index) is no longer the same."""
    reference_paper: ClassVar[str] = ""
    causal: ClassVar[bool] = True
    """Whether a position can be answered from what stands before it."""
    cells: int = 1
    """Symbols of one answering position."""

    @property
    @abstractmethod
    def tokens(self) -> tuple[str, ...]:
        """Name of every token id."""

    @property
    @abstractmethod
    def symbols(self) -> tuple[str, ...]:
        """Name of every answer symbol: of the label of a cell."""

    @property
    @abstractmethod
    def train_difficulties(self) -> tuple[int, ...]:
        """Difficulties to train at."""

    @property
    @abstractmethod
    def test_difficulties(self) -> tuple[int, ...]:
        """Difficulties to test at: those of training, and further ones."""

    @abstractmethod
    def draw(self, difficulty: int, draws: Draws) -> Any:
        """A random problem."""

    @abstractmethod
    def canonical(self, problem: Any) -> bytes:
        """The same for all problems that are equal up to a symmetry of the task."""

    @abstractmethod
    def example(self, problem: Any) -> Example:
        """The problem as tokens and labels."""

    @abstractmethod
    def decode(self, tokens: NDArray[np.int64]) -> Any:
        """The problem that these tokens state.

        Raises:
            ValueError: They state none.
        """

    @abstractmethod
    def reference(self, problem: Any) -> Trace:
        """All intermediate values and the answer, from the definition of the task."""

    @abstractmethod
    def chance(self, difficulty: int) -> float:
        """Probability of an exact match by the best guess that does not look at the problem."""

    def verify(self, problem: Any, predicted: NDArray[np.int64]) -> bool | None:
        """Whether these symbols are a right answer, found in another way than `reference` finds it.

        Args:
            predicted: As for `grade`.
        Returns:
            None: there is no other way.
        """
        return None

    def trace_labels(self, problem: Any, k: int) -> NDArray[np.int64] | None:
        """Labels after k iterations of one operation each, shaped as those of the example, IGNORED where there is none.

        At the answer's positions they are the answer from iteration `num_steps` on.

        Returns:
            None: iterations have no targets.
        """
        if not isinstance(self, Progress):
            return None
        tokens = to_torch(self.example(problem).tokens)[None]
        return window_targets(self, tokens, k)[k][0].numpy()

    @property
    def has_targets(self) -> bool:
        """Whether iterations have targets: by a rule local in position (`Progress`), or read off the problem."""
        return isinstance(self, Progress) or type(self).trace_labels is not Task.trace_labels

    def length(self, difficulty: int) -> int:
        """Tokens of a problem of this difficulty; all have equally many."""
        return len(self.example(self.sample(difficulty, 0, 0)).tokens)

    def num_steps(self, difficulty: int) -> int:
        """Iterations that a model of one operation per iteration needs."""
        return difficulty

    def space(self, difficulty: int) -> float:
        """Number of problems of this difficulty; infinity where it is large and nobody counted."""
        return float("inf")

    def held_out(self, difficulty: int) -> bool:
        """Whether problems of this difficulty are kept from training; where few exist, none is."""
        return difficulty not in self.train_difficulties or self.space(difficulty) >= SMALL_SPACE

    def check(self, difficulty: int) -> None:
        """Refuses a difficulty that the task does not have."""
        if difficulty < 1:
            raise ValueError(f"difficulty must be at least 1 for {self.name}. Got {difficulty}.")

    @property
    def name(self) -> str:
        """Registry name."""
        return next(name for name in TASKS if TASKS[name] is type(self))

    def sample(self, difficulty: int, key: int, index: int, split: Split | None = None) -> Any:
        """Problem number `index` of a run's key: a pure function of these and of the task.

        Args:
            key: Seed of the run.
            split: Only problems of this split; None: of any.
        """
        self.check(difficulty)
        stream = self._stream(difficulty, key)
        attempt, problem = 0, self.draw(difficulty, Draws(stream, index))
        while split is not None and self.split(difficulty, problem) != split:
            attempt += 1
            self.refuse_endless(attempt, difficulty, split)
            problem = self.draw(difficulty, Draws(stream, index, attempt))
        return problem

    def refuse_endless(self, attempts: int, difficulty: int, split: Split | None) -> None:
        """Ends the search for a problem of a split that has none."""
        if attempts >= ATTEMPTS:
            raise ValueError(
                f"{self.name} has no {split} problem of difficulty {difficulty} in {ATTEMPTS:,} draws. "
                "Take another split."
            )

    def split(self, difficulty: int, problem: Any) -> Split:
        """The split of a problem; a difficulty of fewer than SMALL_SPACE problems is all for training, one that is
        never trained all for testing."""
        if difficulty not in self.train_difficulties:
            return "test"
        if not self.held_out(difficulty):
            return "train"
        digest = hashlib.blake2b(f"{self.version}|".encode() + self.canonical(problem), digest_size=8).digest()
        part = int.from_bytes(digest, "little") % 100
        return "train" if part < 80 else "validation" if part < 90 else "test"

    def batch(
        self, difficulty: int, key: int, indices: Sequence[int], split: Split | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens [rows, seq] and labels [rows, seq] (or [rows, seq, cells]) of several problems."""
        examples = [self.example(self.sample(difficulty, key, int(index), split)) for index in indices]
        return np.stack([e.tokens for e in examples]), np.stack([e.labels for e in examples])

    def grade(self, problem: Any, predicted: NDArray[np.int64]) -> Grade:
        """Compares predicted symbols at the answer's positions with the answer.

        Args:
            predicted: [positions] or [positions, cells], as the labels of the example at `answer`.
        """
        example = self.example(problem)
        wanted = example.labels[example.answer]
        if predicted.shape != wanted.shape:
            raise ValueError(f"grade: predicted must have the answer's shape {wanted.shape}. Got {predicted.shape}.")
        scored = wanted != IGNORED
        right = int(((predicted == wanted) & scored).sum())
        return Grade(exact=right == int(scored.sum()), cells_right=right, cells_total=int(scored.sum()))

    def show(self, problem: Any) -> str:
        """The problem and its answer in readable lines."""
        example = self.example(problem)
        words = " ".join(self.tokens[t] for t in example.tokens)
        answers = example.labels[example.answer].reshape(-1)
        return f"{words}\n=> {' '.join('.' if a == IGNORED else self.symbols[a] for a in answers)}"

    def _stream(self, difficulty: int, key: int) -> int:
        return _stream_of(self, difficulty, key)


class Progress(ABC):
    """A task whose intermediate values advance by one operation per iteration, at every position by itself."""

    @abstractmethod
    def start(self, tokens: Int[Tensor, "batch seq"]) -> Int[Tensor, "batch seq *cells"]:
        """The values before the first iteration."""

    @abstractmethod
    def advance(
        self, values: Int[Tensor, "batch seq *cells"], tokens: Int[Tensor, "batch seq"]
    ) -> Int[Tensor, "batch seq *cells"]:
        """The values one iteration later: operation j applied to the value of position j - 1."""


def window_targets(
    task: Progress,
    tokens: Int[Tensor, "batch seq"],
    iterations: int,
    start: Int[Tensor, "batch seq *cells"] | None = None,
) -> list[Int[Tensor, "batch seq *cells"]]:
    """The values after 0, 1, .. `iterations` iterations: of position j the product of the last min(k, j) operations.

    Args:
        start: The values to begin with, where they are not the task's own.
    """
    values = [task.start(tokens) if start is None else start]
    for _ in range(iterations):
        values.append(task.advance(values[-1], tokens))
    return values


def iteration_targets(
    task: Task, tokens: Int[Tensor, "batch seq"], iterations: int
) -> list[Int[Tensor, "batch seq *cells"]]:
    """Labels after 0, 1, .. `iterations` iterations: by the local rule for all rows at once, or row by row."""
    if isinstance(task, Progress):
        return window_targets(task, tokens, iterations)
    problems = [task.decode(row) for row in tokens.cpu().numpy()]
    found = []
    for k in range(iterations + 1):
        rows = [task.trace_labels(problem, k) for problem in problems]
        if any(row is None for row in rows):
            raise ValueError(f"iteration_targets: task {task.name!r} has none. Train on its answers.")
        found.append(to_torch(np.stack([row for row in rows if row is not None])).to(tokens.device))
    return found


def check_trained(task: Task, difficulties: Sequence[int]) -> None:
    """Refuses an empty list of trained difficulties, and those that the task does not have."""
    if not difficulties:
        raise ValueError(f"{type(task).__name__}.train must name at least one difficulty. Got none.")
    for difficulty in difficulties:
        task.check(difficulty)


@functools.lru_cache(maxsize=256)
def _stream_of(task: Task, difficulty: int, key: int) -> int:
    return stream_key(key, f"task:{task.name}:{task.version}:{config_hash(task)}:{difficulty}")


def to_torch(array: NDArray[np.int64]) -> Tensor:
    """A tensor of its own memory."""
    return torch.from_numpy(np.ascontiguousarray(array))
