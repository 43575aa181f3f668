"""Checker jumping: n red and n blue pieces on 2n + 1 squares change sides, (n + 1)^2 - 1 moves.

    R   R R _ B B   <moves>   R+ B++ B+ R++ R++ B+ B++ R+        who begins; squares; moves

A piece slides onto the empty square next to it (`+`), or jumps over one piece of the other colour onto it (`++`), never
back. Colour and kind say which piece moves, as there is one empty square. Once it is said who begins there is one
solution; it is found by search without it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from looplab.tasks.base import TASKS, Draws, check_trained
from looplab.tasks.moves import ASK, MARKS, MoveTask
from looplab.tasks.symmetry import Symmetry

NAMES = ("_", "R", "B")
EMPTY, RED, BLUE = range(len(MARKS), len(MARKS) + len(NAMES))
STEPS = ((RED, 1), (RED, 2), (BLUE, 1), (BLUE, 2))
FIRST_STEP = len(MARKS) + len(NAMES)


@dataclass(frozen=True)
class Row:
    """So many pieces of each colour; who stands on the left, and who begins (RED or BLUE)."""

    pieces: int
    left: int
    begins: int


@TASKS.register("checkers")
@dataclass(frozen=True, kw_only=True)
class Checkers(MoveTask):
    """Let the colours change sides. A position is the token of every square."""

    tokens = (*MARKS, *NAMES, "R+", "R++", "B+", "B++")  # type: ignore[assignment]
    train: tuple[int, ...] = (1, 2, 3)
    """Pieces of a colour to train at; tests have two more."""

    def __post_init__(self) -> None:
        check_trained(self, self.train)

    @property
    def train_difficulties(self) -> tuple[int, ...]:
        return self.train

    @property
    def test_difficulties(self) -> tuple[int, ...]:
        return tuple(sorted({*self.train, max(self.train) + 1, max(self.train) + 2}))

    def most_moves(self, difficulty: int) -> int:
        return (difficulty + 1) ** 2 - 1

    def difficulty_of(self, problem: Row) -> int:
        return problem.pieces

    def space(self, difficulty: int) -> float:
        return 4.0

    def chance(self, difficulty: int) -> float:
        """Moves are named by colour, so they depend only on who begins."""
        return 0.5

    def draw(self, difficulty: int, draws: Draws) -> Row:
        return Row(difficulty, draws.choice((RED, BLUE)), draws.choice((RED, BLUE)))

    def canonical(self, problem: Row) -> bytes:
        """All are equal up to mirror image and the names of colours."""
        return bytes([problem.pieces])

    def decode(self, tokens: NDArray[np.int64]) -> Row:
        stated = [int(t) for t in tokens]
        stated = stated[: stated.index(ASK)] if ASK in stated else []
        pieces = (len(stated) - 2) // 2
        if pieces >= 1 and stated[0] in (RED, BLUE) and stated[1] in (RED, BLUE):
            row = Row(pieces, stated[1], stated[0])
            if stated[1:] == list(self.start(row)):
                return row
        raise ValueError(
            f"checkers: tokens must be who begins, n pieces of a colour, {NAMES[0]}, n of the other, and {MARKS[ASK]}. "
            f"Got {[int(t) for t in tokens][:8]}. Draw one with sample."
        )

    def start(self, problem: Row) -> tuple[int, ...]:
        right = RED + BLUE - problem.left
        return (*[problem.left] * problem.pieces, EMPTY, *[right] * problem.pieces)

    def play(self, problem: Row, position: tuple[int, ...], move: int) -> tuple[int, ...] | None:
        if not 0 <= move - FIRST_STEP < len(STEPS):
            return None
        colour, far = STEPS[move - FIRST_STEP]
        forward = 1 if colour == problem.left else -1
        empty = position.index(EMPTY)
        source = empty - far * forward
        if not 0 <= source < len(position) or position[source] != colour:
            return None
        if far == 2 and position[empty - forward] != RED + BLUE - colour:
            return None
        after = list(position)
        after[source], after[empty] = EMPTY, colour
        return tuple(after)

    def solved(self, problem: Row, position: tuple[int, ...]) -> bool:
        return position == self.start(problem)[::-1]

    def solve(self, problem: Row) -> tuple[int, ...]:
        """The colours take turns: runs of r - 1 jumps and a slide for r = 1 .. n, one of n jumps, and runs of a slide
        and r - 1 jumps for r = n .. 1."""
        n = problem.pieces
        runs = [[2] * (r - 1) + [1] for r in range(1, n + 1)]
        runs += [[2] * n, *(run[::-1] for run in reversed(runs))]
        colours = [problem.begins, RED + BLUE - problem.begins]
        moves = [(colours[turn % 2], far) for turn, run in enumerate(runs) for far in run]
        return tuple(FIRST_STEP + STEPS.index(move) for move in moves)

    def wanted(self, problem: Row) -> list[int]:
        return [problem.begins]

    def placed(self, problem: Row, position: tuple[int, ...]) -> list[int]:
        return list(position)

    def symmetries(self, difficulty: int) -> tuple[Symmetry, ...]:
        """Generators: mirror image, and colours changing names."""
        seq, squares = self.length(difficulty), 2 * difficulty + 1
        swapped = [RED + BLUE - c if c in (RED, BLUE) else c for c in range(FIRST_STEP)]
        steps = [FIRST_STEP + STEPS.index((RED + BLUE - colour, far)) for colour, far in STEPS]
        return (
            Symmetry((0, *range(squares, 0, -1), *range(squares + 1, seq)), tuple(range(len(self.tokens)))),
            Symmetry(tuple(range(seq)), (*swapped, *steps)),
        )
