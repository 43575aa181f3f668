"""Shortest paths in mazes of w x w cells, drawn on (2w + 1) x (2w + 1) squares: cells, and walls or gaps between them.

    maze     randomised depth-first search: every cell is reached in one way only; `braid` opens further walls
    start    any cell; goal: a cell at least as far as the `quantile` of all distances from there
    label    every square, with the path drawn in: tokens and labels have one vocabulary
    target   of iteration k: the cells within k steps of the start, until the goal is among them; then the label

A step leads from a cell to the next, two squares on. A braided maze may have several shortest paths: the label is one
of them, and `valid` is any.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from looplab.tasks.base import TASKS, Draws, Example, Grade, Task, Trace, check_trained
from looplab.tasks.symmetry import Symmetry

WALL, OPEN, START, GOAL, PATH = range(5)
NAMES = ("#", ".", "S", "G", "o")
DIRECTIONS = ((0, 1), (1, 0), (0, -1), (-1, 0))


@dataclass(frozen=True)
class Maze:
    """Squares row by row: WALL, OPEN, one START and one GOAL."""

    squares: tuple[int, ...]

    @property
    def side(self) -> int:
        """Squares of a row."""
        return math.isqrt(len(self.squares))


@TASKS.register("maze")
@dataclass(frozen=True, kw_only=True)
class Mazes(Task):
    """The shortest way from start to goal."""

    reference_paper = "arXiv:2506.21734"
    causal = False
    tokens = NAMES  # type: ignore[assignment]
    symbols = NAMES  # type: ignore[assignment]
    braid: float = 0.0
    """Probability that a wall left by the search is opened; 0: perfect mazes."""
    quantile: float = 0.5
    """How far the goal is at least, among the distances from the start."""
    train: tuple[int, ...] = (5, 7)
    """Cells of a side to train at; tests go to three times the largest."""

    def __post_init__(self) -> None:
        for name in ("braid", "quantile"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"Mazes.{name} must be from 0 to 1. Got {getattr(self, name)}. Choose a share.")
        check_trained(self, self.train)

    @property
    def train_difficulties(self) -> tuple[int, ...]:
        return self.train

    @property
    def test_difficulties(self) -> tuple[int, ...]:
        widest = max(self.train)
        return tuple(sorted({*self.train, widest + 2, 2 * widest - 1, 3 * widest}))

    def check(self, difficulty: int) -> None:
        """Refuses a maze without a way to choose."""
        if difficulty < 2:
            raise ValueError(
                f"difficulty must be at least 2 for {self.name}. Got {difficulty}. It is the cells of a side."
            )

    def length(self, difficulty: int) -> int:
        return (2 * difficulty + 1) ** 2

    def num_steps(self, difficulty: int) -> int:
        """Steps of the longest path that a maze of this size may have."""
        return difficulty**2 - 1

    def space(self, difficulty: int) -> float:
        """At most: spanning trees of the grid, of which a depth-first search draws some, times two ends."""
        return trees(difficulty) * difficulty**4

    def chance(self, difficulty: int) -> float:
        """About: one over the number of spanning trees, as the label draws all walls. Not all of them come, and not
        with equal probability."""
        return 1 / trees(difficulty)

    def draw(self, difficulty: int, draws: Draws) -> Maze:
        w, side = difficulty, 2 * difficulty + 1
        squares = [WALL] * side**2
        orders = draws.integers(2**32 - 1, 4 * w * w).reshape(w * w, 4).argsort(axis=1).tolist()
        start = draws.integer(w * w)
        trail, visited = [start], {start}
        squares[_square(start, w)] = OPEN
        while trail:
            cell = trail[-1]
            if not orders[cell]:
                trail.pop()
                continue
            dy, dx = DIRECTIONS[orders[cell].pop()]
            y, x = cell // w + dy, cell % w + dx
            if 0 <= y < w and 0 <= x < w and y * w + x not in visited:
                visited.add(y * w + x)
                trail.append(y * w + x)
                here = _square(cell, w)
                squares[here + dy * side + dx] = squares[here + 2 * (dy * side + dx)] = OPEN
        if self.braid:
            walls = [s for s in _between(w) if squares[s] == WALL]
            for wall, u in zip(walls, draws.integers(2**30, len(walls)).tolist(), strict=True):
                if u < self.braid * 2**30:
                    squares[wall] = OPEN
        start = draws.integer(w * w)
        far = _distances(squares, _square(start, w))
        ends = sorted((distance, square) for square, distance in far.items() if distance)
        least = ends[min(len(ends) - 1, int(self.quantile * len(ends)))][0]
        goals = [square for distance, square in ends if distance >= least]
        squares[_square(start, w)], squares[draws.choice(goals)] = START, GOAL
        return Maze(tuple(squares))

    def canonical(self, problem: Maze) -> bytes:
        """The least image under the eight symmetries of the square and the exchange of start and goal."""
        grid = np.array(problem.squares, np.uint8).reshape(problem.side, -1)
        images = []
        for ends in (grid, np.array([WALL, OPEN, GOAL, START], np.uint8)[grid]):
            for half in (ends, ends.T):
                images += [np.rot90(half, turns).tobytes() for turns in range(4)]
        return min(images)

    def example(self, problem: Maze) -> Example:
        return Example(
            tokens=np.array(problem.squares, np.int64),
            labels=self._drawn(problem, self.solve(problem)),
            answer=slice(0, len(problem.squares)),
        )

    def decode(self, tokens: NDArray[np.int64]) -> Maze:
        squares = tuple(int(t) for t in tokens)
        maze = Maze(squares)
        side, starts, goals = maze.side, squares.count(START), squares.count(GOAL)
        shaped = side**2 == len(squares) and side % 2 == 1 and side >= 5
        if not shaped or not {*squares} <= {WALL, OPEN, START, GOAL} or (starts, goals) != (1, 1):
            raise ValueError(
                f"maze: tokens must be (2w + 1)^2 of {WALL}..{GOAL}, with one {START} (start) and one {GOAL} (goal). "
                f"Got {len(squares)} with {starts} and {goals}. Draw one with sample."
            )
        grid = np.array(squares).reshape(side, side)
        cells, posts, rim = grid[1::2, 1::2], grid[::2, ::2], (grid[0], grid[-1], grid[:, 0], grid[:, -1])
        if (cells == WALL).any() or (posts != WALL).any() or any((line != WALL).any() for line in rim):
            raise ValueError(
                "maze: tokens must have an open cell at every odd row and column, and walls at even ones and all "
                "around. Got others. Draw one with sample."
            )
        if not {START, GOAL} <= {*cells.ravel().tolist()} or squares.index(GOAL) not in _distances(
            squares, squares.index(START)
        ):
            raise ValueError("maze: tokens must have a way from cell to cell, start to goal. Got none. Open a wall.")
        return maze

    def reference(self, problem: Maze) -> Trace:
        """Cells within 0, 1, .. steps of the start until the goal is reached, and the squares of a shortest path."""
        far = _distances(problem.squares, problem.squares.index(START))
        steps = far[problem.squares.index(GOAL)]
        values = tuple(tuple(sorted(s for s, d in far.items() if d <= k)) for k in range(steps + 1))
        return Trace(values, self.solve(problem))

    def solve(self, problem: Maze) -> tuple[int, ...]:
        """Squares of a shortest path, start and goal included."""
        squares, side = problem.squares, problem.side
        far = _distances(squares, squares.index(START))
        path = [squares.index(GOAL)]
        while far[path[-1]]:
            here = path[-1]
            for dy, dx in DIRECTIONS:
                move = dy * side + dx
                if squares[here + move] != WALL and far.get(here + 2 * move) == far[here] - 1:
                    path += [here + move, here + 2 * move]
                    break
        return tuple(reversed(path))

    def verify(self, problem: Maze, predicted: NDArray[np.int64]) -> bool:
        """Whether the drawn squares are the maze with a shortest path: from start to goal there is always one square
        to go on to, and no more squares are marked than the distance needs."""
        squares, side = np.array(problem.squares), problem.side
        predicted = np.asarray(predicted)
        on_path = predicted == PATH
        if predicted.shape != squares.shape or (predicted[~on_path] != squares[~on_path]).any():
            return False
        if (squares[on_path] != OPEN).any():
            return False
        start, goal = problem.squares.index(START), problem.squares.index(GOAL)
        chain = {start, goal, *np.flatnonzero(on_path).tolist()}
        here, walked = start, {start}
        while here != goal:
            after = [here + dy * side + dx for dy, dx in DIRECTIONS]
            after = [square for square in after if square in chain and square not in walked]
            if len(after) != 1:
                return False
            here = after[0]
            walked.add(here)
        return len(chain) == 2 * _flooded(problem) + 1

    def grade(self, problem: Maze, predicted: NDArray[np.int64]) -> Grade:
        """Squares against the reference, and whether the path is a shortest one."""
        return replace(super().grade(problem, predicted), valid=self.verify(problem, predicted))

    def trace_labels(self, problem: Maze, k: int) -> NDArray[np.int64]:
        """The cells within k steps of the start, and the openings between them; the path once the goal is reached."""
        far = _distances(problem.squares, problem.squares.index(START))
        if k >= far[problem.squares.index(GOAL)]:
            return self.example(problem).labels
        side = problem.side
        near = [square for square, distance in far.items() if distance <= k]
        moves = [dy * side + dx for dy, dx in DIRECTIONS]
        gaps = [square + move for square in near for move in moves if far.get(square + 2 * move, k + 1) <= k]
        return self._drawn(problem, [*near, *gaps])

    def symmetries(self, difficulty: int) -> tuple[Symmetry, ...]:
        """Generators of the group: a quarter turn, a reflection, and the exchange of start and goal."""
        squares = np.arange(self.length(difficulty)).reshape(2 * difficulty + 1, -1)
        same, kept = tuple(range(squares.size)), tuple(range(len(NAMES)))
        return (
            Symmetry(tuple(np.rot90(squares).ravel().tolist()), kept),
            Symmetry(tuple(squares.T.ravel().tolist()), kept),
            Symmetry(same, (WALL, OPEN, GOAL, START, PATH)),
        )

    def symmetry(self, difficulty: int, draws: Draws) -> Symmetry:
        """A random one of the eight symmetries of the square."""
        squares = np.arange(self.length(difficulty)).reshape(2 * difficulty + 1, -1)
        image = np.rot90(squares, draws.integer(4))
        image = image.T if draws.chance(0.5) else image
        return Symmetry(tuple(image.ravel().tolist()), tuple(range(len(NAMES))))

    def show(self, problem: Maze) -> str:
        """Maze and path side by side."""
        side, labels = problem.side, self.example(problem).labels.tolist()
        rows = range(0, side * side, side)
        texts = [["".join(NAMES[s] for s in grid[r : r + side]) for r in rows] for grid in (problem.squares, labels)]
        return "\n".join(f"{maze}   {path}" for maze, path in zip(*texts, strict=True))

    def _drawn(self, problem: Maze, path: Sequence[int]) -> NDArray[np.int64]:
        labels = np.array(problem.squares, np.int64)
        inner = [square for square in path if problem.squares[square] == OPEN]  # and not the walls between near cells
        labels[inner] = PATH
        return labels


def trees(w: int) -> float:
    """Spanning trees of the w x w grid (matrix-tree theorem)."""
    angles = np.arange(w) * math.pi / w
    values = (4 - 2 * np.cos(angles)[:, None] - 2 * np.cos(angles)[None]).ravel()[1:]
    exponent = np.log(values).sum() - 2 * math.log(w)
    return math.exp(exponent) if exponent < 700 else math.inf


def _square(cell: int, w: int) -> int:
    return (2 * (cell // w) + 1) * (2 * w + 1) + 2 * (cell % w) + 1


def _between(w: int) -> list[int]:
    """Squares between two neighbouring cells."""
    side = 2 * w + 1
    return [y * side + x for y in range(1, side - 1) for x in range(1, side - 1) if (y + x) % 2]


def _distances(squares: Sequence[int], start: int) -> dict[int, int]:
    """Steps from a cell to every cell, by breadth-first search over cells."""
    side = math.isqrt(len(squares))
    far, queue = {start: 0}, [start]
    for here in queue:
        for dy, dx in DIRECTIONS:
            move = dy * side + dx
            if squares[here + move] != WALL and here + 2 * move not in far:
                far[here + 2 * move] = far[here] + 1
                queue.append(here + 2 * move)
    return far


def _flooded(problem: Maze) -> int:
    """Steps from start to goal, by flooding all squares at once."""
    grid = np.array(problem.squares).reshape(problem.side, -1)
    wet, waves = grid == START, 0
    while not wet[grid == GOAL].any():
        spread = wet.copy()
        spread[1:] |= wet[:-1]
        spread[:-1] |= wet[1:]
        spread[:, 1:] |= wet[:, :-1]
        spread[:, :-1] |= wet[:, 1:]
        wet, waves = spread & (grid != WALL), waves + 1
    return waves // 2
