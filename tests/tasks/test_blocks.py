"""Seen to fail: a plan that puts a block onto its place before that is ready, a canonical form that reads the goal
first for some blocks, stacks that are not uniform."""

import itertools
from collections import Counter

import numpy as np
import pytest
from scipy import stats

from looplab.tasks.base import Draws
from looplab.tasks.blocks import TABLE, Blocks, Rearrangement, arrangements


def stackings(blocks):
    """All arrangements: what each of the blocks stands on."""
    found = []
    for on in itertools.product(range(-1, blocks), repeat=blocks):
        below = [b for b in on if b != TABLE]
        if len(set(below)) == len(below) and all(grounded(on, block) for block in range(blocks)):
            found.append(on)
    return found


def grounded(on, block):
    for _ in on:
        if on[block] == TABLE:
            return True
        block = on[block]
    return False


def distances(start):
    """Arrangement -> fewest moves from a start, by breadth-first search over stacks as sets of towers."""
    towers = frozenset(tower(start, top) for top in range(len(start)) if top not in start)
    far, wave = {towers: 0}, [towers]
    while wave:
        further = []
        for here in wave:
            for source in here:
                rest, lifted = here - {source}, source[-1]
                left = {source[:-1]} - {()}
                targets = [*(rest | left), ()]
                for target in targets:
                    after = frozenset(((rest | left) - {target}) | {(*target, lifted)})
                    if after not in far:
                        far[after] = far[here] + 1
                        further.append(after)
        wave = further
    return {standing(towers): moves for towers, moves in far.items()}


def tower(on, top):
    blocks = [top]
    while on[blocks[-1]] != TABLE:
        blocks.append(on[blocks[-1]])
    return tuple(reversed(blocks))


def standing(towers):
    on = {}
    for blocks in towers:
        on.update({block: below for below, block in zip((TABLE, *blocks), blocks, strict=False)})
    return tuple(on[block] for block in sorted(on))


@pytest.mark.parametrize(("blocks", "starts"), [(2, 3), (3, 13), (4, 12), (5, 2)])
def test_the_reference_is_a_shortest_plan(blocks, starts):
    task, every = Blocks(), stackings(blocks)
    for start in every[:: max(1, len(every) // starts)]:
        for goal, moves in distances(start).items():
            problem = Rearrangement(start, goal)
            plan = task.solve(problem)
            assert len(plan) == moves
            assert task.simulate(problem, plan).solved
            low, high = task.bounds(problem)
            assert low <= moves <= high <= task.most_moves(blocks)


def test_six_blocks_too():
    task = Blocks()
    problem = task.sample(6, 0, 0)
    for goal, moves in itertools.islice(distances(problem.stacks).items(), 0, None, 37):
        assert len(task.solve(Rearrangement(problem.stacks, goal))) == moves


@pytest.mark.parametrize("blocks", [7, 8])
def test_beyond_six_the_plan_solves_within_its_bounds(blocks):
    task, longer = Blocks(), 0
    for index in range(60):
        problem = task.sample(blocks, 0, index)
        plan = task.solve(problem)
        assert task.simulate(problem, plan).solved
        low, high = task.bounds(problem)
        assert low <= len(plan) == high <= min(2 * low, task.most_moves(blocks))
        longer += high > low
    assert longer


@pytest.mark.parametrize(("blocks", "count"), [(1, 1), (2, 3), (3, 13), (4, 73), (5, 501)])
def test_arrangements_are_counted(blocks, count):
    assert arrangements(blocks) == len(stackings(blocks)) == count


def test_arrangements_are_uniform_and_never_the_goal():
    problems = [Blocks().draw(3, Draws(7, item)) for item in range(1300)]
    assert all(problem.stacks != problem.goal for problem in problems)
    for field in ("stacks", "goal"):
        counts = Counter(getattr(problem, field) for problem in problems)
        assert set(counts) == set(stackings(3))
        assert stats.chisquare(list(counts.values())).pvalue > 1e-4


def renamed(on, names):
    after = [TABLE] * len(on)
    for block, below in enumerate(on):
        after[names[block]] = below if below == TABLE else names[below]
    return tuple(after)


def test_the_split_is_the_same_under_all_names():
    task = Blocks()
    for index in range(12):
        problem = task.sample(4, 0, index)
        for names in itertools.permutations(range(4)):
            image = Rearrangement(renamed(problem.stacks, names), renamed(problem.goal, names))
            assert task.canonical(image) == task.canonical(problem)


def test_canonical_forms_are_as_many_as_problems_up_to_names():
    task, orbits, forms = Blocks(), set(), set()
    for start, goal in itertools.product(stackings(3), repeat=2):
        images = [(renamed(start, n), renamed(goal, n)) for n in itertools.permutations(range(3))]
        orbits.add(min(images))
        forms.add(task.canonical(Rearrangement(start, goal)))
    assert len(forms) == len(orbits)


@pytest.mark.parametrize("blocks", [2, 3, 4])
def test_chance_is_that_of_the_commonest_plan(blocks):
    task, every = Blocks(), stackings(blocks)
    every_pair = [Rearrangement(a, b) for a, b in itertools.permutations(every, 2)]
    plans = Counter(task.solve(problem) for problem in every_pair)
    assert task.chance(blocks) == pytest.approx(max(plans.values()) / len(every_pair))
    assert task.space(blocks) == len(every_pair)


@pytest.mark.parametrize(
    ("move", "legal"),
    [("a>t", False), ("b>t", False), ("b>a", False), ("c>t", True), ("c>a", True), ("a>c", True), ("c>d", False)],
)
def test_only_clear_blocks_move_onto_clear_blocks(move, legal):
    """c stands on b; a and b stand on the table."""
    task = Blocks()
    problem = Rearrangement((TABLE, TABLE, 1), (TABLE, TABLE, TABLE))
    assert (task.play(problem, problem.stacks, task.tokens.index(move)) is not None) is legal


@pytest.mark.parametrize("tokens", [[4, 4, 5], [5, 4, 4, 4, 0], [5, 5, 4, 4, 0], [4, 5, 6, 5, 0], [0]])
def test_tokens_that_state_no_stacks_are_refused(tokens):
    with pytest.raises(ValueError, match="blocks: tokens must say what every block shall stand on"):
        Blocks().decode(np.array(tokens))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"blocks": 1}, "Blocks.blocks must be from 2 to 26. Got 1."),
        ({"train": (9,)}, "difficulty must be at most 8 for blocks. Got 9."),
        ({"train": (1,)}, "difficulty must be at least 2 for blocks. Got 1."),
    ],
)
def test_bad_options_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Blocks(**fields)


def test_names_do_not_run_into_the_table():
    tokens = Blocks(blocks=26).tokens
    assert len(set(tokens)) == len(tokens)
