"""River crossing: n pairs of actor and agent, a boat for b, and no actor with another's agent unless its own is there.

    a1 A1 a2 A2   near near near near   <moves>   (a1,A1) (A1) ..      who; where; who is in the boat, there and back

The rule holds on both banks, and so in the boat: a crew that breaks it breaks it on landing. A position is the bank of
everyone; the boat's is the parity of crossings. The reference is the first shortest solution of a breadth-first search.
Where that ends without one the answer is the token `unsolvable`: a boat for two carries three pairs at most, one for
three carries five, one for four any number.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from looplab.tasks.base import TASKS, Draws, check_trained
from looplab.tasks.moves import ASK, MARKS, MoveTask
from looplab.tasks.symmetry import Symmetry

FIRST_PERSON = len(MARKS)
CARRIED = {2: 3, 3: 5, 4: 6}
"""Most pairs that a boat of this size carries, among those offered."""

Position = tuple[int, tuple[bool, ...]]
"""Crossings mod 2; who is across, in the order they are listed."""


@dataclass(frozen=True)
class Party:
    """Numbers of the pairs, in the order they are listed."""

    pairs: tuple[int, ...]


@TASKS.register("river")
@dataclass(frozen=True, kw_only=True)
class River(MoveTask):
    """Bring everyone across."""

    boat: int = 3
    """How many it holds: 2, 3 or 4."""
    pairs: int = 6
    """Pairs that have a name."""
    train: tuple[int, ...] | None = None
    """Pairs to train at; None: all but the most that the boat can carry."""

    def __post_init__(self) -> None:
        if self.boat not in CARRIED:
            raise ValueError(f"River.boat must be 2, 3 or 4. Got {self.boat}. 3 is the usual one.")
        if not 2 <= self.pairs <= 6:
            raise ValueError(f"River.pairs must be from 2 to 6. Got {self.pairs}. 6 is the usual one.")
        check_trained(self, self.train_difficulties)

    @cached_property
    def people(self) -> tuple[str, ...]:
        """Actors (small letters) and agents, pair by pair."""
        return tuple(f"{letter}{pair + 1}" for pair in range(self.pairs) for letter in "aA")

    @cached_property
    def crews(self) -> tuple[tuple[int, ...], ...]:
        """Every crew that may be in the boat, as numbers of people."""
        everyone = range(2 * self.pairs)
        crews = (crew for size in range(1, self.boat + 1) for crew in itertools.combinations(everyone, size))
        return tuple(crew for crew in crews if _safe(sum(1 << person for person in crew)))

    @cached_property
    def tokens(self) -> tuple[str, ...]:
        """A boat with one person is `(a1)`."""
        crews = (",".join(self.people[person] for person in crew) for crew in self.crews)
        return (*MARKS, *self.people, "near", "far", *(f"({crew})" for crew in crews))

    @property
    def train_difficulties(self) -> tuple[int, ...]:
        return tuple(range(1, min(CARRIED[self.boat], self.pairs))) if self.train is None else self.train

    @property
    def test_difficulties(self) -> tuple[int, ...]:
        """Up to one pair more than the boat can carry, if there are as many."""
        return tuple(range(1, min(CARRIED[self.boat] + 1, self.pairs) + 1))

    def check(self, difficulty: int) -> None:
        """Refuses more pairs than have a name."""
        super().check(difficulty)
        if difficulty > self.pairs:
            raise ValueError(
                f"difficulty must be at most {self.pairs} for {self.name}: more pairs have no name. Got {difficulty}. "
                "Raise River.pairs."
            )

    def most_moves(self, difficulty: int) -> int:
        plan, _ = search(difficulty, self.boat)
        return 1 if plan is None else len(plan)

    def difficulty_of(self, problem: Party) -> int:
        return len(problem.pairs)

    def solvable(self, difficulty: int) -> bool:
        """Whether so many pairs can cross. Those that cannot are no part of a solve rate."""
        return search(difficulty, self.boat)[0] is not None

    def check_solvable(self, difficulty: int) -> None:
        """Refuses a difficulty without a solution, for whoever counts solutions.

        Raises:
            ValueError: With the number of positions that were searched.
        """
        plan, positions = search(difficulty, self.boat)
        if plan is None:
            raise ValueError(
                f"river: n={difficulty}, boat={self.boat} has no solution (search exhausted {positions:,} states). "
                "It is excluded from solve rate."
            )

    def space(self, difficulty: int) -> float:
        return float(math.perm(self.pairs, difficulty))

    def chance(self, difficulty: int) -> float:
        """One over the number of different solutions that naming the pairs gives."""
        plan, _ = search(difficulty, self.boat)
        if plan is None:
            return 1.0
        same = sum(
            all(_renamed(crew, order) == crew for crew in plan) for order in itertools.permutations(range(difficulty))
        )
        return same / math.perm(self.pairs, difficulty)

    def draw(self, difficulty: int, draws: Draws) -> Party:
        return Party(tuple(draws.sample(range(self.pairs), difficulty)))

    def canonical(self, problem: Party) -> bytes:
        """All are equal up to the names of pairs."""
        return bytes([len(problem.pairs)])

    def decode(self, tokens: NDArray[np.int64]) -> Party:
        stated = [int(t) for t in tokens]
        stated = stated[: stated.index(ASK)] if ASK in stated else []
        count = len(stated) // 4
        listed = [token - FIRST_PERSON for token in stated[: 2 * count]]
        pairs = tuple(person // 2 for person in listed[::2])
        right = [FIRST_PERSON + person for pair in pairs for person in (2 * pair, 2 * pair + 1)]
        party = Party(pairs)
        if (
            not count
            or len({*pairs}) < count
            or not {*pairs} <= {*range(self.pairs)}
            or stated != [*right, *self.placed(party, self.start(party))]
        ):
            raise ValueError(
                f"river: tokens must be pairs (actor, agent), near or far for everyone, and {MARKS[ASK]}. "
                f"Got {[int(t) for t in tokens][:8]}. Draw one with sample."
            )
        return party

    def start(self, problem: Party) -> Position:
        return 0, (False,) * (2 * len(problem.pairs))

    def play(self, problem: Party, position: Position, move: int) -> Position | None:
        number = move - self._first_crew
        if not 0 <= number < len(self.crews):
            return None
        side, across = position
        listed = [2 * pair + agent for pair in problem.pairs for agent in (0, 1)]
        crew = self.crews[number]
        if not {*crew} <= {person for person, far in zip(listed, across, strict=True) if far == bool(side)}:
            return None
        after = tuple(far != (person in crew) for person, far in zip(listed, across, strict=True))
        for bank in (False, True):
            if not _safe(sum(1 << person for person, far in zip(listed, after, strict=True) if far == bank)):
                return None
        return 1 - side, after

    def solved(self, problem: Party, position: Position) -> bool:
        return all(position[1])

    def solve(self, problem: Party) -> tuple[int, ...] | None:
        plan, _ = search(len(problem.pairs), self.boat)
        if plan is None:
            return None
        return tuple(self._first_crew + self._number[_renamed(crew, problem.pairs)] for crew in plan)

    def wanted(self, problem: Party) -> list[int]:
        """The pairs; that all are to cross is always wanted."""
        return [FIRST_PERSON + 2 * pair + agent for pair in problem.pairs for agent in (0, 1)]

    def placed(self, problem: Party, position: Position) -> list[int]:
        """The bank of everyone, in the order of the pairs."""
        near = FIRST_PERSON + len(self.people)
        return [near + far for far in position[1]]

    def symmetries(self, difficulty: int) -> tuple[Symmetry, ...]:
        """Generators: two neighbouring names change places."""
        found = []
        for pair in range(self.pairs - 1):
            order = list(range(self.pairs))
            order[pair], order[pair + 1] = pair + 1, pair
            people = [FIRST_PERSON + 2 * order[person // 2] + person % 2 for person in range(2 * self.pairs)]
            banks = range(FIRST_PERSON + len(self.people), self._first_crew)
            crews = [self._first_crew + self._number[_renamed(crew, order)] for crew in self.crews]
            names = (*range(FIRST_PERSON), *people, *banks, *crews)
            found.append(Symmetry(tuple(range(self.length(difficulty))), names))
        return tuple(found)

    @property
    def _first_crew(self) -> int:
        return FIRST_PERSON + len(self.people) + 2

    @cached_property
    def _number(self) -> dict[tuple[int, ...], int]:
        return {crew: number for number, crew in enumerate(self.crews)}


@functools.cache
def search(pairs: int, boat: int) -> tuple[tuple[tuple[int, ...], ...] | None, int]:
    """The first shortest solution for pairs 0 .. pairs - 1 as crews, or None, and the number of positions looked at."""
    everyone = (1 << 2 * pairs) - 1
    came: dict[tuple[int, int], tuple[tuple[int, int], int] | None] = {(everyone, 0): None}
    queue = [(everyone, 0)]
    for near, side in queue:
        if not near:
            return tuple(reversed([*_crews(came, (near, side))])), len(came)
        here = near if not side else everyone & ~near
        people = [person for person in range(2 * pairs) if here >> person & 1]
        for size in range(1, boat + 1):
            for crew in itertools.combinations(people, size):
                carried = sum(1 << person for person in crew)
                after = (near ^ carried, 1 - side)
                if after not in came and _safe(after[0]) and _safe(everyone & ~after[0]):
                    came[after] = ((near, side), carried)
                    queue.append(after)
    return None, len(came)


def _crews(
    came: dict[tuple[int, int], tuple[tuple[int, int], int] | None], position: tuple[int, int]
) -> Iterator[tuple[int, ...]]:
    """Who was in the boat, from the last crossing back to the first."""
    step = came[position]
    while step is not None:
        position, carried = step
        yield tuple(person for person in range(carried.bit_length()) if carried >> person & 1)
        step = came[position]


def _safe(group: int) -> bool:
    """Whether every actor (even bit) is away from agents (odd bits) or with its own."""
    actors, agents = group & 0x555555, (group >> 1) & 0x555555
    return not agents or not actors & ~agents


def _renamed(crew: tuple[int, ...], order: tuple[int, ...] | list[int]) -> tuple[int, ...]:
    return tuple(sorted(2 * order[person // 2] + person % 2 for person in crew))
