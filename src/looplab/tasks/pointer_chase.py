"""Pointer chasing: a map of m nodes to themselves as a list, a start, and how often to follow it.

    v_0 = start,   v_k = f(v_{k-1});        the last position answers v_n

    <bos> f(0) f(1) .. f(m-1) | start x hops(three digits) =

The number of hops is written in digits, so problems of all difficulties have one length.

Reference: Papadimitriou, Sipser: Communication complexity (1984); as a probe of depth: Saunshi et al., "Reasoning with
Latent Thoughts: On the Power of Looped Transformers", arXiv:2502.17416. Deviation: uniform functions besides
permutations.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from looplab.tasks.base import IGNORED, TASKS, Draws, Example, Task, Trace, check_trained

MARKS = ("<bos>", "|", "x", "=")
BOS, BAR, TIMES, ASK = range(len(MARKS))
DIGITS = 3
FIRST_NODE = len(MARKS) + 10


@dataclass(frozen=True)
class Chase:
    """A list of pointers, where to start, how many to follow."""

    pointers: tuple[int, ...]
    start: int
    hops: int


@TASKS.register("pointer_chase")
@dataclass(frozen=True, kw_only=True)
class PointerChase(Task):
    """The node that n pointers lead to."""

    reference_paper = "arXiv:2502.17416"
    nodes: int = 16
    """Length of the list."""
    map: Literal["function", "permutation"] = "function"
    """Every pointer uniform, or all of them different."""
    train: tuple[int, ...] = (4,)
    """Numbers of hops to train at; tests go to 16 times the largest."""

    def __post_init__(self) -> None:
        if self.nodes < 2:
            raise ValueError(f"PointerChase.nodes must be at least 2. Got {self.nodes}. 16 is usual.")
        check_trained(self, self.train)

    def check(self, difficulty: int) -> None:
        """Refuses numbers of hops that do not fit into the digits."""
        super().check(difficulty)
        if difficulty >= 10**DIGITS:
            raise ValueError(
                f"difficulty must be below {10**DIGITS} for {self.name}, whose hops have {DIGITS} digits. "
                f"Got {difficulty}. Ask for fewer."
            )

    @property
    def tokens(self) -> tuple[str, ...]:
        return (*MARKS, *map(str, range(10)), *self.symbols)

    @property
    def symbols(self) -> tuple[str, ...]:
        return tuple(f"n{node}" for node in range(self.nodes))

    @property
    def train_difficulties(self) -> tuple[int, ...]:
        return self.train

    @property
    def test_difficulties(self) -> tuple[int, ...]:
        further = {max(self.train) * factor for factor in (2, 4, 8, 16)}
        return tuple(sorted({*self.train, *(hops for hops in further if hops < 10**DIGITS)}))

    def length(self, difficulty: int) -> int:
        return self.nodes + DIGITS + 5

    def space(self, difficulty: int) -> float:
        maps = float(self.nodes**self.nodes) if self.nodes <= 64 else float("inf")
        if self.map == "permutation":
            maps = float(np.prod(np.arange(1.0, min(self.nodes, 100) + 1)))
        return maps * self.nodes

    def chance(self, difficulty: int) -> float:
        return 1 / self.nodes

    def draw(self, difficulty: int, draws: Draws) -> Chase:
        drawn = draws.integers(self.nodes, self.nodes).tolist() if self.map == "function" else None
        pointers = drawn or draws.permutation(self.nodes)
        return Chase(tuple(pointers), draws.integer(self.nodes), difficulty)

    def canonical(self, problem: Chase) -> bytes:
        """The map up to renaming of nodes, with the start marked: trees as nested lists, on their cycles.

        Without the number of hops, so no pointers are followed 4 times in training and 2 times in a test.
        """
        pointers = problem.pointers
        into: list[list[int]] = [[] for _ in pointers]
        for node, target in enumerate(pointers):
            into[target].append(node)
        cycles = _cycles(pointers)
        on_cycle = {node for cycle in cycles for node in cycle}

        def tree(node: int) -> str:
            below = sorted(tree(child) for child in into[node] if child not in on_cycle)
            return f"({'*' if node == problem.start else ''}{''.join(below)})"

        forms = []
        for cycle in cycles:
            trees = [tree(node) for node in cycle]
            forms.append(min(",".join(trees[i:] + trees[:i]) for i in range(len(trees))))
        return ";".join(sorted(forms)).encode()

    def example(self, problem: Chase) -> Example:
        digits = [len(MARKS) + int(d) for d in f"{problem.hops:0{DIGITS}}"]
        pointers = [FIRST_NODE + node for node in problem.pointers]
        tokens = np.array([BOS, *pointers, BAR, FIRST_NODE + problem.start, TIMES, *digits, ASK], np.int64)
        labels = np.full(len(tokens), IGNORED, np.int64)
        labels[-1] = self.reference(problem).answer
        return Example(tokens=tokens, labels=labels, answer=slice(len(tokens) - 1, len(tokens)))

    def trace_labels(self, problem: Chase, k: int) -> NDArray[np.int64]:
        """At the last position the node after k hops."""
        example, values = self.example(problem), self.reference(problem).values
        example.labels[-1] = values[min(k, problem.hops)]
        return example.labels

    def decode(self, tokens: NDArray[np.int64]) -> Chase:
        word, m = [int(t) for t in tokens], self.nodes
        legal = len(word) == self.length(1) and [word[i] for i in (0, m + 1, m + 3, -1)] == [BOS, BAR, TIMES, ASK]
        nodes, digits = [*word[1 : m + 1], *word[m + 2 : m + 3]], word[m + 4 : -1]
        legal = legal and all(FIRST_NODE <= t < len(self.tokens) for t in nodes)
        if not (legal and all(len(MARKS) <= t < FIRST_NODE for t in digits)):
            raise ValueError(
                f"pointer_chase: tokens must be <bos>, {m} nodes, |, a node, x, {DIGITS} digits and =. Got {word}. "
                "Write them so."
            )
        hops = int("".join(str(t - len(MARKS)) for t in digits))
        return Chase(tuple(t - FIRST_NODE for t in nodes[:m]), nodes[m] - FIRST_NODE, hops)

    def reference(self, problem: Chase) -> Trace:
        """One pointer after the other."""
        values = [problem.start]
        for _ in range(problem.hops):
            values.append(problem.pointers[values[-1]])
        return Trace(tuple(values), values[-1])

    def verify(self, problem: Chase, predicted: NDArray[np.int64]) -> bool:
        """The map raised to its power by repeated squaring, then applied once."""
        power, base, hops = list(range(self.nodes)), list(problem.pointers), problem.hops
        while hops:
            if hops % 2:
                power = [base[node] for node in power]
            base, hops = [base[node] for node in base], hops // 2
        return predicted.tolist() == [power[problem.start]]


def _cycles(pointers: tuple[int, ...]) -> list[list[int]]:
    found: list[list[int]] = []
    seen: set[int] = set()
    for node in range(len(pointers)):
        path: list[int] = []
        while node not in seen:
            seen.add(node)
            path.append(node)
            node = pointers[node]
        if node in path:
            found.append(path[path.index(node) :])
    return found
