"""Tower of Hanoi: n discs from one peg to another, 2^n - 1 moves.

    C   A A A   <moves>   A>C A>B C>B A>C B>A B>C A>C        goal; the peg of every disc, largest first; moves

A move takes the upper disc of a peg to a peg without a smaller one. The shortest solution is the only one so short.
"""

import functools
import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from looplab.tasks.base import TASKS, Draws, check_trained
from looplab.tasks.moves import ASK, MARKS, MoveTask
from looplab.tasks.symmetry import Symmetry

PEGS = ("A", "B", "C")
STEPS = tuple(itertools.permutations(range(3), 2))
FIRST_PEG, FIRST_STEP = len(MARKS), len(MARKS) + len(PEGS)
MOST_DISCS = 16


@dataclass(frozen=True)
class Tower:
    """A tower of so many discs, and the pegs it stands on and goes to."""

    discs: int
    start: int
    goal: int


@TASKS.register("hanoi")
@dataclass(frozen=True, kw_only=True)
class Hanoi(MoveTask):
    """Move a tower, never a disc onto a smaller one. A position is the peg of every disc, largest first."""

    tokens = (*MARKS, *PEGS, *(f"{PEGS[a]}>{PEGS[b]}" for a, b in STEPS))  # type: ignore[assignment]
    train: tuple[int, ...] = (2, 3, 4)
    """Discs to train at; tests go to twice the most."""

    def __post_init__(self) -> None:
        check_trained(self, self.train)

    @property
    def train_difficulties(self) -> tuple[int, ...]:
        return self.train

    @property
    def test_difficulties(self) -> tuple[int, ...]:
        most = max(self.train)
        return tuple(sorted({*self.train, *range(most, min(2 * most, MOST_DISCS) + 1)}))

    def check(self, difficulty: int) -> None:
        """Refuses towers whose solution is too long to write down."""
        super().check(difficulty)
        if difficulty > MOST_DISCS:
            raise ValueError(
                f"difficulty must be at most {MOST_DISCS} for {self.name}: {difficulty} discs need 2^{difficulty} - 1 "
                f"moves. Got {difficulty}. Take fewer."
            )

    def most_moves(self, difficulty: int) -> int:
        return 2**difficulty - 1

    def difficulty_of(self, problem: Tower) -> int:
        return problem.discs

    def space(self, difficulty: int) -> float:
        return float(len(STEPS))

    def chance(self, difficulty: int) -> float:
        return 1 / len(STEPS)

    def draw(self, difficulty: int, draws: Draws) -> Tower:
        start, goal = draws.choice(STEPS)
        return Tower(difficulty, start, goal)

    def canonical(self, problem: Tower) -> bytes:
        """All are equal up to the names of pegs."""
        return bytes([problem.discs])

    def decode(self, tokens: NDArray[np.int64]) -> Tower:
        stated = [int(t) for t in tokens]
        stated = stated[: stated.index(ASK)] if ASK in stated else []
        pegs = {token - FIRST_PEG for token in stated}
        if len(stated) < 2 or not pegs <= {0, 1, 2} or len({*stated[1:]}) > 1 or len(pegs) != 2:
            raise ValueError(
                f"hanoi: tokens must be the goal's peg, another peg once for every disc, and {MARKS[ASK]}. "
                f"Got {[int(t) for t in tokens][:8]}. Draw one with sample."
            )
        return Tower(len(stated) - 1, stated[1] - FIRST_PEG, stated[0] - FIRST_PEG)

    def start(self, problem: Tower) -> tuple[int, ...]:
        return (problem.start,) * problem.discs

    def play(self, problem: Tower, position: tuple[int, ...], move: int) -> tuple[int, ...] | None:
        if not 0 <= move - FIRST_STEP < len(STEPS):
            return None
        source, target = STEPS[move - FIRST_STEP]
        on_source = [disc for disc, peg in enumerate(position) if peg == source]
        on_target = [disc for disc, peg in enumerate(position) if peg == target]
        if not on_source or (on_target and on_target[-1] > on_source[-1]):
            return None
        return (*position[: on_source[-1]], target, *position[on_source[-1] + 1 :])

    def solved(self, problem: Tower, position: tuple[int, ...]) -> bool:
        return set(position) == {problem.goal}

    def solve(self, problem: Tower) -> tuple[int, ...]:
        return _carried(problem.discs, problem.start, problem.goal)

    def wanted(self, problem: Tower) -> list[int]:
        return [FIRST_PEG + problem.goal]

    def placed(self, problem: Tower, position: tuple[int, ...]) -> list[int]:
        return [FIRST_PEG + peg for peg in position]

    def symmetries(self, difficulty: int) -> tuple[Symmetry, ...]:
        """Generators: two neighbouring pegs change names."""
        found = []
        for order in ((1, 0, 2), (0, 2, 1)):
            steps = [FIRST_STEP + STEPS.index((order[a], order[b])) for a, b in STEPS]
            names = (*range(FIRST_PEG), *(FIRST_PEG + peg for peg in order), *steps)
            found.append(Symmetry(tuple(range(self.length(difficulty))), names))
        return tuple(found)


@functools.lru_cache(maxsize=512)
def _carried(discs: int, source: int, target: int) -> tuple[int, ...]:
    """All but the largest disc out of the way, the largest, and the others onto it."""
    if not discs:
        return ()
    spare, largest = 3 - source - target, FIRST_STEP + STEPS.index((source, target))
    return (*_carried(discs - 1, source, spare), largest, *_carried(discs - 1, spare, target))
