"""Seen to fail: a larger disc on a smaller one taken as legal, a solution to the spare peg."""

import numpy as np
import pytest

from looplab.tasks.hanoi import Hanoi, Tower


def shortest(discs, start, goal):
    """Moves of a shortest solution, by breadth-first search over stacks."""
    first = tuple(tuple(range(discs, 0, -1)) if peg == start else () for peg in range(3))
    wave, seen, moves = [first], {first}, 0
    while not any(len(pegs[goal]) == discs for pegs in wave):
        further = []
        for pegs in wave:
            for a in range(3):
                for b in range(3):
                    if a != b and pegs[a] and (not pegs[b] or pegs[b][-1] > pegs[a][-1]):
                        after = list(pegs)
                        after[a], after[b] = pegs[a][:-1], (*pegs[b], pegs[a][-1])
                        if tuple(after) not in seen:
                            seen.add(tuple(after))
                            further.append(tuple(after))
        wave, moves = further, moves + 1
    return moves


@pytest.mark.parametrize("discs", [1, 2, 3, 4])
def test_the_solution_is_the_shortest(discs):
    task = Hanoi()
    for start, goal in ((0, 2), (2, 1)):
        moves = task.solve(Tower(discs, start, goal))
        assert len(moves) == shortest(discs, start, goal) == task.most_moves(discs) == 2**discs - 1


@pytest.mark.parametrize("discs", [1, 2, 5, 8])
def test_stacks_of_discs_allow_every_move(discs):
    task = Hanoi()
    for index in range(6):
        problem = task.sample(discs, 0, index)
        pegs = [[], [], []]
        pegs[problem.start] = list(range(discs, 0, -1))
        for move in task.solve(problem):
            a, b = ("ABC".index(peg) for peg in task.tokens[move].split(">"))
            assert not pegs[b] or pegs[b][-1] > pegs[a][-1]
            pegs[b].append(pegs[a].pop())
        assert len(pegs[problem.goal]) == discs


def test_all_six_pairs_of_pegs_are_drawn():
    drawn = {Hanoi().sample(3, 0, index) for index in range(80)}
    assert len(drawn) == Hanoi().space(3) == 6


@pytest.mark.parametrize("tokens", [[6, 4, 5, 0], [4, 4, 0], [6, 4, 4], [6, 0], [6, 9, 0]])
def test_tokens_that_state_no_tower_are_refused(tokens):
    with pytest.raises(ValueError, match="hanoi: tokens must be the goal's peg, another peg once for every disc"):
        Hanoi().decode(np.array(tokens))


def test_towers_that_are_too_high_are_refused():
    with pytest.raises(ValueError, match=r"difficulty must be at most 16 for hanoi: 17 discs need 2\^17 - 1 moves"):
        Hanoi(train=(17,))
