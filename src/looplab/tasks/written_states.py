"""Word problems answered in writing: after the operations, the states follow one by one, each a token of its own.

    <bos> o_1 .. o_n s_1 .. s_{n-1}     position n answers s_1, the position of s_j answers s_{j+1}; s_n is the answer

It is `state_tracking` as explicit chain of thought: a model needs one step of work per token, and writes what it has.
Trained with the right states before it, a model has to go on from its own when it is tested.

Reference: as for `state_tracking`. Deviation: a state is one token and not one per slot.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from looplab._types import Int
from looplab.tasks.base import IGNORED, TASKS, Draws, Example, Split, Task, Trace
from looplab.tasks.state_tracking import StateTracking, Word


@TASKS.register("written_states")
@dataclass(frozen=True, kw_only=True)
class WrittenStates(Task):
    """The running product of group elements, written down state by state."""

    reference_paper = "arXiv:2210.10749"
    group: str = "swap_s5"
    """As of `state_tracking`."""
    train_length: int = 8
    """Operations in training; tests go to 16 times that."""

    def __post_init__(self) -> None:
        self.words  # noqa: B018, refuses what it does not know

    @cached_property
    def words(self) -> StateTracking:
        """The same problems, answered by the number of the state."""
        return StateTracking(group=self.group, classes=True, train_length=self.train_length)

    @cached_property
    def tokens(self) -> tuple[str, ...]:
        return (*self.words.tokens, *(f"={state}" for state in self.words.symbols))

    @property
    def symbols(self) -> tuple[str, ...]:
        return self.words.symbols

    @property
    def train_difficulties(self) -> tuple[int, ...]:
        return self.words.train_difficulties

    @property
    def test_difficulties(self) -> tuple[int, ...]:
        return self.words.test_difficulties

    def length(self, difficulty: int) -> int:
        return 2 * difficulty

    def space(self, difficulty: int) -> float:
        return self.words.space(difficulty)

    def chance(self, difficulty: int) -> float:
        return self.words.chance(difficulty)

    def draw(self, difficulty: int, draws: Draws) -> Word:
        return self.words.draw(difficulty, draws)

    def sample(self, difficulty: int, key: int, index: int, split: Split | None = None) -> Word:
        return self.words.sample(difficulty, key, index, split)

    def canonical(self, problem: Word) -> bytes:
        return self.words.canonical(problem)

    def example(self, problem: Word) -> Example:
        example = self.words.example(problem)
        tokens, labels = self._written(example.tokens[None], example.labels[None])
        return Example(tokens=tokens[0], labels=labels[0], answer=slice(tokens.shape[1] - 1, tokens.shape[1]))

    def batch(
        self, difficulty: int, key: int, indices: Sequence[int], split: Split | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return self._written(*self.words.batch(difficulty, key, indices, split))

    def decode(self, tokens: NDArray[np.int64]) -> Word:
        found = self.words.decode(tokens[: len(tokens) // 2 + 1])
        if self.example(found).tokens.tolist() != tokens.tolist():
            raise ValueError(
                f"written_states: tokens must be <bos>, operations, and all states but the last. Got {tokens.tolist()}."
            )
        return found

    def reference(self, problem: Word) -> Trace:
        return self.words.reference(problem)

    def verify(self, problem: Word, predicted: NDArray[np.int64]) -> bool:
        return self.words.verify(problem, predicted)

    def prompt(self, tokens: Int[Tensor, "batch seq"]) -> Int[Tensor, "batch prompt"]:
        """The operations, before anything is written."""
        return tokens[:, : tokens.shape[1] // 2 + 1]

    def written(self, symbols: Int[Tensor, "*any"]) -> Int[Tensor, "*any"]:
        """The tokens that write these symbols down."""
        return symbols + len(self.words.tokens)

    def _written(self, tokens: Any, labels: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Operations with the states after 0 .. n of them, as one text and what each of its positions answers."""
        number = tokens.shape[1] - 1
        text = np.concatenate([tokens, labels[:, 1:-1] + len(self.words.tokens)], axis=1)
        answers = np.concatenate([np.full((len(tokens), number), IGNORED), labels[:, 1:]], axis=1)
        return text, answers
