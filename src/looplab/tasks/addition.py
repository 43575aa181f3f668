"""Addition of two numbers whose longest run of carries is planted, least significant digit first.

    s^0_i = (a_i + b_i) mod base            carry out of i where a_i + b_i >= base
    s^{k+1}_i = (s^k_i + carry of i - 1) mod base,   again with its carries;   after c rounds no carry is left

    <bos> a_0 .. a_{d-1} + b_0 .. b_{d-1} = _ .. _ (d + 1 places);        place i answers digit i of the sum

The difficulty is c, the places that the longest-lived carry moves: it starts at a pair that sums to base or more,
crosses c - 1 pairs that sum to base - 1, and ends at a pair that does not. Numbers are uniform but for that run, at a
uniform place, and for being drawn again where a longer one arose.

Reference: McLeish et al., "Transformers Can Do Arithmetic with the Right Embeddings", arXiv:2405.17399 (addition with
recurrence). Deviations: the answer is given at once and not digit by digit; the planted run is ours.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from looplab.tasks.base import IGNORED, TASKS, Draws, Example, Task, Trace, check_trained

MARKS = ("<bos>", "+", "=", "_")
BOS, PLUS, EQUALS, PLACE = range(len(MARKS))


@dataclass(frozen=True)
class Sum:
    """Two numbers, digits from the least significant."""

    first: tuple[int, ...]
    second: tuple[int, ...]


@TASKS.register("addition")
@dataclass(frozen=True, kw_only=True)
class Addition(Task):
    """The digits of a sum."""

    reference_paper = "arXiv:2405.17399"
    digits: int = 32
    """Of each number."""
    base: int = 2
    """Of the digits."""
    train: tuple[int, ...] = (4,)
    """Longest runs of carries to train at; tests go to 7 times the largest, as far as the digits reach."""

    def __post_init__(self) -> None:
        if not 2 <= self.base <= 10:
            raise ValueError(f"Addition.base must be from 2 to 10. Got {self.base}. 2 and 10 are usual.")
        if self.digits < 1:
            raise ValueError(f"Addition.digits must be at least 1. Got {self.digits}. 32 is usual.")
        check_trained(self, self.train)

    def check(self, difficulty: int) -> None:
        """Refuses runs longer than the numbers."""
        super().check(difficulty)
        if difficulty > self.digits:
            raise ValueError(
                f"difficulty must be at most {self.digits} for {self.name} with digits={self.digits}. "
                f"Got {difficulty}. Raise digits."
            )

    @property
    def tokens(self) -> tuple[str, ...]:
        return (*MARKS, *self.symbols)

    @property
    def symbols(self) -> tuple[str, ...]:
        return tuple(map(str, range(self.base)))

    @property
    def train_difficulties(self) -> tuple[int, ...]:
        return self.train

    @property
    def test_difficulties(self) -> tuple[int, ...]:
        further = {max(self.train) * factor for factor in (2, 4, 7)}
        return tuple(sorted({*self.train, *(run for run in further if run <= self.digits)}))

    def length(self, difficulty: int) -> int:
        return 3 * self.digits + 4

    def space(self, difficulty: int) -> float:
        """Pairs of numbers whose longest run is exactly this: counted digit by digit."""
        return float(self._at_most(difficulty) - self._at_most(difficulty - 1))

    def chance(self, difficulty: int) -> float:
        """About: the run's place guessed, and each digit outside it."""
        return float(self.base) ** (difficulty - self.digits) / (self.digits - difficulty + 1)

    def draw(self, difficulty: int, draws: Draws) -> Sum:
        making, passing, ending = self._pairs
        while True:
            drawn = draws.integers(self.base**2, self.digits)
            pairs = [divmod(int(pair), self.base) for pair in drawn]
            begin = draws.integer(self.digits - difficulty + 1)
            pairs[begin] = draws.choice(making)
            for place in range(begin + 1, begin + difficulty):
                pairs[place] = draws.choice(passing)
            if begin + difficulty < self.digits:
                pairs[begin + difficulty] = draws.choice(ending)
            problem = Sum(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))
            if len(self.reference(problem).values) == difficulty + 1:
                return problem

    def canonical(self, problem: Sum) -> bytes:
        """The two digits of every place in ascending order: exchanging them changes no sum."""
        return bytes(digit for pair in zip(problem.first, problem.second, strict=True) for digit in sorted(pair))

    def example(self, problem: Sum) -> Example:
        digits = [[len(MARKS) + digit for digit in number] for number in (problem.first, problem.second)]
        tokens = np.array([BOS, *digits[0], PLUS, *digits[1], EQUALS, *[PLACE] * (self.digits + 1)], np.int64)
        return Example(tokens=tokens, labels=self._labels(self.reference(problem).answer), answer=self._answer)

    def trace_labels(self, problem: Sum, k: int) -> NDArray[np.int64]:
        """At the answer's places the digits after k rounds of carries."""
        values = self.reference(problem).values
        return self._labels(values[min(k, len(values) - 1)])

    def decode(self, tokens: NDArray[np.int64]) -> Sum:
        word, d = [int(t) for t in tokens], self.digits
        first, second = word[1 : d + 1], word[d + 2 : 2 * d + 2]
        marks = [BOS, PLUS, EQUALS, *[PLACE] * (d + 1)]
        legal = len(word) == 3 * d + 4 and [word[0], word[d + 1], *word[2 * d + 2 :]] == marks
        if not (legal and all(len(MARKS) <= t < len(self.tokens) for t in (*first, *second))):
            raise ValueError(
                f"addition: tokens must be <bos>, {d} digits, +, {d} digits, = and {d + 1} places. Got {word}. "
                "Write them so."
            )
        return Sum(tuple(t - len(MARKS) for t in first), tuple(t - len(MARKS) for t in second))

    def reference(self, problem: Sum) -> Trace:
        """All digits at once, then rounds of carries until none is left."""
        digits = [a + b for a, b in zip(problem.first, problem.second, strict=True)] + [0]
        values = []
        while True:
            carries = [digit // self.base for digit in digits]
            digits = [digit % self.base for digit in digits]
            values.append(tuple(digits))
            if not any(carries):
                return Trace(tuple(values), values[-1])
            digits = [digit + carry for digit, carry in zip(digits, [0, *carries[:-1]], strict=True)]

    def verify(self, problem: Sum, predicted: NDArray[np.int64]) -> bool:
        """The numbers as integers."""
        first, second, total = (
            sum(int(digit) * self.base**place for place, digit in enumerate(number))
            for number in (problem.first, problem.second, predicted)
        )
        return first + second == total and all(0 <= digit < self.base for digit in predicted)

    @property
    def _answer(self) -> slice:
        return slice(2 * self.digits + 3, 3 * self.digits + 4)

    def _labels(self, digits: tuple[int, ...]) -> NDArray[np.int64]:
        labels = np.full(3 * self.digits + 4, IGNORED, np.int64)
        labels[self._answer] = digits
        return labels

    @cached_property
    def _pairs(self) -> tuple[list[tuple[int, int]], ...]:
        """Pairs that make a carry, that pass one on, and that end one."""
        pairs = [(a, b) for a in range(self.base) for b in range(self.base)]
        passing = [pair for pair in pairs if sum(pair) == self.base - 1]
        return [pair for pair in pairs if sum(pair) >= self.base], passing, [p for p in pairs if p not in passing]

    def _at_most(self, run: int) -> int:
        """Pairs of numbers of which no carry moves more than `run` places."""
        making = self.base * (self.base - 1) // 2
        moved = [1, *[0] * run]
        """[r] prefixes whose carry into the next place has moved r places; r = 0: there is none."""
        for _ in range(self.digits):
            made = making * sum(moved) if run else 0
            none = making * sum(moved) + self.base * moved[0]
            moved = [none, made, *(self.base * before for before in moved[1:-1])][: run + 1]
        return sum(moved)
