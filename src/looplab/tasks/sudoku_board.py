"""Sudoku as exact cover on one integer: bit (digit, row, column) is set while the digit may still stand there.

    groups: cell (all digits of a cell), row, column, box (all places of a digit); in a solution each holds one bit
    single: the only bit of a group; it stays, and every other bit of its four groups goes

All groups of a kind are counted at once, by folding the integer onto the first bit of each group, so a round of "find
all singles, strike out their peers" is about a hundred operations on an integer of n^3 bits, whatever the board holds.
What singles leave undecided is searched, by the cell with fewest candidates. The techniques of people are the same
picture turned: k groups of a kind whose bits lie in k columns (pairs, triples, X-wing), and box and line in each
other's way (locked candidates).
"""

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

NAKED, SINGLES, PAIRS, TRIPLES, GUESS = 1, 2, 3, 4, 5
"""Technique sets, each containing those before: naked singles; hidden singles; locked candidates and pairs; X-wing and
triples; guessing."""


@dataclass(frozen=True)
class Kind:
    """One kind of groups: its first bits, and how to fold a group onto its first bit."""

    base: int
    """The first bit of every group."""
    pattern: int
    """The bits of the group whose first bit is bit 0."""
    stages: tuple[tuple[int, int], ...]
    """(stride, count): fold this many, this far apart, one stage after another."""

    def counts(self, bits: int) -> tuple[int, int]:
        """(groups with at least one bit, groups with at least two), each by its first bit."""
        one, two = bits, 0
        for stride, count in self.stages:
            first, second = one, two
            for step in range(stride, stride * count, stride):
                shifted = first >> step
                two |= (one & shifted) | (second >> step)
                one |= shifted
        return one & self.base, two & self.base

    def touched(self, bits: int) -> int:
        """First bits of the groups that hold one of these bits."""
        for stride, count in self.stages:
            first = bits
            for step in range(stride, stride * count, stride):
                bits |= first >> step
        return bits & self.base


