"""Running parity: n bits come in, after every one of them the parity of all so far is asked.

    s_0 = 0,   s_j = s_{j-1} xor b_j;        position j answers s_j

Reference: Schwarzschild et al., "Can You Learn an Algorithm? Generalizing from Easy to Hard Problems with Recurrent
Networks", arXiv:2106.04537. Deviation: the bits are tokens of a causal sequence, after a `<bos>`.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from looplab._types import Int
from looplab.tasks.base import TASKS, Draws, Example, Progress, Task, Trace, check_trained

BOS = 0


@dataclass(frozen=True)
class Bits:
    """The bits, in order."""

    bits: tuple[int, ...]


@TASKS.register("prefix_sum")
@dataclass(frozen=True, kw_only=True)
class PrefixSum(Task, Progress):
    """The parity of every prefix of a string of bits."""

    reference_paper = "arXiv:2106.04537"
    train: tuple[int, ...] = (32,)
    """Numbers of bits to train at; tests go to 16 times the largest."""

    tokens = ("<bos>", "0", "1")  # type: ignore[assignment]
    symbols = ("0", "1")  # type: ignore[assignment]

    def __post_init__(self) -> None:
        check_trained(self, self.train)

    @property
    def train_difficulties(self) -> tuple[int, ...]:
        return self.train

    @property
    def test_difficulties(self) -> tuple[int, ...]:
        return tuple(sorted({*self.train, *(max(self.train) * factor for factor in (2, 4, 8, 16))}))

    def length(self, difficulty: int) -> int:
        return difficulty + 1

    def space(self, difficulty: int) -> float:
        return 2.0 ** min(difficulty, 1000)

    def chance(self, difficulty: int) -> float:
        """All n cells guessed, each one with 1/2."""
        return 0.5**difficulty

    def draw(self, difficulty: int, draws: Draws) -> Bits:
        return Bits(tuple(draws.integers(2, difficulty).tolist()))

    def canonical(self, problem: Bits) -> bytes:
        """The bits themselves: no two strings have the same parities."""
        return bytes(problem.bits)

    def example(self, problem: Bits) -> Example:
        labels = np.array(self.reference(problem).values, np.int64)
        tokens = np.array([BOS, *(1 + bit for bit in problem.bits)], np.int64)
        return Example(tokens=tokens, labels=labels, answer=slice(1, len(tokens)))

    def decode(self, tokens: NDArray[np.int64]) -> Bits:
        word = [int(t) for t in tokens]
        if len(word) < 2 or word[0] != BOS or not {*word[1:]} <= {1, 2}:
            raise ValueError(f"prefix_sum: tokens must be <bos> and then bits (1 or 2). Got {word}. Write them so.")
        return Bits(tuple(t - 1 for t in word[1:]))

    def reference(self, problem: Bits) -> Trace:
        """The parity after every bit."""
        values = [0]
        for bit in problem.bits:
            values.append(values[-1] ^ bit)
        return Trace(tuple(values), tuple(values[1:]))

    def verify(self, problem: Bits, predicted: NDArray[np.int64]) -> bool:
        """Neighbouring parities differ by the bit between them, and the last one is that of the number of ones."""
        steps = np.diff(predicted, prepend=0) % 2
        return steps.tolist() == list(problem.bits) and int(predicted[-1]) == problem.bits.count(1) % 2

    def start(self, tokens: Int[Tensor, "batch seq"]) -> Int[Tensor, "batch seq"]:
        return torch.zeros_like(tokens)

    def advance(self, values: Int[Tensor, "batch seq"], tokens: Int[Tensor, "batch seq"]) -> Int[Tensor, "batch seq"]:
        before = torch.cat([torch.zeros_like(values[:, :1]), values[:, :-1]], dim=1)
        return torch.where(tokens == BOS, 0, before ^ (tokens == 2).long())
