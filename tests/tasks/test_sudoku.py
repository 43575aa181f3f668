"""Seen to fail: a generator that takes a clue too many, one that leaves one too many, a canonical form without the
transposition, a validity that forgets the givens, an importer that takes a wrong solution."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from looplab._config import from_dict, to_dict
from looplab.data.documents import DataError
from looplab.tasks.base import Draws, Task
from looplab.tasks.sudoku import GRADES, Puzzle, Sudoku, read_csv
from reference import sudoku as slow

SHAPES = {4: (2, 2), 6: (2, 3), 9: (3, 3)}
TWO_WAYS = (0, 0, 3, 4, 3, 4, 1, 2, 0, 0, 4, 3, 4, 3, 2, 1)
"""4 x 4 with two solutions: 1 2 over 2 1, or 2 1 over 1 2."""
RARE = [(6, 3), (9, 4)]
"""Sizes and grades of which few puzzles are."""


def puzzles(task, difficulty, count, key=0):
    return [task.sample(difficulty, key, index) for index in range(count)]


@pytest.mark.parametrize(
    ("size", "sampled", "difficulty", "count"),
    [
        (4, "minimal", 1, 20),
        (4, "holes", 10, 20),
        (6, "minimal", 1, 12),
        (6, "holes", 20, 12),
        (6, "grade", 2, 6),
        (9, "holes", 50, 5),
        (9, "minimal", 1, 4),
        (9, "grade", 3, 2),
    ],
)
def test_a_second_solver_finds_exactly_the_solution(size, sampled, difficulty, count):
    task = Sudoku(size=size, sampled=sampled)
    for problem in puzzles(task, difficulty, count):
        assert slow.solutions(problem.givens, *SHAPES[size], 2) == [problem.solution]
        assert task.solve(Puzzle(problem.givens)) == task.reference(problem).answer == problem.solution


@pytest.mark.parametrize(("size", "holes"), [(4, 1), (4, 12), (6, 5), (6, 26), (9, 30), (9, 56)])
def test_there_are_as_many_holes_as_wanted(size, holes):
    for problem in puzzles(Sudoku(size=size), holes, 4):
        assert problem.givens.count(0) == holes
        assert all(given in (0, digit) for given, digit in zip(problem.givens, problem.solution, strict=True))


@pytest.mark.parametrize(("size", "count"), [(4, 12), (6, 6), (9, 2)])
def test_no_clue_of_a_minimal_puzzle_can_go(size, count):
    task = Sudoku(size=size, sampled="minimal")
    for problem in puzzles(task, 1, count):
        for cell in np.flatnonzero(problem.givens):
            fewer = list(problem.givens)
            fewer[cell] = 0
            assert len(slow.solutions(fewer, *SHAPES[size], 2)) == 2


@pytest.mark.parametrize(
    ("size", "grade"), [(s, g) for s, grades in GRADES.items() for g in grades if (s, g) not in RARE]
)
def test_a_grade_is_what_was_asked_for(size, grade):
    task = Sudoku(size=size, sampled="grade")
    for problem in puzzles(task, grade, 2):
        assert task.techniques(problem) == grade
        assert task.count_solutions(problem) == 1
        assert (task.nodes(problem) == 1) == (grade <= 2)


@pytest.mark.nightly
@pytest.mark.parametrize(("size", "grade"), RARE)
def test_rare_grades_come_too(size, grade):
    task = Sudoku(size=size, sampled="grade")
    problem = task.sample(grade, 0, 0)
    assert task.techniques(problem) == grade and task.count_solutions(problem) == 1


def orbit(task, grid):
    """All images of a grid under products of the generators."""
    images = np.array([grid])
    while True:
        more = np.unique(np.concatenate([images, *(s.apply(images) for s in task.symmetries(1))]), axis=0)
        if len(more) == len(images):
            return {tuple(image) for image in more.tolist()}
        images = more


def test_the_generator_reaches_both_kinds_of_grids_and_so_all_288():
    task = Sudoku(size=4)
    full = {problem.solution for problem in puzzles(task, 1, 40)}
    assert len(full) > 30
    assert set().union(*(orbit(task, grid) for grid in [*full][:12])) == set(slow.solutions([0] * 16, 2, 2, 1000))


@pytest.mark.nightly
def test_the_generator_reaches_all_288_grids_itself():
    full = {problem.solution for problem in puzzles(Sudoku(size=4), 1, 3000)}
    assert full == set(slow.solutions([0] * 16, 2, 2, 1000))


@pytest.mark.parametrize("count", [150, pytest.param(2500, marks=pytest.mark.nightly)])
def test_minimal_4x4_puzzles_are_the_36_known_ones(count):
    """13 with four clues, 22 with five, and a rare one with six."""
    task, seen = Sudoku(size=4, sampled="minimal"), {}
    for problem in puzzles(task, 1, count):
        seen[task.canonical(problem)] = 16 - problem.givens.count(0)
    kinds = Counter(seen.values())
    assert kinds[4] == 13 and kinds[5] <= 22 and kinds[6] <= 1 and set(kinds) <= {4, 5, 6}
    assert count < 2500 or kinds == {4: 13, 5: 22, 6: 1}


def test_the_canonical_form_is_the_same_for_all_images_and_for_no_other():
    task = Sudoku(size=4, sampled="minimal")
    first, *others = puzzles(task, 1, 12)
    images = orbit(task, first.givens)
    assert 3072 % len(images) == 0 and len(images) > 500
    assert {task.canonical(Puzzle(givens)) for givens in [*images][::19]} == {task.canonical(first)}
    for other in others:
        assert (task.canonical(other) == task.canonical(first)) == (other.givens in images)


@pytest.mark.parametrize("size", [4, 6, 9])
def test_images_of_a_puzzle_share_its_canonical_form_and_its_split(size):
    task = Sudoku(size=size, sampled="minimal")
    for index, problem in enumerate(puzzles(task, 1, 4)):
        for number in range(6):
            symmetry = task.symmetry(1, Draws(3, index, number))
            givens, solution = (symmetry.apply(np.array(grid)) for grid in (problem.givens, problem.solution))
            image = task.decode(givens)
            assert task.solve(image) == tuple(solution.tolist())
            assert task.canonical(image) == task.canonical(problem)
            assert task.split(1, image) == task.split(1, problem)


@pytest.mark.parametrize("size", [6, 9])
def test_no_canonical_puzzle_is_in_two_splits(size):
    task, seen = Sudoku(size=size, sampled="holes"), {}
    difficulty = task.train_difficulties[0]
    for split in ("train", "validation", "test"):
        for key, index in itertools.product(range(2), range(3)):
            problem = task.sample(difficulty, key, index, split)
            assert seen.setdefault(task.canonical(problem), split) == split
    assert set(seen.values()) == {"train", "validation", "test"}


@pytest.mark.parametrize(("size", "distinct"), [(6, 40), (9, 12)])
def test_other_puzzles_have_other_canonical_forms(size, distinct):
    task = Sudoku(size=size, sampled="minimal")
    assert len({task.canonical(problem) for problem in puzzles(task, 1, distinct)}) >= distinct - 2


def test_random_symmetries_reach_all_of_the_group():
    """Of the 2 x 2 board: 8 orders of rows, 8 of columns, 2 ways to lie, 24 names of digits."""
    task = Sudoku(size=4)
    drawn = [task.symmetry(1, Draws(0, item)) for item in range(1000)]
    assert len({s.places for s in drawn}) == 128
    assert len({s.names for s in drawn}) == 24


def test_a_full_grid_is_valid_by_the_rules_and_the_givens():
    task = Sudoku(size=4, allow_multiple=True)
    problem = task.decode(np.array(TWO_WAYS))
    assert task.count_solutions(problem, limit=5) == 2
    ways = slow.solutions(TWO_WAYS, 2, 2, 5)
    grades = [task.grade(problem, np.array(way)) for way in ways]
    assert [g.valid for g in grades] == [True, True]
    assert sorted(g.exact for g in grades) == [False, True]
    assert sorted(g.cells_right for g in grades) == [12, 16]
    for broken in ((*ways[0][:15], 4), (0, *ways[0][1:]), (*ways[0][:12], *ways[0][8:12])):
        assert not task.grade(problem, np.array(broken)).valid
    unlike = next(grid for grid in slow.solutions([0] * 16, 2, 2, 300) if grid[4] != TWO_WAYS[4])
    assert not task.grade(problem, np.array(unlike)).valid


def test_several_solutions_are_reported():
    with pytest.raises(
        ValueError, match="sudoku: 2 solutions or more \\(rows given below\\); a puzzle must have exactly one"
    ):
        Sudoku(size=4).solve(Puzzle(TWO_WAYS))
    with pytest.raises(ValueError, match="Set allow_multiple=True to grade by validity.\n\\. \\. 3 4\n3 4 1 2\n"):
        Sudoku(size=4).example(Puzzle(TWO_WAYS))


def test_no_solution_is_reported():
    givens = (1, 2, 3, 0, 0, 0, 0, 4) + (0,) * 8
    with pytest.raises(ValueError, match="sudoku: no solution .* Correct the givens.\n1 2 3 \\."):
        Sudoku(size=4).solve(Sudoku(size=4).decode(np.array(givens)))


@pytest.mark.parametrize(
    ("size", "givens", "message"),
    [
        (4, (1, 0, 0, 1) + (0,) * 12, "Got 1 twice, at row 1, column 1 and at row 1, column 4. Correct one"),
        (6, (2,) + (0,) * 7 + (2,) + (0,) * 27, "Got 2 twice, at row 1, column 1 and at row 2, column 3"),
        (4, (5,) + (0,) * 15, r"tokens must be 16 of 0 \(blank\) to 4. Got 16 from 0 to 5"),
        (9, (0,) * 80, "tokens must be 81 of .* Got 80"),
    ],
)
def test_grids_that_are_no_puzzles_are_refused(size, givens, message):
    with pytest.raises(ValueError, match=message):
        Sudoku(size=size).decode(np.array(givens))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"size": 5}, "Sudoku.size must be 4, 6 or 9. Got 5."),
        ({"sampled": "clues"}, "Sudoku.sampled must be one of holes, grade, minimal. Got 'clues'."),
        ({"train": ()}, "Sudoku.train must name at least one difficulty"),
        ({"train": (58,)}, "difficulty must be from 1 to 57 for sudoku with size=9, sampled='holes'. Got 58."),
        ({"size": 6, "sampled": "grade", "train": (4,)}, "difficulty must be 1, 2, 3, 5 for sudoku .* Got 4."),
        ({"sampled": "minimal", "train": (2,)}, "difficulty must be 1 for sudoku .* Got 2."),
    ],
)
def test_bad_options_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Sudoku(**fields)


@pytest.mark.parametrize(("size", "sampled"), [*itertools.product([4, 6, 9], ["holes", "grade", "minimal"])])
def test_every_kind_survives_json_and_its_usual_difficulties_exist(size, sampled):
    task = Sudoku(size=size, sampled=sampled)
    assert from_dict(Task, to_dict(task)) == task
    assert set(task.train_difficulties) <= set(task.test_difficulties)
    for difficulty in task.test_difficulties:
        task.check(difficulty)
    assert task.length(1) == size**2
    assert task.held_out(task.train_difficulties[0]) == (size > 4)


@pytest.mark.parametrize(
    ("size", "sampled", "difficulty", "givens"),
    [
        (4, "minimal", 1, "0001000003000204"),
        (6, "minimal", 1, "600200003040001000000300000000026401"),
        (9, "holes", 45, "002030005700605013301000496207016080148007000506400007620008001070000032010200060"),
        (9, "grade", 2, "280001005005000800070000000000000000050030061000012700130000008000908400006000000"),
    ],
)
def test_the_first_item_of_this_version_never_changes(size, sampled, difficulty, givens):
    problem = Sudoku(size=size, sampled=sampled).sample(difficulty, 0, 0)
    assert "".join(map(str, problem.givens)) == givens


def test_a_puzzle_shows_its_solution_beside_it():
    lines = Sudoku(size=4).show(Puzzle((0, 0, 3, 4, 3, 4, 1, 2, 2, 0, 4, 3, 4, 3, 2, 1))).splitlines()
    assert lines[0] == ". . 3 4   1 2 3 4" and len(lines) == 4


def written(folder, *lines):
    path = folder / "puzzles.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_csv_of_rated_puzzles_is_read(tmp_path):
    task = Sudoku(size=4, sampled="minimal")
    problem = task.sample(1, 0, 0)
    q, a = ("".join(map(str, grid)) for grid in (problem.givens, problem.solution))
    path = written(tmp_path, "source,q,a,rating", f"book,{q.replace('0', '.')},{a},7", f"web,{q},,")
    rated, unrated = read_csv(path, task)
    assert (rated.source, rated.puzzle, rated.rating) == ("book", problem, 7)
    assert rated.puzzle.solution == problem.solution
    assert (unrated.puzzle, unrated.puzzle.solution, unrated.rating) == (problem, None, None)
    assert task.canonical(unrated.puzzle) == task.canonical(problem)
    assert read_csv(written(tmp_path, "q", q), task)[0].puzzle == problem


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["source,puzzle", "x,1"], "puzzles.csv:1: no column 'q'. Columns: source, puzzle."),
        (["q", "0" * 16, "0" * 15], "puzzles.csv:3: sudoku: tokens must be 16"),
        (["q", "x" * 16], "puzzles.csv:2: a grid must be written in digits and '.'. Got 'xxxx"),
        (["q", "11" + "0" * 14], "puzzles.csv:2: sudoku: givens must differ"),
        (
            ["q,a", "0" * 16 + "," + "1" * 16],
            "puzzles.csv:2: the solution in column 'a' breaks the rules or the givens",
        ),
        (["q,rating", "0" * 16 + ",hard"], "puzzles.csv:2: .*hard"),
    ],
)
def test_broken_lines_are_named(tmp_path, lines, message):
    with pytest.raises(DataError, match=message):
        read_csv(written(tmp_path, *lines), Sudoku(size=4))


def test_a_solution_in_the_file_must_keep_the_givens(tmp_path):
    task = Sudoku(size=4)
    problem = task.sample(1, 0, 0)
    renamed = [digit % 4 + 1 for digit in problem.solution]
    q, a = ("".join(map(str, grid)) for grid in (problem.givens, renamed))
    assert task.verify(replace(problem, givens=(0,) * 16), np.array(renamed))
    with pytest.raises(DataError, match="breaks the rules or the givens"):
        read_csv(written(tmp_path, "q,a", f"{q},{a}"), task)