class Board:
    """Geometry of an n x n grid with boxes of `height` rows and `width` columns, n = height * width.

    Cells are numbered row by row. Use `board(size)`, which keeps one of each.
    """

    def __init__(self, height: int, width: int):
        self.height, self.width = height, width
        self.n = n = height * width
        self.cells = n * n
        self.every = (1 << n**3) - 1
        row, plane = n, n * n
        rows, columns = range(0, plane, row), range(n)
        digits = range(0, n**3, plane)
        corners = [top + left for top in range(0, plane, row * height) for left in range(0, n, width)]
        inside = [r * row + c for r in range(height) for c in range(width)]
        self.cell = Kind(_bits(range(plane)), _bits(digits), ((plane, width), (plane * width, height)))
        self.row = Kind(_bits(d + r for d in digits for r in rows), _bits(columns), ((1, width), (width, height)))
        self.column = Kind(
            _bits(d + c for d in digits for c in columns), _bits(rows), ((row, height), (row * height, width))
        )
        self.box = Kind(_bits(d + c for d in digits for c in corners), _bits(inside), ((1, width), (row, height)))
        self.kinds = (self.cell, self.row, self.column, self.box)
        self.units = [
            *([r + c for c in columns] for r in rows),
            *([r + c for r in rows] for c in columns),
            *([corner + i for i in inside] for corner in corners),
        ]
        sheets = [([*unit], self.cell.pattern) for unit in self.units]  # cells against digits
        for kind, firsts in ((self.row, rows), (self.column, columns), (self.box, corners)):
            sheets += [([d + first for d in digits], kind.pattern) for first in firsts]  # digits against places
        self.sheets = sheets
        self.fish = [([d + r for r in rows], self.row.pattern) for d in digits]
        self.fish += [([d + c for c in columns], self.column.pattern) for d in digits]
        self.crossings = [
            (box & line, box & ~line, line & ~box)
            for d in digits
            for box in (self.box.pattern << (d + corner) for corner in corners)
            for line in (
                *(self.row.pattern << (d + r) for r in rows),
                *(self.column.pattern << (d + c) for c in columns),
            )
            if box & line
        ]

    def bit(self, cell: int, digit: int) -> int:
        """The bit of a digit (from 1) in a cell."""
        return 1 << ((digit - 1) * self.cells + cell)

    def bits(self, grid: Sequence[int]) -> int:
        """The bits of the filled cells; 0 is blank."""
        found = 0
        for cell, digit in enumerate(grid):
            if digit:
                found |= 1 << ((digit - 1) * self.cells + cell)
        return found

    def grid(self, bits: int) -> tuple[int, ...]:
        """The digits of a solution."""
        digits = [0] * self.cells
        for one in self.places(bits):
            digit, cell = divmod(one.bit_length() - 1, self.cells)
            digits[cell] = digit + 1
        return tuple(digits)

    def places(self, bits: int) -> list[int]:
        """The bits one by one."""
        found = []
        while bits:
            found.append(bits & -bits)
            bits &= bits - 1
        return found

    def clash(self, grid: Sequence[int]) -> tuple[int, int] | None:
        """Two cells of a row, column or box that hold the same digit, if there are such."""
        for unit in self.units:
            seen: dict[int, int] = {}
            for cell in unit:
                if grid[cell] and seen.setdefault(grid[cell], cell) != cell:
                    return seen[grid[cell]], cell
        return None

    def candidates(self, clues: int) -> int:
        """What the clues leave of all candidates."""
        struck = 0
        for kind in self.kinds:
            struck |= kind.touched(clues) * kind.pattern
        return (self.every & ~struck) | clues

    def singles(self, bits: int, *, naked: bool = False) -> int:
        """The candidates that singles leave; 0 where they contradict each other.

        Args:
            naked: Only those that are alone in their cell.
        """
        while True:
            found, several = 0, 0
            for kind in self.kinds:
                one, two = kind.counts(bits)
                if one != kind.base:
                    return 0
                several |= two
                if kind is self.cell or not naked:
                    found |= ((one & ~two) * kind.pattern) & bits
            if not several:
                return bits
            struck = 0
            for kind in self.kinds:
                groups = kind.touched(found)
                if groups.bit_count() != found.bit_count():
                    return 0
                struck |= groups * kind.pattern
            left = bits & (~struck | found)
            if left == bits:
                return bits
            bits = left

    def solutions(self, bits: int, numbers: Iterator[int] | None = None) -> "Search":
        """The solutions within these candidates, one after another.

        Args:
            numbers: Random numbers that decide what is tried first; None: the order of the board.
        """
        return Search(self, bits, numbers)

    def narrowest(self, bits: int, among: Sequence[int]) -> list[int]:
        """Candidates of the first cell of `among` with fewest, of those with several."""
        digits, best, fewest = self.cell.pattern, 0, self.n + 1
        for cell in among:
            count = ((bits >> cell) & digits).bit_count()
            if 1 < count < fewest:
                best, fewest = cell, count
                if count == 2:
                    break
        held = (bits >> best) & digits
        return [1 << (d + best) for d in range(0, self.n * self.cells, self.cells) if held >> d & 1]

    def deduce(self, bits: int, techniques: int) -> int:
        """The candidates that a technique set leaves; 0 where they contradict each other."""
        bits = self.singles(bits, naked=techniques == NAKED)
        while bits.bit_count() > self.cells and techniques > SINGLES:
            struck = self._locked(bits) or self._subsets(bits, self.sheets, 2)
            if not struck and techniques > PAIRS:
                struck = self._subsets(bits, self.fish, 2) or self._subsets(bits, self.sheets, 3)
            if not struck:
                break
            bits = self.singles(bits & ~struck)
        return bits

    def deduced(self, clues: int, techniques: int) -> bool:
        """Whether a technique set solves a puzzle."""
        return self.deduce(self.candidates(clues), techniques).bit_count() == self.cells

    def grade(self, clues: int) -> int:
        """The weakest technique set that solves a puzzle with one solution."""
        bits = self.candidates(clues)
        for techniques in (NAKED, SINGLES, PAIRS, TRIPLES):
            bits = self.deduce(bits, techniques)
            if bits.bit_count() == self.cells:
                return techniques
        return GUESS

    def _locked(self, bits: int) -> int:
        """A digit whose places in a box lie in one line, or the other way round, is nowhere else in the second."""
        struck = 0
        for both, box, line in self.crossings:
            if bits & both:
                if not bits & box:
                    struck |= bits & line
                elif not bits & line:
                    struck |= bits & box
        return struck

    def _subsets(self, bits: int, sheets: list[tuple[list[int], int]], size: int) -> int:
        """`size` rows of a sheet whose bits lie in as many columns: the other rows have none there."""
        for firsts, pattern in sheets:
            rows = [(bits >> first) & pattern for first in firsts]
            narrow = [row for row in rows if 1 < row.bit_count() <= size]
            for chosen in itertools.combinations(narrow, size):
                columns = functools.reduce(int.__or__, chosen)
                if columns.bit_count() == size:
                    struck = 0
                    for first, row in zip(firsts, rows, strict=True):
                        if row & ~columns:
                            struck |= (row & columns) << first
                    if struck:
                        return struck
        return 0


class Search:
    """Iterator over solutions (as bits); `nodes` counts the boards looked at so far."""

    def __init__(self, board: Board, bits: int, numbers: Iterator[int] | None):
        self.nodes = 0
        self._board, self._numbers = board, numbers
        self._open = [bits]

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        board = self._board
        while self._open:
            self.nodes += 1
            bits = board.singles(self._open.pop())
            if bits.bit_count() > board.cells:
                choices = self._turned(board.narrowest(bits, self._turned(range(board.cells))))
                every = functools.reduce(int.__or__, choices)
                self._open += [bits & ~(every ^ choice) for choice in choices]
            elif bits:
                return bits
        raise StopIteration

    def _turned(self, order: Sequence[int]) -> Sequence[int]:
        if self._numbers is None:
            return order
        first = next(self._numbers) % len(order)
        return [*order[first:], *order[:first]]


def _bits(places: Iterable[int]) -> int:
    return functools.reduce(int.__or__, (1 << place for place in places), 0)


@functools.cache
def board(size: int) -> Board:
    """The board of 4 x 4 (boxes 2 x 2), 6 x 6 (boxes of 2 rows, 3 columns) or 9 x 9 (boxes 3 x 3)."""
    return Board(*{4: (2, 2), 6: (2, 3), 9: (3, 3)}[size])
