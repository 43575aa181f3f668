"""A finite automaton reads a word; the state after every letter is asked.

    s_0 = start,   s_j = table[s_{j-1}, w_j];        the position of letter j answers s_j

The table is complete, every entry uniform. It is one for the whole data set (number `machine`), which starts in q0, or
new in every problem and then written before the word, after a start of its own:

    <bos> w_1 .. w_n                                                    table="fixed"
    start  table (state by state, letter by letter)  w_1 .. w_n         table="prompt"

Reference: Liu et al., "Transformers Learn Shortcuts to Automata", arXiv:2210.10749.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from looplab._types import Int
from looplab.recurrence.philox import stream_key
from looplab.tasks.base import TASKS, Draws, Example, Progress, Task, Trace, check_trained

BOS = 0


@dataclass(frozen=True)
class Run:
    """What an automaton is given."""

    table: tuple[tuple[int, ...], ...]
    """[state][letter] -> state."""
    start: int
    word: tuple[int, ...]


@TASKS.register("automaton")
@dataclass(frozen=True, kw_only=True)
class Automaton(Task, Progress):
    """The states that a random automaton passes."""

    reference_paper = "arXiv:2210.10749"
    states: int = 5
    """Of the automaton."""
    letters: int = 3
    """Of the alphabet."""
    table: Literal["fixed", "prompt"] = "fixed"
    """One automaton for all problems, or one in every prompt."""
    machine: int = 0
    """Number of the fixed automaton."""
    train: tuple[int, ...] = (16,)
    """Lengths of words to train at; tests go to 16 times the largest."""

    def __post_init__(self) -> None:
        for name in ("states", "letters"):
            if getattr(self, name) < 2:
                raise ValueError(f"Automaton.{name} must be at least 2. Got {getattr(self, name)}. 5 and 3 are usual.")
        if self.machine < 0 or (self.machine and self.table == "prompt"):
            raise ValueError(
                f"Automaton.machine must be at least 0, and 0 where the table is in the prompt. Got {self.machine}. "
                "Leave it out, or set table='fixed'."
            )
        check_trained(self, self.train)

    @cached_property
    def fixed(self) -> tuple[tuple[int, ...], ...]:
        """The table of machine number `machine`."""
        key = stream_key(self.machine, f"automaton:{self.states}:{self.letters}")
        return self._table(Draws(key, 0))

    @property
    def tokens(self) -> tuple[str, ...]:
        letters = (_letter(i) for i in range(self.letters))
        return ("<bos>", *(f"q{state}" for state in range(self.states)), *letters)

    @property
    def symbols(self) -> tuple[str, ...]:
        return tuple(f"q{state}" for state in range(self.states))

    @property
    def train_difficulties(self) -> tuple[int, ...]:
        return self.train

    @property
    def test_difficulties(self) -> tuple[int, ...]:
        return tuple(sorted({*self.train, *(max(self.train) * factor for factor in (2, 4, 8, 16))}))

    def length(self, difficulty: int) -> int:
        return self._head + difficulty

    def space(self, difficulty: int) -> float:
        tables = self.states ** (self.states * self.letters) if self.table == "prompt" else 1
        return float(min(tables, 10**9)) * float(self.letters) ** min(difficulty, 64)

    def chance(self, difficulty: int) -> float:
        """1 / states where the prompt has the table; else the most likely state of this automaton after n letters."""
        if self.table == "prompt":
            return 1 / self.states
        step = np.zeros((self.states, self.states))
        for state, row in enumerate(self.fixed):
            for after in row:
                step[state, after] += 1 / self.letters
        return float(np.linalg.matrix_power(step, difficulty)[0].max())

    def draw(self, difficulty: int, draws: Draws) -> Run:
        table, start = self.fixed, 0
        if self.table == "prompt":
            table, start = self._table(draws), draws.integer(self.states)
        return Run(table, start, tuple(draws.integers(self.letters, difficulty).tolist()))

    def canonical(self, problem: Run) -> bytes:
        """Table in the prompt: letters and states renamed as the run meets them. Fixed table: the word."""
        if self.table == "fixed":
            return np.array(problem.word, "<u2").tobytes()
        letters: dict[int, int] = {}
        states: dict[int, int] = {}
        passed = self.reference(problem).values
        word = [letters.setdefault(letter, len(letters)) for letter in problem.word]
        return np.array([*word, *(states.setdefault(state, len(states)) for state in passed)], "<u2").tobytes()

    def example(self, problem: Run) -> Example:
        values = self.reference(problem).values
        head = [BOS]
        if self.table == "prompt":
            head = [1 + state for state in (problem.start, *(state for row in problem.table for state in row))]
        tokens = np.array([*head, *(1 + self.states + letter for letter in problem.word)], np.int64)
        labels = np.array([*[problem.start] * (len(head) - 1), *values], np.int64)
        return Example(tokens=tokens, labels=labels, answer=slice(len(tokens) - 1, len(tokens)))

    def decode(self, tokens: NDArray[np.int64]) -> Run:
        head, word = [int(t) for t in tokens[: self._head]], [int(t) for t in tokens[self._head :]]
        legal = head == [BOS]
        if self.table == "prompt":
            legal = len(head) == self._head and all(1 <= t <= self.states for t in head)
        if not (legal and word and all(self.states < t < len(self.tokens) for t in word)):
            wanted = "<bos>" if self.table == "fixed" else f"{self._head} states"
            raise ValueError(
                f"automaton: tokens must be {wanted} and then letters. Got {[*head, *word]}. Write them so."
            )
        letters = tuple(t - 1 - self.states for t in word)
        if self.table == "fixed":
            return Run(self.fixed, 0, letters)
        entries = [t - 1 for t in head[1:]]
        rows = [tuple(entries[i : i + self.letters]) for i in range(0, len(entries), self.letters)]
        return Run(tuple(rows), head[0] - 1, letters)

    def reference(self, problem: Run) -> Trace:
        """One look-up per letter."""
        values = [problem.start]
        for letter in problem.word:
            values.append(problem.table[values[-1]][letter])
        return Trace(tuple(values), values[-1])

    def verify(self, problem: Run, predicted: NDArray[np.int64]) -> bool:
        """The maps of the letters composed two by two, without following any state."""
        maps = [tuple(row[letter] for row in problem.table) for letter in problem.word]
        while len(maps) > 1:
            pairs = [maps[i : i + 2] for i in range(0, len(maps), 2)]
            maps = [tuple(p[1][s] for s in p[0]) if len(p) == 2 else p[0] for p in pairs]
        return predicted.tolist() == [maps[0][problem.start]]

    def start(self, tokens: Int[Tensor, "batch seq"]) -> Int[Tensor, "batch seq"]:
        first = (tokens[:, :1] - 1).clamp(min=0)
        return first.expand(tokens.shape).contiguous()

    def advance(self, values: Int[Tensor, "batch seq"], tokens: Int[Tensor, "batch seq"]) -> Int[Tensor, "batch seq"]:
        before, letters = values[:, self._head - 1 : -1], tokens[:, self._head :] - 1 - self.states
        if self.table == "prompt":
            table = (tokens[:, 1 : self._head] - 1).view(len(tokens), self.states, self.letters)
            after = table[torch.arange(len(tokens), device=tokens.device)[:, None], before, letters]
        else:
            after = torch.tensor(self.fixed, device=tokens.device)[before, letters]
        return torch.cat([self.start(tokens)[:, : self._head], after], dim=1)

    @property
    def _head(self) -> int:
        """Tokens before the word."""
        return 1 + (self.states * self.letters if self.table == "prompt" else 0)

    def _table(self, draws: Draws) -> tuple[tuple[int, ...], ...]:
        entries = draws.integers(self.states, self.states * self.letters).reshape(self.states, self.letters)
        return tuple(tuple(row) for row in entries.tolist())


def _letter(number: int) -> str:
    return chr(ord("a") + number) if number < 26 else f"a{number}"
