"""Word problems over a finite group: n elements come in, the product after every one of them is asked.

    s_0 = identity,   s_j = s_{j-1} then operation j;        position j answers s_j

    swap_s5, swap_s6   the transpositions of 5 (6) slots; `identity=True` adds "do nothing"
    s3 s5 a5           all elements of the group
    z<m>               residues, added mod m

A state is an arrangement of items in slots, answered slot by slot (`cells`), or a number of its own (`cells = 1`: z_m,
and every group with `classes=True`). The parity of a product of n transpositions is that of n, so chance at swap_s5 is
1/60 and not 1/120.

Reference: word problems as a measure of sequential computation: Liu et al., "Transformers Learn Shortcuts to Automata",
arXiv:2210.10749; Merrill et al., "The Illusion of State in State-Space Models", arXiv:2404.08819.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from looplab._types import Int
from looplab.recurrence.philox import philox
from looplab.tasks.base import TASKS, Draws, Example, Progress, Split, Task, Trace

BOS = 0
_GROUP = re.compile(r"(swap_s|s|a|z)(\d+)")


@dataclass(frozen=True)
class Word:
    """Numbers of the generators, in the order they act."""

    operations: tuple[int, ...]


@TASKS.register("state_tracking")
@dataclass(frozen=True, kw_only=True)
class StateTracking(Task, Progress):
    """The running product of group elements."""

    reference_paper = "arXiv:2210.10749"
    group: str = "swap_s5"
    """swap_s<n>, s<n>, a<n> (n up to 6) or z<m>."""
    identity: bool = False
    """A further generator that does nothing (swap groups)."""
    classes: bool = False
    """Answer with one symbol per group element instead of one per slot."""
    train_length: int = 8
    """Difficulty of training; tests go to 16 times that."""

    def __post_init__(self) -> None:
        match = _GROUP.fullmatch(self.group)
        if match is None or not (2 <= int(match[2]) <= (10_000 if match[1] == "z" else 6)):
            raise ValueError(
                f"StateTracking.group must be swap_s<n>, s<n> or a<n> with n = 2..6, or z<m> with m = 2..10000. "
                f"Got {self.group!r}. swap_s5 is the usual one."
            )
        if self.identity and match[1] != "swap_s":
            raise ValueError(f"StateTracking.identity is for swap groups, others contain it. Got group={self.group!r}.")
        if self.train_length < 1:
            raise ValueError(f"StateTracking.train_length must be at least 1. Got {self.train_length}.")

    @cached_property
    def _kind(self) -> tuple[str, int]:
        match = _GROUP.fullmatch(self.group)
        assert match is not None
        return match[1], int(match[2])

    @cached_property
    def elements(self) -> NDArray[np.int64]:
        """[elements, slots]: every reachable state as an arrangement (z_m: one slot, its residue), identity first."""
        kind, n = self._kind
        if kind == "z":
            return np.arange(n, dtype=np.int64)[:, None]
        every = itertools.permutations(range(n))
        return np.array([p for p in every if kind != "a" or _even(p)], np.int64)

    @cached_property
    def generators(self) -> NDArray[np.int64]:
        """[generators, slots]: the state after this operation alone."""
        kind, n = self._kind
        if kind != "swap_s":
            return self.elements
        swaps = [list(range(n)) for _ in range(n * (n - 1) // 2 + self.identity)]
        for swap, (a, b) in zip(swaps, itertools.combinations(range(n), 2), strict=False):
            swap[a], swap[b] = b, a
        return np.array(swaps, np.int64)

    @property
    def cells(self) -> int:  # type: ignore[override]
        """Slots, or 1."""
        return 1 if self._as_classes else self.elements.shape[1]

    @property
    def _as_classes(self) -> bool:
        return self.classes or self._kind[0] == "z"

    @cached_property
    def tokens(self) -> tuple[str, ...]:
        kind, n = self._kind
        names = [self._name(g) for g in self.generators]
        if kind == "swap_s":
            names = [f"({a}{b})" for a, b in itertools.combinations(range(n), 2)] + ["()"] * self.identity
        return ("<bos>", *names)

    @cached_property
    def symbols(self) -> tuple[str, ...]:
        if self._as_classes:
            return tuple(self._name(e) for e in self.elements)
        return tuple(str(item) for item in range(self.elements.shape[1]))

    @property
    def train_difficulties(self) -> tuple[int, ...]:
        return (self.train_length,)

    @property
    def test_difficulties(self) -> tuple[int, ...]:
        return tuple(self.train_length * factor for factor in (1, 2, 4, 8, 16))

    def length(self, difficulty: int) -> int:
        return difficulty + 1

    def space(self, difficulty: int) -> float:
        return float(len(self.generators)) ** min(difficulty, 64)  # beyond that only its being large matters

    def chance(self, difficulty: int) -> float:
        reachable = len(self.elements)
        if self._kind[0] == "swap_s" and not self.identity and self._kind[1] > 2:
            reachable //= 2
        return 1 / max(1, min(reachable, self.space(difficulty)))

    def draw(self, difficulty: int, draws: Draws) -> Word:
        return Word(tuple(int(g) for g in draws.integers(len(self.generators), difficulty)))

    def canonical(self, problem: Word) -> bytes:
        """Swap groups: slots renamed in the order in which they are first touched. Others: the word itself."""
        kind, n = self._kind
        if kind != "swap_s":
            return np.array(problem.operations, "<u2").tobytes()
        pairs = [frozenset(pair) for pair in (*itertools.combinations(range(n), 2), ())]
        word = [pairs[operation] for operation in problem.operations]
        names: dict[int, int] = {}
        for place, pair in enumerate(word):
            new = pair - names.keys()
            if len(new) == 2:  # neither comes first here: the next operation that touches only one of them decides
                later = (new & other for other in word[place + 1 :])
                new = next((one for one in later if len(one) == 1), frozenset([min(new)]))
            for slot in [*new, *(pair - names.keys() - new)]:
                names[slot] = len(names)
        return bytes(b for pair in word for b in (sorted(names[slot] for slot in pair) or (255, 255)))

    def example(self, problem: Word) -> Example:
        values = self._values(np.array([problem.operations], np.int64))[0]
        tokens = np.array([BOS, *(g + 1 for g in problem.operations)], np.int64)
        return Example(tokens=tokens, labels=values, answer=slice(len(tokens) - 1, len(tokens)))

    def decode(self, tokens: NDArray[np.int64]) -> Word:
        word = [int(t) for t in tokens]
        if not word or word[0] != BOS or not all(1 <= t < len(self.tokens) for t in word[1:]):
            raise ValueError(
                f"state_tracking: tokens must be <bos> and then generators 1..{len(self.tokens) - 1}. Got {word}."
            )
        return Word(tuple(t - 1 for t in word[1:]))

    def reference(self, problem: Word) -> Trace:
        """Items moved slot by slot, or residues added."""
        kind, n = self._kind
        state: list[int] = [0] if kind == "z" else list(range(n))
        values = [tuple(state)]
        for operation in problem.operations:
            move = [int(x) for x in self.generators[operation]]
            state = [(state[0] + move[0]) % n] if kind == "z" else [state[slot] for slot in move]
            values.append(tuple(state))
        return Trace(tuple(values), values[-1])

    def verify(self, problem: Word, predicted: NDArray[np.int64]) -> bool:
        """Every slot's item followed back through the word; residues as one sum."""
        kind, n = self._kind
        if kind == "z":
            return predicted.tolist() == [sum(problem.operations) % n]
        places = list(range(n))
        for operation in reversed(problem.operations):
            places = [int(self.generators[operation][place]) for place in places]
        found = self.elements[int(predicted[0])] if self._as_classes else predicted[0]
        return places == found.tolist()

    def batch(
        self, difficulty: int, key: int, indices: Sequence[int], split: Split | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The same as one by one, with the arithmetic of all rows done at once."""
        self.check(difficulty)
        stream, rows = self._stream(difficulty, key), np.asarray(indices, np.uint64)
        words = self._draw_rows(stream, rows, difficulty, attempt=0)
        for row in range(len(rows)):
            attempt = 0
            while split is not None and self.split(difficulty, Word(tuple(words[row].tolist()))) != split:
                attempt += 1
                self.refuse_endless(attempt, difficulty, split)
                words[row] = self._draw_rows(stream, rows[row : row + 1], difficulty, attempt)[0]
        tokens = np.concatenate([np.full((len(rows), 1), BOS), words + 1], axis=1)
        return tokens, self._values(words)

    def start(self, tokens: Int[Tensor, "batch seq"]) -> Int[Tensor, "batch seq *cells"]:
        first = torch.as_tensor(self._labels(self.elements[:1])[0], device=tokens.device)
        return first.expand(*tokens.shape, *first.shape).contiguous()

    def advance(
        self, values: Int[Tensor, "batch seq *cells"], tokens: Int[Tensor, "batch seq"]
    ) -> Int[Tensor, "batch seq *cells"]:
        before = torch.cat([self.start(tokens[:, :1]), values[:, :-1]], dim=1)
        operation = (tokens - 1).clamp(min=0)
        if self._as_classes:
            table = torch.from_numpy(self._table).to(tokens.device)
            after = table[before, operation]
        else:
            moves = torch.from_numpy(self.generators).to(tokens.device)[operation]
            after = before.gather(-1, moves)
        bos = (tokens == BOS).view(*tokens.shape, *[1] * (values.dim() - 2))
        return torch.where(bos, self.start(tokens), after)

    @cached_property
    def _table(self) -> NDArray[np.int64]:
        """[elements, generators] -> number of the element after the operation."""
        kind, n = self._kind
        if kind == "z":
            return (np.arange(n)[:, None] + np.arange(n)[None]) % n
        after = self.elements[:, self.generators]  # elements, generators, slots
        return self._number[_code(after, n)]

    @cached_property
    def _number(self) -> NDArray[np.int64]:
        """Code of an arrangement -> its number among the elements."""
        n = self.elements.shape[1]
        numbers = np.full(n**n, -1, np.int64)
        numbers[_code(self.elements, n)] = np.arange(len(self.elements))
        return numbers

    def _values(self, words: NDArray[np.int64]) -> NDArray[np.int64]:
        """[rows, n] -> labels of the states after 0 .. n operations."""
        kind, n = self._kind
        if kind == "z":
            sums = np.cumsum(words, axis=1) % n
            return np.concatenate([np.zeros((len(words), 1), np.int64), sums], axis=1)
        states = np.empty((len(words), words.shape[1] + 1, n), np.int64)
        states[:, 0] = np.arange(n)
        for place in range(words.shape[1]):
            states[:, place + 1] = np.take_along_axis(states[:, place], self.generators[words[:, place]], axis=1)
        return self._labels(states)

    def _labels(self, states: NDArray[np.int64]) -> NDArray[np.int64]:
        """Arrangements [.., slots] as labels."""
        if self._kind[0] == "z":
            return states[..., 0]
        return self._number[_code(states, self._kind[1])] if self._as_classes else states

    def _draw_rows(self, stream: int, rows: NDArray[np.uint64], difficulty: int, attempt: int) -> NDArray[np.int64]:
        """What `Draws(stream, row, attempt).integers` gives for every row."""
        blocks = -(-2 * difficulty // 4)
        counter = np.zeros((len(rows), blocks, 4), np.uint64)
        counter[..., 0], counter[..., 1] = np.arange(blocks, dtype=np.uint64), attempt
        counter[..., 2], counter[..., 3] = (rows & np.uint64(0xFFFFFFFF))[:, None], (rows >> np.uint64(32))[:, None]
        wide = philox(counter, stream).reshape(len(rows), -1)[:, : 2 * difficulty].reshape(len(rows), difficulty, 2)
        fraction = ((wide[..., 0] >> np.uint64(5)) * 2.0**26 + (wide[..., 1] >> np.uint64(6))) * 2.0**-53
        return (fraction * len(self.generators)).astype(np.int64)

    def _name(self, state: NDArray[np.int64]) -> str:
        return str(int(state[0])) if self._kind[0] == "z" else "".join(str(int(i)) for i in state)


@TASKS.register("state_tracking_shorter")
@dataclass(frozen=True, kw_only=True)
class ShorterWords(StateTracking):
    """The same, trained on words of 1 .. `train_length` operations, every length as often."""

    @property
    def train_difficulties(self) -> tuple[int, ...]:
        return tuple(range(1, self.train_length + 1))

    @property
    def test_difficulties(self) -> tuple[int, ...]:
        return tuple(sorted({*self.train_difficulties, *super().test_difficulties}))


def _even(permutation: Sequence[int]) -> bool:
    return sum(a > b for a, b in itertools.combinations(permutation, 2)) % 2 == 0


def _code(states: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    return (states * n ** np.arange(n)).sum(-1)
