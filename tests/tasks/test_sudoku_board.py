"""Seen to fail: a fold that misses a place, a full board taken for a solution without a look at its rows, a pair rule
that strikes its own cells, a fish that looks at rows only."""

import pytest

from looplab.tasks.sudoku import Sudoku
from looplab.tasks.sudoku_board import NAKED, PAIRS, SINGLES, TRIPLES, board
from reference import sudoku as slow

SHAPES = {4: (2, 2), 6: (2, 3), 9: (3, 3)}
NINE = board(9)


def candidates(table, bits):
    return {c: {d for d in range(1, table.n + 1) if bits & table.bit(c, d)} for c in range(table.cells)}


def without(*struck):
    """All candidates of an empty 9 x 9 board but (cell, digit) pairs."""
    bits = NINE.every
    for cell, digit in struck:
        bits &= ~NINE.bit(cell, digit)
    return bits


def lost(bits, techniques):
    """(cell, digit) pairs that a technique set strikes and the next weaker one does not."""
    weaker, stronger = NINE.deduce(bits, techniques - 1), NINE.deduce(bits, techniques)
    assert stronger & ~weaker == 0
    gone = weaker & ~stronger
    return {(c, d) for c in range(81) for d in range(1, 10) if gone & NINE.bit(c, d)}


@pytest.mark.parametrize("size", [4, 6, 9])
def test_groups_are_those_of_the_rules(size):
    table, near = board(size), slow.peers(size, *SHAPES[size])
    for cell in range(size**2):
        struck = table.every & ~table.candidates(table.bit(cell, 1))
        assert struck == sum(table.bit(p, 1) for p in near[cell]) + sum(table.bit(cell, d) for d in range(2, size + 1))


@pytest.mark.parametrize("size", [4, 6, 9])
@pytest.mark.parametrize("techniques", [NAKED, SINGLES])
def test_singles_leave_what_plain_loops_leave(size, techniques):
    task, table = Sudoku(size=size, sampled="minimal"), board(size)
    for index in range(12):
        givens = task.sample(1, 0, index).givens
        found = candidates(table, table.deduce(table.candidates(table.bits(givens)), techniques))
        assert found == slow.singles(givens, *SHAPES[size], naked=techniques == NAKED)


@pytest.mark.parametrize("size", [4, 6])
def test_the_search_finds_all_solutions(size):
    table, task = board(size), Sudoku(size=size, sampled="minimal")
    for index in range(8):
        givens = list(task.sample(1, 0, index).givens)
        given = next(c for c in range(size**2) if givens[c])
        givens[given] = 0
        found = [table.grid(bits) for bits in table.solutions(table.candidates(table.bits(givens)))]
        assert sorted(found) == sorted(slow.solutions(givens, *SHAPES[size], 10_000))
        assert len(found) > 1


def test_the_blank_board_has_288_grids():
    table = board(4)
    search = table.solutions(table.every)
    found = {table.grid(bits) for bits in search}
    assert found == set(slow.solutions([0] * 16, 2, 2, 1000)) and len(found) == 288
    assert search.nodes > 288


def test_contradictions_leave_nothing():
    table = board(4)
    assert table.singles(table.candidates(table.bits([1, 2] + [0] * 14))) != 0
    assert table.singles(table.candidates(table.bits([1, 2, 0, 0, 0, 0, 3, 0] + [0] * 8))) == 0  # no place for 3
    assert table.singles(table.candidates(table.bits([1, 2, 3, 0, 0, 0, 0, 4] + [0] * 8))) == 0


@pytest.mark.parametrize("broken", ["rows", "columns", "boxes"])
def test_a_full_board_that_breaks_one_rule_is_no_solution(broken):
    rows = [(1, 2, 3, 4), (2, 3, 4, 1), (3, 4, 1, 2), (4, 1, 2, 3)]  # boxes
    if broken != "boxes":
        rows = [(1, 2, 3, 4), (3, 4, 1, 2), (1, 2, 3, 4), (3, 4, 1, 2)]  # columns
    if broken == "rows":
        rows = [*zip(*rows, strict=True)]
    grid = [digit for row in rows for digit in row]
    table = board(4)
    assert table.singles(table.bits(grid)) == 0
    assert table.singles(table.bits(table.grid(next(table.solutions(table.every))))) != 0


def test_a_digit_confined_to_one_line_of_a_box_leaves_the_rest_of_the_line():
    bits = without(*((cell, 1) for cell in (9, 10, 11, 18, 19, 20)))
    assert lost(bits, PAIRS) == {(cell, 1) for cell in range(3, 9)}


def test_a_digit_confined_to_one_box_of_a_line_leaves_the_rest_of_the_box():
    bits = without(*((cell, 1) for cell in range(27, 81, 9)))  # column 1: rows 1 to 3 only
    assert lost(bits, PAIRS) == {(cell, 1) for cell in (1, 2, 10, 11, 19, 20)}


def test_two_cells_with_the_same_two_digits_take_them_from_the_rest():
    bits = without(*((cell, digit) for cell in (0, 8) for digit in range(3, 10)))
    assert lost(bits, PAIRS) == {(cell, digit) for cell in range(1, 8) for digit in (1, 2)}


def test_two_digits_in_the_same_two_places_leave_no_others_there():
    bits = without(*((cell, digit) for cell in range(1, 8) for digit in (1, 2)))
    assert lost(bits, PAIRS) == {(cell, digit) for cell in (0, 8) for digit in range(3, 10)}


@pytest.mark.parametrize("across", [True, False])
def test_an_x_wing_leaves_the_other_places_of_its_lines(across):
    def cell(one, other):
        return 9 * one + other if across else 9 * other + one

    bits = without(*((cell(line, place), 1) for line in (0, 4) for place in range(9) if place not in (0, 8)))
    gone = lost(bits, TRIPLES)
    assert gone == {(cell(line, place), 1) for line in range(9) if line not in (0, 4) for place in (0, 8)}


def test_three_cells_with_three_digits_take_them_from_the_rest():
    pairs = {0: (1, 2), 4: (2, 3), 8: (1, 3)}
    bits = without(*((cell, digit) for cell in pairs for digit in range(1, 10) if digit not in pairs[cell]))
    assert lost(bits, TRIPLES) == {(cell, digit) for cell in range(9) if cell not in pairs for digit in (1, 2, 3)}


@pytest.mark.parametrize("techniques", [NAKED, SINGLES, PAIRS, TRIPLES])
def test_no_technique_strikes_a_digit_of_the_solution(techniques):
    task = Sudoku(sampled="minimal")
    for index in range(10):
        problem = task.sample(1, 1, index)
        solution = NINE.bits(problem.solution)
        assert NINE.deduce(NINE.candidates(NINE.bits(problem.givens)), techniques) & solution == solution
