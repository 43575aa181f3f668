"""Seen to fail: an opening too many, a goal nearer than the quantile, a validity that takes a detour or a loose square,
targets that cross walls."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from looplab.tasks.maze import GOAL, OPEN, PATH, START, WALL, Maze, Mazes, trees


def squares_from(maze, start):
    """square -> squares walked from a square, by waves over single squares."""
    side, far, wave = maze.side, {start: 0}, [start]
    while wave:
        further = []
        for here in wave:
            for there in (here - 1, here + 1, here - side, here + side):
                if maze.squares[there] != WALL and there not in far:
                    far[there] = far[here] + 1
                    further.append(there)
        wave = further
    return far


def openings(maze):
    """Open squares between cells."""
    side = maze.side
    return [s for s, what in enumerate(maze.squares) if what != WALL and (s // side + s % side) % 2]


@pytest.mark.parametrize("w", [2, 5, 9])
def test_a_perfect_maze_reaches_every_cell_in_one_way(w):
    for index in range(10):
        maze = Mazes().sample(w, 0, index)
        far = squares_from(maze, maze.squares.index(START))
        assert len(far) == w * w + len(openings(maze)) and len(openings(maze)) == w * w - 1


def test_a_braided_maze_has_more_openings():
    counts = {braid: 0 for braid in (0.0, 0.3, 1.0)}
    for braid, index in itertools.product(counts, range(20)):
        counts[braid] += len(openings(Mazes(braid=braid).sample(5, 0, index)))
    walls = 20 * (40 - 24)
    assert counts[0.0] == 20 * 24 and counts[1.0] == 20 * 40
    assert counts[0.3] - counts[0.0] == pytest.approx(0.3 * walls, abs=4 * (0.21 * walls) ** 0.5)


@pytest.mark.parametrize("braid", [0.0, 0.4])
def test_the_path_is_a_shortest_one(braid):
    task = Mazes(braid=braid)
    for index in range(20):
        maze = task.sample(6, 1, index)
        far = squares_from(maze, maze.squares.index(START))
        path = task.solve(maze)
        assert [far[square] for square in path] == list(range(far[maze.squares.index(GOAL)] + 1))
        labels = task.example(maze).labels
        assert set(np.flatnonzero(labels == PATH)) == {*path[1:-1]}
        assert (labels[labels != PATH] == np.array(maze.squares)[labels != PATH]).all()


@pytest.mark.parametrize("quantile", [0.0, 0.5, 1.0])
def test_the_goal_is_as_far_as_the_quantile(quantile):
    ranks = []
    for index in range(40):
        maze = Mazes(quantile=quantile).sample(5, 2, index)
        far = squares_from(maze, maze.squares.index(START))
        cells = sorted(d for s, d in far.items() if s // 11 % 2 and s % 11 % 2)[1:]
        reached = far[maze.squares.index(GOAL)]
        assert reached >= cells[min(len(cells) - 1, int(quantile * len(cells)))]
        ranks.append(np.mean(np.array(cells) < reached))
    assert min(ranks) < quantile + 0.25


def searched_trees(w):
    """Spanning trees of the w x w grid, and those that a depth-first search leaves: from some root, the two ends of
    every other edge are one above the other."""
    pairs = [(c, c + 1) for c in range(w * w) if (c + 1) % w] + [(c, c + w) for c in range(w * w - w)]
    every, searched = [], []
    for tree in itertools.combinations(pairs, w * w - 1):
        paths = [paths_from(tree, root) for root in range(w * w)]
        if len(paths[0]) < w * w:
            continue
        every.append(tree)
        if any(all(a in path[b] or b in path[a] for a, b in pairs) for path in paths):
            searched.append(tree)
    return every, searched


def paths_from(tree, root):
    """cell -> cells on the way there."""
    paths, fresh = {root: {root}}, [root]
    for here in fresh:
        for a, b in tree:
            for one, other in ((a, b), (b, a)):
                if one == here and other not in paths:
                    paths[other] = paths[here] | {other}
                    fresh.append(other)
    return paths


def test_all_mazes_of_nine_cells_that_a_search_can_leave_come():
    every, searched = searched_trees(3)
    seen = {tuple(s for s in openings(Mazes().sample(3, 0, i))) for i in range(900)}
    drawn_trees = {tuple(sorted(between(pair) for pair in tree)) for tree in searched}
    assert seen == drawn_trees
    assert len(every) == round(trees(3)) == 192


def between(pair):
    """Square between two cells of a 3 x 3 maze."""
    (y, x), (v, u) = (divmod(cell, 3) for cell in pair)
    return (y + v + 1) * 7 + x + u + 1


@pytest.mark.parametrize(("w", "count"), [(1, 1), (2, 4), (3, 192), (4, 100_352)])
def test_spanning_trees_are_counted(w, count):
    assert trees(w) == pytest.approx(count)


def drawn(*rows):
    names = {"#": WALL, ".": OPEN, "S": START, "G": GOAL, "o": PATH}
    return np.array([names[square] for row in rows for square in row])


RING = ("#######", "#S....#", "#.#.#.#", "#...#G#", "#.#####", "#.....#", "#######")


def test_any_shortest_path_is_valid_and_nothing_else():
    task = Mazes(braid=0.5)
    maze = task.decode(drawn(*RING))
    straight = drawn("#######", "#Soooo#", "#.#.#o#", "#...#G#", "#.#####", "#.....#", "#######")
    detour = drawn("#######", "#S.ooo#", "#o#o#o#", "#ooo#G#", "#.#####", "#.....#", "#######")
    loose = drawn("#######", "#Soooo#", "#.#.#o#", "#...#G#", "#.#####", "#....o#", "#######")
    gap = drawn("#######", "#Soo.o#", "#.#.#o#", "#...#G#", "#.#####", "#.....#", "#######")
    walled = drawn("#######", "#Soooo#", "#.#.oo#", "#...#G#", "#.#####", "#.....#", "#######")
    lost = drawn("#######", "#Soooo#", "#.#.#o#", "#...#.#", "#.#####", "#.....#", "#######")
    found = [task.grade(maze, answer).valid for answer in (straight, detour, loose, gap, walled, lost)]
    assert found == [True, False, False, False, False, False]


def test_the_other_shortest_path_is_valid_but_not_exact():
    task = Mazes(braid=0.5)
    maze = task.decode(drawn("#####", "#S..#", "#.#.#", "#..G#", "#####"))
    ways = [drawn("#####", "#Soo#", "#.#o#", "#..G#", "#####"), drawn("#####", "#S..#", "#o#.#", "#ooG#", "#####")]
    grades = [task.grade(maze, way) for way in ways]
    assert [grade.valid for grade in grades] == [True, True]
    assert sorted(grade.exact for grade in grades) == [False, True]


def test_targets_are_the_cells_within_so_many_steps_until_the_goal_is_reached():
    task = Mazes()
    for index in range(8):
        maze = task.sample(5, 3, index)
        far = squares_from(maze, maze.squares.index(START))
        trace, steps = task.reference(maze), far[maze.squares.index(GOAL)] // 2
        cells = {s for s in far if s // 11 % 2 and s % 11 % 2}
        assert len(trace.values) == steps + 1
        for k in range(steps):
            assert set(trace.values[k]) == {s for s in cells if far[s] <= 2 * k}
            marked = task.trace_labels(maze, k) == PATH
            assert set(np.flatnonzero(marked)) == {s for s in far if far[s] <= 2 * k and maze.squares[s] == OPEN}
        assert (task.trace_labels(maze, steps) == task.example(maze).labels).all()
        assert steps <= task.num_steps(5)


def test_the_split_is_the_same_for_all_eight_images_and_both_directions():
    task = Mazes()
    for index in range(10):
        maze = task.sample(5, 0, index)
        grid = np.array(maze.squares).reshape(11, 11)
        turned = np.where(grid == START, GOAL, np.where(grid == GOAL, START, grid))
        for image in (np.rot90(grid, k) for k in range(4)):
            for half in (image, image.T):
                assert task.canonical(Maze(tuple(half.ravel().tolist()))) == task.canonical(maze)
        assert task.canonical(Maze(tuple(turned.ravel().tolist()))) == task.canonical(maze)
    assert len({task.canonical(task.sample(5, 0, i)) for i in range(40)}) == 40


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("####", "#SG#", "####"), r"tokens must be \(2w \+ 1\)\^2 of 0..3"),
        (("#####", "#S..#", "###.#", "#..S#", "#####"), "Got 25 with 2 and 0."),
        (("#####", "#So.#", "###.#", "#..G#", "#####"), r"tokens must be \(2w \+ 1\)\^2"),
        (("#####", "#S..#", "#...#", "#..G#", "#####"), "open cell at every odd row and column"),
        (("#####", "#S.##", "###.#", "#..G#", "#####"), "open cell at every odd row and column"),
        (("###.#", "#S..#", "###.#", "#..G#", "#####"), "walls at even ones and all around"),
        (("#####", "#S..#", "#####", "#..G#", "#####"), "must have a way from cell to cell"),
        (("#####", "#.S.#", "###.#", "#..G#", "#####"), "must have a way from cell to cell"),
    ],
)
def test_drawings_that_are_no_mazes_are_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        Mazes().decode(drawn(*rows))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"braid": 1.5}, "Mazes.braid must be from 0 to 1. Got 1.5."),
        ({"quantile": -0.1}, "Mazes.quantile must be from 0 to 1. Got -0.1."),
        ({"train": (1,)}, "difficulty must be at least 2 for maze. Got 1."),
    ],
)
def test_bad_options_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        replace(Mazes(), **fields)


def test_a_maze_shows_its_path_beside_it():
    lines = Mazes().show(Mazes().decode(drawn("#####", "#S..#", "###.#", "#..G#", "#####"))).splitlines()
    assert lines[1] == "#S..#   #Soo#" and len(lines) == 5
