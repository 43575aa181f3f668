"""Capacity (bioS): biographies of N people, told again and again in other words; how many bits does a model keep?

    <bos> first middle last he|she  .. .. .. month day year  .. .. .. city  .. .. .. university  .. major  .. employer

A value stands after a template of three words, drawn anew each time (for each of the five sentences by itself). As in a
language model, the position before a name or value answers it; template words are not scored. Everybody is for
training: what is measured is memory.

    bits per parameter  R = [N log2(N0 / e^p1) + N log2(S0 / e^p2)] / P
    ceiling             [N log2(N0 / N) + N log2 S0] / P

p1, p2: cross-entropy (nats) of a person's name and values, summed over their tokens, averaged over people; N0 names and
S0 sets of values exist; P stored parameters. The first term of the ceiling is ours: names are a set, so knowing them
all leaves log N nats, which name comes next.

Reference: Allen-Zhu, Li: "Physics of Language Models: Part 3.3, Knowledge Capacity Scaling Laws", arXiv:2404.05405.
Deviations: a name or a value is one token (a date three); three short templates per sentence instead of many long ones.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from looplab._types import Float, Int
from looplab.recurrence.philox import stream_key
from looplab.tasks.base import IGNORED, TASKS, Draws, Example, Task, Trace, check_trained

NAMES = {"first": 400, "middle": 400, "last": 1000}
VALUES = {
    "gender": 2,
    "month": 12,
    "day": 28,
    "year": 200,
    "city": 200,
    "university": 300,
    "major": 100,
    "employer": 263,
}
TEMPLATES = (
    ("was born on", "saw daylight on", "has birthday on"),
    ("grew up in", "was raised in", "spent childhood in"),
    ("studied hard at", "took classes at", "was educated at"),
    ("majored there in", "with focus on", "wrote much about"),
    ("now works for", "is employed by", "earns money at"),
)
"""Of the sentences about date, city, university, major, employer."""
POSSIBLE_NAMES = math.prod(NAMES.values())
POSSIBLE_VALUES = math.prod(VALUES.values())
WORDS = tuple(dict.fromkeys(word for sentence in TEMPLATES for line in sentence for word in line.split()))
SIZES = NAMES | VALUES


class Person(NamedTuple):
    """Numbers of the parts of a name, and of the values, in the order of NAMES and VALUES."""

    name: tuple[int, ...]
    values: tuple[int, ...]


@dataclass(frozen=True)
class Biography:
    """Who, and the template of every sentence."""

    person: int
    templates: tuple[int, ...]


@TASKS.register("capo")
@dataclass(frozen=True, kw_only=True)
class Capo(Task):
    """Biographies to learn by heart; the difficulty is the number of people."""

    reference_paper = "arXiv:2404.05405"
    world: int = 0
    """Number of the world: other people."""
    train: tuple[int, ...] = (500,)
    """Numbers of people; the first n of the world are the same at every number."""

    def __post_init__(self) -> None:
        if not self.train or min(self.train) < 1:
            raise ValueError(f"Capo.train must name numbers of people of at least 1. Got {self.train}. 500 is small.")
        check_trained(self, self.train)

    def check(self, difficulty: int) -> None:
        """Refuses more people than there are."""
        super().check(difficulty)
        if difficulty > max(self.train):
            raise ValueError(
                f"difficulty must be at most {max(self.train)} for {self.name} with train={self.train}: there are no "
                f"more people. Got {difficulty}. Raise train."
            )

    @cached_property
    def people(self) -> tuple[Person, ...]:
        """Everybody. No two have the same name."""
        key, known, people = stream_key(self.world, "capo"), set(), []
        for number in range(max(self.train)):
            attempt = 0
            while True:
                draws = Draws(key, number, attempt)
                name = tuple(draws.integer(size) for size in NAMES.values())
                if name not in known:
                    break
                attempt += 1
            known.add(name)
            people.append(Person(name, tuple(draws.integer(size) for size in VALUES.values())))
        return tuple(people)

    @cached_property
    def tokens(self) -> tuple[str, ...]:
        genders = ("he", "she")
        return (
            "<bos>",
            *WORDS,
            *(genders[i] if k == "gender" else f"{k}{i}" for k, n in SIZES.items() for i in range(n)),
        )

    @property
    def symbols(self) -> tuple[str, ...]:
        return self.tokens

    @property
    def train_difficulties(self) -> tuple[int, ...]:
        return self.train

    @property
    def test_difficulties(self) -> tuple[int, ...]:
        return self.train

    def length(self, difficulty: int) -> int:
        return len(_LAYOUT)

    def num_steps(self, difficulty: int) -> int:
        """Looking up takes no number of steps that grows with the people."""
        return 1

    def space(self, difficulty: int) -> float:
        return float(difficulty * math.prod(map(len, TEMPLATES)))

    def held_out(self, difficulty: int) -> bool:
        """Nobody is."""
        return False

    def chance(self, difficulty: int) -> float:
        """Somebody's values, guessed without reading the name."""
        return 1 / difficulty

    def draw(self, difficulty: int, draws: Draws) -> Biography:
        return Biography(draws.integer(difficulty), tuple(draws.integer(len(lines)) for lines in TEMPLATES))

    def canonical(self, problem: Biography) -> bytes:
        """The person: the words do not matter."""
        return problem.person.to_bytes(8, "little")

    def example(self, problem: Biography) -> Example:
        told = dict(zip(SIZES, (n for part in self.people[problem.person] for n in part), strict=True))
        words = [line.split() for line in (t[i] for t, i in zip(TEMPLATES, problem.templates, strict=True))]
        tokens = np.zeros(len(_LAYOUT), np.int64)
        for place, (kind, number) in enumerate(_LAYOUT):
            if kind in SIZES:
                tokens[place] = _FIRST[kind] + told[kind]
            elif kind:
                tokens[place] = 1 + WORDS.index(words[int(kind)][number])
        labels = np.full(len(tokens), IGNORED, np.int64)
        scored = [*self.name_places, *self.value_places]
        labels[scored] = tokens[[place + 1 for place in scored]]
        return Example(tokens=tokens, labels=labels, answer=slice(self.value_places[0], len(tokens)))

    def decode(self, tokens: NDArray[np.int64]) -> Biography:
        word = [int(t) for t in tokens]
        told = {kind: word[i] - _FIRST[kind] for i, (kind, _) in enumerate(_LAYOUT[: len(word)]) if kind in SIZES}
        person = self._numbers.get(tuple(told.get(kind, -1) for kind in NAMES))
        if person is not None:
            for templates in self._told(word):
                found = Biography(person, templates)
                if self.example(found).tokens.tolist() == word:
                    return found
        raise ValueError(f"capo: tokens must be the biography of one of {len(self.people)} people. Got {word}.")

    def reference(self, problem: Biography) -> Trace:
        """The record. There is nothing to compute, so no intermediate values."""
        return Trace((), self.people[problem.person].values)

    def verify(self, problem: Biography, predicted: NDArray[np.int64]) -> bool:
        """The person is among those of whom all predicted values are true."""
        values = [int(predicted[place - self.value_places[0]]) for place in self.value_places]
        told = tuple(value - _FIRST[kind] for value, kind in zip(values, VALUES, strict=True))
        return any(number == problem.person for number, person in enumerate(self.people) if person.values == told)

    @property
    def name_places(self) -> tuple[int, ...]:
        """Positions that answer with a part of the name: each before the part itself."""
        return tuple(place - 1 for place, (kind, _) in enumerate(_LAYOUT) if kind in NAMES)

    @property
    def value_places(self) -> tuple[int, ...]:
        """Positions that answer with a value."""
        return tuple(place - 1 for place, (kind, _) in enumerate(_LAYOUT) if kind in VALUES)

    def name_and_value_nats(
        self, logits: Float[Tensor, "batch seq vocab"], tokens: Int[Tensor, "batch seq"]
    ) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
        """Cross-entropy of every row's name and of its values, each summed over its tokens."""
        nats = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        rows = nats.view(len(tokens), -1)
        return rows[:, list(self.name_places)].sum(1), rows[:, list(self.value_places)].sum(1)

    @cached_property
    def _numbers(self) -> dict[tuple[int, ...], int]:
        return {person.name: number for number, person in enumerate(self.people)}

    def _told(self, word: list[int]) -> list[tuple[int, ...]]:
        """The templates that these tokens use, as the only element; empty where they use none."""
        if len(word) != len(_LAYOUT) or not all(0 <= t < len(self.tokens) for t in word):
            return []
        said: list[list[str]] = [[] for _ in TEMPLATES]
        for token, (kind, _) in zip(word, _LAYOUT, strict=True):
            if kind.isdigit():
                said[int(kind)].append(self.tokens[token])
        lines = [" ".join(words) for words in said]
        if not all(line in known for line, known in zip(lines, TEMPLATES, strict=True)):
            return []
        return [tuple(known.index(line) for line, known in zip(lines, TEMPLATES, strict=True))]


