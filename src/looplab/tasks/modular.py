"""Modular arithmetic in prefix notation (Mano): the value of an expression over the residues of a prime.

    <bos> <len_l> expression of l operations <ans>;        <ans> answers the value

An operation stands before its operands: "- * a b + c d" is (a * b) - (c + d). The tree is drawn from the root: of the
l - 1 operations that remain, a uniform number goes to the left. Training draws l from 1 .. L, tests have l = L.

Reference: Allen-Zhu, "Physics of Language Models: Part 4.1, Architecture Design and the Magic of Canon Layers",
arXiv:2512.17351 (task Mano). Deviations: one l per training step, not per problem; the chance level is exact (0 comes
most often, for products).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from looplab.tasks.base import IGNORED, TASKS, Draws, Example, Task, Trace, check_trained

OPERATORS = "+-*"
BOS, ASK = 0, 1


@dataclass(frozen=True)
class Expression:
    """Residues, and modulus + 0, 1, 2 for plus, minus, times, in prefix order."""

    items: tuple[int, ...]


class Node(NamedTuple):
    """A part of an expression."""

    begin: int
    end: int
    """Place of its last item."""
    height: int
    value: int
    form: str
    """The same for all orders of the operands of + and *."""


@TASKS.register("modular")
@dataclass(frozen=True, kw_only=True)
class Modular(Task):
    """The value of an expression of additions, subtractions and multiplications."""

    reference_paper = "arXiv:2512.17351"
    modulus: int = 23
    """Number of residues."""
    operations: int = 6
    """L, the most operations; 4, 6 and 10 train on a CPU, published are 10, 16 and 24."""

    def __post_init__(self) -> None:
        if self.modulus < 2:
            raise ValueError(f"Modular.modulus must be at least 2. Got {self.modulus}. 23 is usual.")
        if self.operations < 1:
            raise ValueError(f"Modular.operations must be at least 1. Got {self.operations}. 6 is usual.")
        check_trained(self, self.train_difficulties)

    def check(self, difficulty: int) -> None:
        """Refuses more operations than there are <len> tokens."""
        super().check(difficulty)
        if difficulty > self.operations:
            raise ValueError(
                f"difficulty must be at most {self.operations} for {self.name} with operations={self.operations}. "
                f"Got {difficulty}. Raise operations."
            )

    @property
    def tokens(self) -> tuple[str, ...]:
        lengths = (f"<len_{count}>" for count in range(1, self.operations + 1))
        return ("<bos>", "<ans>", *lengths, *self.symbols, *OPERATORS)

    @property
    def symbols(self) -> tuple[str, ...]:
        return tuple(map(str, range(self.modulus)))

    @property
    def train_difficulties(self) -> tuple[int, ...]:
        return tuple(range(1, self.operations + 1))

    @property
    def test_difficulties(self) -> tuple[int, ...]:
        return (self.operations,)

    def length(self, difficulty: int) -> int:
        return 2 * difficulty + 4

    def space(self, difficulty: int) -> float:
        shapes = 1.0
        for n in range(1, difficulty + 1):  # Catalan numbers
            shapes *= 2 * (2 * n - 1) / (n + 1)
        return round(shapes) * 3.0**difficulty * float(self.modulus) ** (difficulty + 1)

    def chance(self, difficulty: int) -> float:
        """Probability of the value that comes most often."""
        return float(self._laws[difficulty].max())

    def draw(self, difficulty: int, draws: Draws) -> Expression:
        items: list[int] = []
        waiting = [difficulty]
        while waiting:
            count = waiting.pop()
            if count == 0:
                items.append(draws.integer(self.modulus))
                continue
            items.append(self.modulus + draws.integer(len(OPERATORS)))
            left = draws.integer(count)
            waiting += [count - 1 - left, left]
        return Expression(tuple(items))

    def canonical(self, problem: Expression) -> bytes:
        """The operands of + and * in a fixed order."""
        return self.parse(problem)[-1].form.encode()

    def example(self, problem: Expression) -> Example:
        count = len(problem.items) // 2
        items = [2 + self.operations + item for item in problem.items]
        tokens = np.array([BOS, 1 + count, *items, ASK], np.int64)
        labels = np.full(len(tokens), IGNORED, np.int64)
        labels[-1] = self.reference(problem).answer
        return Example(tokens=tokens, labels=labels, answer=slice(len(tokens) - 1, len(tokens)))

    def trace_labels(self, problem: Expression, k: int) -> NDArray[np.int64]:
        """At the last item of a part its value, of the tallest part of height <= k that ends there; and the answer."""
        nodes = self.parse(problem)
        labels = np.full(len(problem.items) + 3, IGNORED, np.int64)
        for node in sorted(nodes, key=lambda node: node.height):
            if node.height <= k:
                labels[2 + node.end] = node.value
        if nodes[-1].height <= k:
            labels[-1] = nodes[-1].value
        return labels

    def decode(self, tokens: NDArray[np.int64]) -> Expression:
        word = [int(t) for t in tokens]
        items = [t - 2 - self.operations for t in word[2:-1]]
        open_places = 1
        for place, item in enumerate(items):  # a prefix expression closes its last open place with its last item
            open_places += 1 if item >= self.modulus else -1
            if item < 0 or (open_places == 0) != (place == len(items) - 1):
                break
        else:
            marks = (word[0], word[1], word[-1]) if len(word) > 3 else None
            if marks == (BOS, 1 + len(items) // 2, ASK) and max(word) < len(self.tokens):
                return Expression(tuple(items))
        raise ValueError(
            f"modular: tokens must be <bos>, <len_l>, a prefix expression of l operations and <ans>. Got {word}. "
            "Write them so."
        )

    def parse(self, problem: Expression) -> list[Node]:
        """All parts, operands before the operation on them; the last one is the whole."""
        nodes: list[Node] = []

        def part(begin: int) -> Node:
            item = problem.items[begin]
            if item < self.modulus:
                node = Node(begin, begin, 0, item, str(item))
            else:
                left = part(begin + 1)
                right = part(left.end + 1)
                sign = OPERATORS[item - self.modulus]
                forms = [left.form, right.form] if sign == "-" else sorted([left.form, right.form])
                value = _apply(sign, left.value, right.value) % self.modulus
                height = 1 + max(left.height, right.height)
                node = Node(begin, right.end, height, value, f"{sign}({','.join(forms)})")
            nodes.append(node)
            return node

        part(0)
        return nodes

    def reference(self, problem: Expression) -> Trace:
        """Part by part. values[k]: (place, value) of all parts of height k, by the place at which they begin."""
        nodes = self.parse(problem)
        values = []
        for height in range(nodes[-1].height + 1):
            values.append(tuple(sorted((n.begin, n.value) for n in nodes if n.height == height)))
        return Trace(tuple(values), nodes[-1].value)

    def verify(self, problem: Expression, predicted: NDArray[np.int64]) -> bool:
        """Read from the right with a stack of whole numbers; the remainder is taken once, at the end."""
        stack: list[int] = []
        for item in reversed(problem.items):
            whole = item if item < self.modulus else _apply(OPERATORS[item - self.modulus], stack.pop(), stack.pop())
            stack.append(whole)
        return predicted.tolist() == [stack[0] % self.modulus]

    @cached_property
    def _laws(self) -> list[NDArray[np.float64]]:
        """[l] -> probability of each value of an expression of l operations."""
        m = self.modulus
        tables = [np.array([_apply(sign, a, b) % m for a in range(m) for b in range(m)]) for sign in OPERATORS]
        laws = [np.full(m, 1 / m)]
        for count in range(1, self.operations + 1):
            law = np.zeros(m)
            for left in range(count):
                both = np.outer(laws[left], laws[count - 1 - left]).ravel()
                law += sum(np.bincount(table, both, m) for table in tables)
            laws.append(law / (count * len(tables)))
        return laws


def _apply(sign: str, left: int, right: int) -> int:
    return left + right if sign == "+" else left - right if sign == "-" else left * right
