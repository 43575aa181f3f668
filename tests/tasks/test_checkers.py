"""Seen to fail: a jump over a piece of the same colour, a mirror image that moves backwards."""

import numpy as np
import pytest

from looplab.tasks.checkers import BLUE, RED, Checkers, Row


def all_solutions(pieces, begins):
    """Every way to change sides, as (colour, distance), by trying everything on a string."""
    goal, found = "B" * pieces + "_" + "R" * pieces, []

    def walk(row, moves):
        if row == goal:
            found.append(moves)
        for at, piece in enumerate(row):
            step = {"R": 1, "B": -1, "_": 0}[piece]
            for far in (1, 2):
                to = at + far * step
                if step and 0 <= to < len(row) and row[to] == "_" and (far == 1 or row[at + step] not in (piece, "_")):
                    after = list(row)
                    after[at], after[to] = "_", piece
                    if moves or piece == begins:
                        walk("".join(after), [*moves, piece + "+" * far])

    walk("R" * pieces + "_" + "B" * pieces, [])
    return found


@pytest.mark.parametrize("pieces", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("begins", ["R", "B"])
def test_there_is_one_solution_and_it_is_the_reference(pieces, begins):
    task = Checkers()
    row = Row(pieces, RED, RED if begins == "R" else BLUE)
    assert all_solutions(pieces, begins) == [[task.tokens[move] for move in task.solve(row)]]
    assert task.most_moves(pieces) == len(task.solve(row)) == (pieces + 1) ** 2 - 1


@pytest.mark.parametrize("left", [RED, BLUE])
@pytest.mark.parametrize("begins", [RED, BLUE])
def test_the_reference_solves_every_start(left, begins):
    task = Checkers()
    for pieces in (1, 4, 6):
        row = Row(pieces, left, begins)
        played = task.simulate(row, task.solve(row))
        assert played.solved and played.positions[-1] == tuple(reversed(task.start(row)))


@pytest.mark.parametrize(
    ("moves", "first_illegal"),
    [
        (["R++"], 0),
        (["B++"], 0),
        (["R+", "B+"], 1),
        (["R+", "R++"], 1),
        (["R+", "B++", "B+", "B+"], 3),
        (["B+", "B+"], None),
    ],
)
def test_illegal_moves_are_found(moves, first_illegal):
    task = Checkers()
    played = task.simulate(Row(2, RED, RED), [task.tokens.index(move) for move in moves])
    assert played.first_illegal == first_illegal


def test_all_four_starts_are_drawn():
    assert len({Checkers().sample(2, 0, index) for index in range(60)}) == Checkers().space(2) == 4


@pytest.mark.parametrize("tokens", [[5, 5, 4, 6], [5, 5, 5, 4, 6, 0], [4, 5, 4, 6, 0], [5, 5, 6, 4, 0], [5, 0]])
def test_tokens_that_state_no_row_are_refused(tokens):
    with pytest.raises(ValueError, match="checkers: tokens must be who begins"):
        Checkers().decode(np.array(tokens))
