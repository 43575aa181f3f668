"""Pointer chasing with a label at many positions: one permutation of m nodes, followed n hops from every node.

    v_0 = start,   v_k = f(v_{k-1});        the k-th place of a start (the start's own is the first) answers its v_k

    <bos> f(0) f(1) .. f(m-1) | s_1 ? .. ? s_2 ? .. ? .. s_m ? .. ?         n places each; s: all nodes, in random order

With one label per row, after n hops (`pointer_chase`), small transformers learn nothing in a few thousand steps. Here
the answer of a place is one hop from that of the place before, which is not shown: n places still need n lookups one
after another. The map is a permutation, so that no answer comes more often than others.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from looplab.tasks.base import IGNORED, TASKS, Draws, Example, Task, Trace, check_trained

MARKS = ("<bos>", "|", "?")
BOS, BAR, PLACE = range(len(MARKS))


@dataclass(frozen=True)
class Chases:
    """A list of pointers, where to start one after the other, how many to follow."""

    pointers: tuple[int, ...]
    starts: tuple[int, ...]
    hops: int


@TASKS.register("pointer_stream")
@dataclass(frozen=True, kw_only=True)
class PointerStream(Task):
    """The nodes that 1 .. n pointers lead to, from every node."""

    reference_paper = "arXiv:2502.17416"
    nodes: int = 8
    """Length of the list, and number of starts."""
    train: tuple[int, ...] = (4,)
    """Numbers of hops to train at; tests go to 4 times the largest."""

    def __post_init__(self) -> None:
        if self.nodes < 2:
            raise ValueError(f"PointerStream.nodes must be at least 2. Got {self.nodes}. 8 is usual.")
        check_trained(self, self.train)

    @property
    def tokens(self) -> tuple[str, ...]:
        return (*MARKS, *self.symbols)

    @property
    def symbols(self) -> tuple[str, ...]:
        return tuple(f"n{node}" for node in range(self.nodes))

    @property
    def train_difficulties(self) -> tuple[int, ...]:
        return self.train

    @property
    def test_difficulties(self) -> tuple[int, ...]:
        return tuple(sorted({*self.train, *(max(self.train) * factor for factor in (2, 4))}))

    def length(self, difficulty: int) -> int:
        return self.nodes * (1 + difficulty) + 2

    def space(self, difficulty: int) -> float:
        """Up to renaming of nodes: the map as seen from the order of starts."""
        return float(np.prod(np.arange(1.0, min(self.nodes, 100) + 1)))

    def chance(self, difficulty: int) -> float:
        """One hop tells the products of map and order, two or more tell both; all are equally likely."""
        return math.factorial(self.nodes) ** -(1.0 if difficulty == 1 else 2.0)

    def draw(self, difficulty: int, draws: Draws) -> Chases:
        return Chases(tuple(draws.permutation(self.nodes)), tuple(draws.permutation(self.nodes)), difficulty)

    def canonical(self, problem: Chases) -> bytes:
        """For every start the number of the start that its pointer leads to; without the number of hops."""
        number = {node: index for index, node in enumerate(problem.starts)}
        return np.array([number[problem.pointers[node]] for node in problem.starts], "<u2").tobytes()

    def example(self, problem: Chases) -> Example:
        return self._labelled(problem, problem.hops)

    def trace_labels(self, problem: Chases, k: int) -> NDArray[np.int64]:
        """At every place the node after k hops, or as many as the place asks for."""
        return self._labelled(problem, k).labels

    def _labelled(self, problem: Chases, k: int) -> Example:
        values, hops = self.reference(problem).values, range(1, problem.hops + 1)
        pointers, starts = ([len(MARKS) + n for n in nodes] for nodes in (problem.pointers, problem.starts))
        places = [token for start in starts for token in (start, *[PLACE] * (problem.hops - 1))]
        tokens = np.array([BOS, *pointers, BAR, *places], np.int64)
        labels = np.full(len(tokens), IGNORED, np.int64)
        answer = slice(self.nodes + 2, len(tokens))
        labels[answer] = [values[min(j, k)][start] for start in range(self.nodes) for j in hops]
        return Example(tokens=tokens, labels=labels, answer=answer)

    def decode(self, tokens: NDArray[np.int64]) -> Chases:
        word, m = [int(t) for t in tokens], self.nodes
        places = word[m + 2 :]
        hops, every = len(places) // m, [len(MARKS) + node for node in range(m)]
        pointers, starts = word[1 : m + 1], places[:: max(1, hops)]
        legal = hops > 0 and len(places) == m * hops and (word[0], word[m + 1]) == (BOS, BAR)
        legal = legal and sorted(pointers) == every and sorted(starts) == every
        if not (legal and places.count(PLACE) == m * (hops - 1)):
            raise ValueError(
                f"pointer_stream: tokens must be <bos>, a permutation of {m} nodes, | and every node once more, each "
                f"followed by equally many ?. Got {word}. Write them so."
            )
        return Chases(tuple(t - len(MARKS) for t in pointers), tuple(t - len(MARKS) for t in starts), hops)

    def reference(self, problem: Chases) -> Trace:
        """One pointer after the other, from every start; the answer has all hops of the first start first."""
        values = [problem.starts]
        for _ in range(problem.hops):
            values.append(tuple(problem.pointers[node] for node in values[-1]))
        return Trace(tuple(values), tuple(value for chain in zip(*values[1:], strict=True) for value in chain))

    def verify(self, problem: Chases, predicted: NDArray[np.int64]) -> bool:
        """Every power of the map as a matrix power, applied once."""
        matrix = np.eye(self.nodes, dtype=np.int64)[list(problem.pointers)]
        powers = [np.linalg.matrix_power(matrix, k).argmax(1) for k in range(1, problem.hops + 1)]
        return predicted.tolist() == [int(power[start]) for start in problem.starts for power in powers]