def bits_per_parameter(*, people: int, name_nats: float, value_nats: float, parameters: int) -> float:
    """R: bits about N people that the losses prove, per stored parameter.

    Args:
        name_nats: p1, mean over people of the summed cross-entropy of the name.
        value_nats: p2, the same of the values.
        parameters: Stored ones, each counted once however often it is applied.
    """
    if people < 1 or parameters < 1:
        raise ValueError(
            f"bits_per_parameter: people and parameters must be at least 1. Got {people} and {parameters}. Count them."
        )
    bits = math.log2(POSSIBLE_NAMES) + math.log2(POSSIBLE_VALUES) - (name_nats + value_nats) / math.log(2)
    return people * bits / parameters


def ceiling(*, people: int, parameters: int) -> float:
    """R of a model that knows everybody by heart."""
    return bits_per_parameter(people=people, name_nats=math.log(people), value_nats=0.0, parameters=parameters)


def _first_tokens() -> dict[str, int]:
    """Kind of name or value -> token of its number 0."""
    found, token = {}, 1 + len(WORDS)
    for kind, size in SIZES.items():
        found[kind] = token
        token += size
    return found


def _layout() -> list[tuple[str, int]]:
    """What stands where: ("", 0) the begin, (kind, 0) a name or value, (number of sentence, word) a template word."""
    told = [["month", "day", "year"], ["city"], ["university"], ["major"], ["employer"]]
    places = [("", 0), *((kind, 0) for kind in (*NAMES, "gender"))]
    for number, kinds in enumerate(told):
        places += [(str(number), word) for word in range(3)] + [(kind, 0) for kind in kinds]
    return places


_FIRST = _first_tokens()
_LAYOUT = _layout()
