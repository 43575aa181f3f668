"""Sudoku with exactly one solution: 4 x 4, 6 x 6 (boxes of 2 rows, 3 columns) and 9 x 9.

    full grid = randomised search, fewest candidates first, then a random symmetry
    puzzle    = clues taken away in random order as long as the rest has one solution
    label     = the digit of every cell, givens too: tokens and labels have one vocabulary

Difficulty, by `sampled`:

    holes     number of blank cells
    grade     weakest technique set that solves it (`sudoku_board`): 1 naked singles .. 5 guessing. Clues are put back
              into a minimal puzzle, in random order, until the techniques of the grade solve it
    minimal   1: no clue can be taken away, whatever it takes to solve

All images of a puzzle under the board's symmetries are in one split. At 4 x 4 and 6 x 6 the canonical form is the least
image. At 9 x 9 it is an invariant of the solution: the cycle types of the digit maps between two rows of a band and
between two columns of a stack, unordered. Different puzzles may share it; they only move together.
"""

import bisect
import csv
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from looplab.data.documents import DataError
from looplab.tasks.base import TASKS, Draws, Example, Grade, Task, Trace, check_trained
from looplab.tasks.sudoku_board import GUESS, Board, board
from looplab.tasks.symmetry import Symmetry

GRIDS = {4: 288, 6: 28_200_960, 9: 6_670_903_752_021_072_936_960}
"""Number of full grids."""
MOST_HOLES = {4: 12, 6: 27, 9: 57}
"""Holes that a few grids suffice to reach."""
GRADES = {4: (1,), 6: (1, 2, 3, 5), 9: (1, 2, 3, 4, 5)}
"""Grades that occur."""
TRAINED: dict[str, dict[int, tuple[int, ...]]] = {
    "holes": {4: (6, 8), 6: (16, 20), 9: (40, 45, 50)},
    "grade": {4: (1,), 6: (1, 2), 9: (1, 2, 3)},
    "minimal": {4: (1,), 6: (1,), 9: (1,)},
}
FURTHER: dict[str, dict[int, tuple[int, ...]]] = {
    "holes": {4: (10,), 6: (24,), 9: (54,)},
    "grade": {4: (), 6: (3, 5), 9: (4, 5)},
    "minimal": {4: (), 6: (), 9: ()},
}
REMOVED_AT_ONCE = 32
WAYS = 30
"""Orders of putting clues back that are tried on one grid."""


@dataclass(frozen=True)
class Puzzle:
    """Givens row by row, 0 where blank."""

    givens: tuple[int, ...]
    solution: tuple[int, ...] | None = field(default=None, compare=False)
    """Known to whoever made the puzzle."""


@dataclass(frozen=True)
class Rated:
    """One line of a puzzle file."""

    source: str
    puzzle: Puzzle
    rating: int | None


@TASKS.register("sudoku")
@dataclass(frozen=True, kw_only=True)
class Sudoku(Task):
    """Fill the blanks so that every row, column and box holds every digit."""

    reference_paper = "arXiv:2506.21734"
    causal = False
    size: int = 9
    """4, 6 or 9."""
    sampled: str = "holes"
    """What the difficulty is: holes, grade or minimal."""
    train: tuple[int, ...] | None = None
    """Difficulties to train at; None: some usual ones of this size."""
    allow_multiple: bool = False
    """Take puzzles with several solutions from files, and grade them by validity."""

    def __post_init__(self) -> None:
        if self.size not in GRIDS:
            raise ValueError(f"Sudoku.size must be 4, 6 or 9. Got {self.size}. 9 is the usual one.")
        if self.sampled not in TRAINED:
            raise ValueError(
                f"Sudoku.sampled must be one of {', '.join(TRAINED)}. Got {self.sampled!r}. holes is the usual one."
            )
        check_trained(self, self.train_difficulties)

    @property
    def tokens(self) -> tuple[str, ...]:
        """The blank, then the digits; digit d has id d."""
        return (".", *(str(digit) for digit in range(1, self.size + 1)))

    @property
    def symbols(self) -> tuple[str, ...]:
        return self.tokens

    @property
    def train_difficulties(self) -> tuple[int, ...]:
        return TRAINED[self.sampled][self.size] if self.train is None else self.train

    @property
    def test_difficulties(self) -> tuple[int, ...]:
        return tuple(sorted({*self.train_difficulties, *FURTHER[self.sampled][self.size]}))

    def check(self, difficulty: int) -> None:
        """Refuses what puzzles of this size never or hardly ever have."""
        super().check(difficulty)
        holes = range(1, MOST_HOLES[self.size] + 1)
        known = {"holes": holes, "grade": GRADES[self.size], "minimal": (1,)}[self.sampled]
        if difficulty not in known:
            raise ValueError(
                f"difficulty must be {_listed(known)} for {self.name} with size={self.size}, "
                f"sampled={self.sampled!r}. Got {difficulty}. Choose one of these."
            )

    def length(self, difficulty: int) -> int:
        return self._board.cells

    def num_steps(self, difficulty: int) -> int:
        """What the published recursive models spend: 16 supervision steps at 9 x 9."""
        return 16 if self.size == 9 else 8

    def space(self, difficulty: int) -> float:
        """4 x 4 puzzles up to symmetry are few, whatever the difficulty; larger boards have too many to count."""
        return math.comb(16, 8) * GRIDS[4] / (128 * 24) if self.size == 4 else float("inf")

    def chance(self, difficulty: int) -> float:
        return 1 / GRIDS[self.size]

    def draw(self, difficulty: int, draws: Draws) -> Puzzle:
        numbers = _numbers(draws)
        while True:
            full = self._full(numbers)
            clues = self._thin(self._board.bits(full), _order(self._board.cells, numbers), difficulty)
            if self.sampled == "grade":
                clues = self._graded(clues, self._board.bits(full), difficulty, numbers)
            if clues and (self.sampled != "holes" or clues.bit_count() == self._board.cells - difficulty):
                return Puzzle(self._board.grid(clues), full)

    def canonical(self, problem: Puzzle) -> bytes:
        if self.size == 9:
            return _invariant(problem.solution or self.solve(problem))
        return _least_image(self.size, problem.givens)

    def example(self, problem: Puzzle) -> Example:
        solution = problem.solution or self.solve(problem)
        return Example(
            tokens=np.array(problem.givens, np.int64),
            labels=np.array(solution, np.int64),
            answer=slice(0, self._board.cells),
        )

    def decode(self, tokens: NDArray[np.int64]) -> Puzzle:
        givens = tuple(int(t) for t in tokens)
        cells, n = self._board.cells, self.size
        if len(givens) != cells or not all(0 <= g <= n for g in givens):
            raise ValueError(
                f"sudoku: tokens must be {cells} of 0 (blank) to {n}. Got {len(givens)} from {min(givens, default=0)} "
                f"to {max(givens, default=0)}. Set Sudoku.size to the size of the grid."
            )
        clash = self._board.clash(givens)
        if clash is not None:
            one, other = (f"row {cell // n + 1}, column {cell % n + 1}" for cell in clash)
            raise ValueError(
                f"sudoku: givens must differ within a row, column or box. Got {givens[clash[0]]} twice, at {one} and "
                f"at {other}. Correct one of them."
            )
        return Puzzle(givens)

    def reference(self, problem: Puzzle) -> Trace:
        """The solution by the exact solver. There are no intermediate values: any order of filling is as good."""
        return Trace((), self.solve(problem))

    def solve(self, problem: Puzzle) -> tuple[int, ...]:
        """The solution; one of them where `allow_multiple`.

        Raises:
            ValueError: There is none, or several without `allow_multiple`.
        """
        search = self._board.solutions(self._board.candidates(self._board.bits(problem.givens)))
        found = next(search, None)
        if found is None:
            raise ValueError(
                "sudoku: no solution (rows given below); a puzzle must have exactly one. Correct the givens.\n"
                + self._rows(problem.givens)
            )
        if not self.allow_multiple and next(search, None) is not None:
            raise ValueError(
                "sudoku: 2 solutions or more (rows given below); a puzzle must have exactly one. "
                "Set allow_multiple=True to grade by validity.\n" + self._rows(problem.givens)
            )
        return self._board.grid(found)

    def count_solutions(self, problem: Puzzle, limit: int = 2) -> int:
        """Number of solutions, counted up to `limit`."""
        search = self._board.solutions(self._board.candidates(self._board.bits(problem.givens)))
        return sum(1 for _, _ in zip(range(limit), search, strict=False))

    def verify(self, problem: Puzzle, predicted: NDArray[np.int64]) -> bool:
        """Whether a full grid keeps the givens and the rules."""
        answer = tuple(int(digit) for digit in predicted)
        return (
            len(answer) == self._board.cells
            and all(1 <= digit <= self.size for digit in answer)
            and all(given in (0, digit) for given, digit in zip(problem.givens, answer, strict=True))
            and self._board.clash(answer) is None
        )

    def techniques(self, problem: Puzzle) -> int:
        """The weakest technique set that solves a puzzle: 1 naked singles, 2 also hidden singles, 3 also locked
        candidates and pairs, 4 also X-wing and triples, 5 guessing."""
        return self._board.grade(self._board.bits(problem.givens))

    def nodes(self, problem: Puzzle) -> int:
        """Boards the exact solver looks at until it knows all solutions; 1 where it never guesses."""
        search = self._board.solutions(self._board.candidates(self._board.bits(problem.givens)))
        for _ in search:
            pass
        return search.nodes

    def grade(self, problem: Puzzle, predicted: NDArray[np.int64]) -> Grade:
        """Cells against the reference, and whether the grid is a legal completion."""
        return replace(super().grade(problem, predicted), valid=self.verify(problem, predicted))

    def symmetries(self, difficulty: int) -> tuple[Symmetry, ...]:
        """Generators of the group: neighbouring digits, rows of a band, bands, columns of a stack and stacks swapped,
        and, where boxes are square, the transposition."""
        n, same = self.size, list(range(self.size))
        swaps = [self._symmetry(same, same, _swapped(n, d, d + 1, 1), False) for d in range(n - 1)]
        for inside, by_rows in ((self._board.height, True), (self._board.width, False)):
            lines = [_swapped(n, r, r + 1, 1) for r in range(n - 1) if (r + 1) % inside]
            lines += [_swapped(n, top, top + inside, inside) for top in range(0, n - inside, inside)]
            swaps += [self._symmetry(*((o, same) if by_rows else (same, o)), same, False) for o in lines]
        if self._square:
            swaps.append(self._symmetry(same, same, same, True))
        return tuple(swaps)

    def symmetry(self, difficulty: int, draws: Draws) -> Symmetry:
        """A random element of the group."""
        return self._random_symmetry(_numbers(draws))

    def show(self, problem: Puzzle) -> str:
        """Puzzle and solution side by side."""
        solution = self._rows(problem.solution or self.solve(problem)).split("\n")
        rows = self._rows(problem.givens).split("\n")
        return "\n".join(f"{row}   {solved}" for row, solved in zip(rows, solution, strict=True))

    @property
    def _board(self) -> Board:
        return board(self.size)

    @property
    def _square(self) -> bool:
        return self._board.height == self._board.width

    def _full(self, numbers: Iterator[int]) -> tuple[int, ...]:
        """A random full grid. Its first row is in order until digits are renamed."""
        first = self._board.bits(range(1, self.size + 1))
        grid = self._board.grid(next(self._board.solutions(self._board.candidates(first), numbers)))
        return tuple(self._random_symmetry(numbers).apply(np.array(grid)).tolist())

    def _thin(self, clues: int, order: list[int], difficulty: int) -> int:
        """Takes clues away in this order as long as the rest has one solution. Many at first at once: where singles
        solve the rest without all of them, it has one solution without each."""
        table = self._board
        holes = difficulty if self.sampled == "holes" else len(order)
        digits = table.grid(clues)
        bits = [table.bit(cell, digits[cell]) for cell in order]
        place, taken, step = 0, 0, REMOVED_AT_ONCE
        while place < len(bits) and taken < holes:
            step = min(step, len(bits) - place, holes - taken)
            away = functools.reduce(int.__or__, bits[place : place + step])
            left = table.candidates(clues & ~away)
            if step > 1:
                alone = table.singles(left).bit_count() == table.cells
            else:
                alone = next(table.solutions(left & ~away), None) is None
            if alone:
                clues, place, taken = clues & ~away, place + step, taken + step
            elif step > 1:
                step //= 2
            else:
                place += 1
        return clues

    def _graded(self, clues: int, full: int, grade: int, numbers: Iterator[int]) -> int:
        """Puts clues back in random order until this grade's techniques solve the puzzle; 0 where weaker ones do."""
        table = self._board
        if grade == GUESS:
            return clues if table.grade(clues) == GUESS else 0
        gone = table.places(full & ~clues)
        for _ in range(WAYS):
            back = [gone[i] for i in _order(len(gone), numbers)]
            boards = list(itertools.accumulate(back, int.__or__, initial=clues))
            first = bisect.bisect_left(boards, True, key=lambda some: table.deduced(some, grade))
            if table.grade(boards[first]) == grade:
                return boards[first]
            if first == 0:
                break
        return 0

    def _random_symmetry(self, numbers: Iterator[int]) -> Symmetry:
        height, width, n = self._board.height, self._board.width, self.size
        rows = _lines(n // height, height, numbers)
        columns = _lines(n // width, width, numbers)
        turned = self._square and next(numbers) % 2 == 1
        return self._symmetry(rows, columns, _order(n, numbers), turned)

    def _symmetry(self, rows: list[int], columns: list[int], digits: list[int], turned: bool) -> Symmetry:
        n = self.size
        places = [c * n + r if turned else r * n + c for r in rows for c in columns]
        return Symmetry(tuple(places), (0, *(digit + 1 for digit in digits)))

    def _rows(self, grid: Sequence[int]) -> str:
        n = self.size
        return "\n".join(" ".join(self.tokens[d] for d in grid[r : r + n]) for r in range(0, n * n, n))


def read_csv(path: Path, task: Sudoku) -> list[Rated]:
    """Puzzles of a file with columns source, q, a, rating (sapientinc/sudoku-extreme).

    q has one character per cell, `.` or `0` where blank; a, the solution, may be missing or empty, and so may rating.

    Raises:
        DataError: A line that states no puzzle of this size, or a solution that is none; the message names the line.
    """
    with path.open(newline="", encoding="utf-8") as lines:
        reader = csv.DictReader(lines)
        if "q" not in (reader.fieldnames or ()):
            raise DataError(f"{path}:1: no column 'q'. Columns: {', '.join(reader.fieldnames or ())}.")
        return [_rated(path, reader.line_num, row, task) for row in reader]


def _rated(path: Path, line: int, row: dict[str, str | None], task: Sudoku) -> Rated:
    try:
        puzzle = task.decode(_digits(row["q"] or ""))
        if row.get("a"):
            answer = _digits(row["a"] or "")
            if not task.verify(puzzle, answer):
                raise ValueError("the solution in column 'a' breaks the rules or the givens")
            puzzle = replace(puzzle, solution=tuple(answer.tolist()))
        rating = int(row["rating"] or "") if row.get("rating") else None
    except ValueError as error:
        raise DataError(f"{path}:{line}: {error}") from error
    return Rated(row.get("source") or "", puzzle, rating)


def _digits(text: str) -> NDArray[np.int64]:
    if not all(character in ".0123456789" for character in text):
        raise ValueError(f"a grid must be written in digits and '.'. Got {text!r}.")
    return np.array([0 if character == "." else int(character) for character in text], np.int64)


def _listed(known: Sequence[int]) -> str:
    if len(known) == known[-1] - known[0] + 1 > 2:
        return f"from {known[0]} to {known[-1]}"
    return ", ".join(map(str, known))


def _numbers(draws: Draws) -> Iterator[int]:
    while True:
        yield from draws.integers(2**32 - 1, 256).tolist()


def _order(count: int, numbers: Iterator[int]) -> list[int]:
    """0 .. count - 1 in random order."""
    return sorted(range(count), key=[next(numbers) for _ in range(count)].__getitem__)


def _lines(groups: int, inside: int, numbers: Iterator[int]) -> list[int]:
    """The lines of a board, groups and lines within groups in random order."""
    return [group * inside + line for group in _order(groups, numbers) for line in _order(inside, numbers)]


def _swapped(n: int, one: int, other: int, count: int) -> list[int]:
    order = list(range(n))
    order[one : one + count], order[other : other + count] = order[other : other + count], order[one : one + count]
    return order


def _invariant(solution: Sequence[int]) -> bytes:
    """Cycle types between two rows of a band and two columns of a stack of a 9 x 9 grid, sorted."""
    rows = [tuple(solution[9 * r : 9 * r + 9]) for r in range(9)]
    halves = []
    for lines in (rows, list(zip(*rows, strict=True))):
        bands = (
            sorted(_cycles(lines[top + a], lines[top + b]) for a, b in ((0, 1), (0, 2), (1, 2))) for top in (0, 3, 6)
        )
        halves.append(sorted(bands))
    return repr(sorted(halves)).encode()


def _cycles(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """Sorted lengths of the cycles of the map from one line's digits to the other's."""
    after = dict(zip(one, other, strict=True))
    lengths = []
    while after:
        digit, length = next(iter(after)), 0
        while digit in after:
            digit, length = after.pop(digit), length + 1
        lengths.append(length)
    return sorted(lengths)


def _least_image(size: int, givens: Sequence[int]) -> bytes:
    """The image with the least pattern of clues, and of those the one with least digits in order of appearance."""
    images = _images(size)
    clues = [cell for cell, digit in enumerate(givens) if digit]
    patterns = (np.int64(1) << images[:, clues]).sum(axis=1)
    least = int(patterns.min())
    digits = []
    for image in images[patterns == least]:
        names: dict[int, int] = {}
        ordered = sorted(clues, key=image.__getitem__)
        digits.append([names.setdefault(givens[cell], len(names)) for cell in ordered])
    return least.to_bytes(8, "little") + bytes(min(digits))


@functools.cache
def _images(size: int) -> NDArray[np.int64]:
    """[group elements, cells] -> the cell that a cell goes to (4 x 4: 128 elements, 6 x 6: 3,456)."""
    task = Sudoku(size=size)
    found = {tuple(range(size * size))}
    moves = [np.array(s.places) for s in task.symmetries(1) if s.names == tuple(range(size + 1))]
    fresh = list(found)
    while fresh:
        reached = {tuple(move[list(image)].tolist()) for image in fresh for move in moves}
        fresh = list(reached - found)
        found |= reached
    return np.array(sorted(found), np.int64)
