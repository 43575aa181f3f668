"""Seen to fail: a boat that may hold an actor with another's agent, a search that skips the near bank, an unsolvable
problem taken as solved when nobody moves."""

import itertools

import numpy as np
import pytest

from looplab.tasks.moves import UNSOLVABLE
from looplab.tasks.river import Party, River

LENGTHS = {2: [1, 5, 11, None, None, None], 3: [1, 3, 5, 9, 11, None], 4: [1, 1, 3, 5, 7, 9]}


def peaceful(group):
    """Nobody's agent sees an actor whose own agent is away."""
    agents = {name[1:] for name in group if name[0] == "A"}
    return not agents or all(name[1:] in agents for name in group if name[0] == "a")


def crossings(pairs, boat):
    """Fewest crossings, by waves over sets of names, or None."""
    everyone = frozenset(f"{kind}{pair}" for pair in range(pairs) for kind in "aA")
    wave, seen, count = {(everyone, True)}, set(), 0
    while wave:
        if (frozenset(), False) in wave:
            return count
        seen |= wave
        further = set()
        for near, here in wave:
            bank = near if here else everyone - near
            for size in range(1, boat + 1):
                for crew in map(frozenset, itertools.combinations(sorted(bank), size)):
                    after = near - crew if here else near | crew
                    if all(map(peaceful, (crew, after, everyone - after))):
                        further.add((after, not here))
        wave, count = further - seen, count + 1
    return None


@pytest.mark.parametrize("boat", [2, 3, 4])
def test_solutions_are_shortest_and_unsolvable_parties_are_found(boat):
    task = River(boat=boat)
    for pairs, length in enumerate(LENGTHS[boat], 1):
        moves = task.solve(Party(tuple(range(pairs))))
        assert (None if moves is None else len(moves)) == length
        assert task.solvable(pairs) == (length is not None)
        if pairs < 5:
            assert crossings(pairs, boat) == length


@pytest.mark.parametrize(("boat", "pairs"), [(2, 3), (3, 5), (4, 4)])
def test_named_people_cross_in_peace(boat, pairs):
    task = River(boat=boat)
    for index in range(6):
        party = task.sample(pairs, 0, index)
        near, far = {task.people[2 * pair + kind] for pair in party.pairs for kind in (0, 1)}, set()
        for move in task.solve(party):
            crew = set(task.tokens[move].strip("()").split(","))
            assert 1 <= len(crew) <= boat and crew <= near and peaceful(crew)
            near, far = near - crew, far | crew
            assert peaceful(near) and peaceful(far)
            near, far = far, near  # the boat is on the other side now
        assert not far and len(near) == 2 * pairs


def test_an_unsolvable_party_is_answered_so_and_named_with_what_was_searched():
    task = River(boat=2)
    party = task.sample(4, 0, 0)
    example = task.example(party)
    assert example.labels[example.answer][0] == UNSOLVABLE
    assert task.solve(party) is None and task.chance(4) == 1.0
    message = r"river: n=4, boat=2 has no solution \(search exhausted 44 states\). It is excluded from solve rate."
    with pytest.raises(ValueError, match=message):
        task.check_solvable(4)
    task.check_solvable(3)
    assert 4 in task.test_difficulties and 4 not in task.train_difficulties


@pytest.mark.parametrize(
    ("crew", "legal"),
    [("(a1)", True), ("(a1,A1)", True), ("(A1)", False), ("(a1,a2)", True), ("(A1,A2)", True), ("(a3)", False)],
)
def test_moves_keep_the_peace_and_the_place(crew, legal):
    """Two pairs: (A1) leaves a1 with A2; (A1,A2) leaves no agent near; a3 is not there."""
    task = River(boat=2)
    party = Party((0, 1))
    after = task.play(party, task.start(party), task.tokens.index(crew))
    assert (after is not None) is legal
    if crew == "(a1)":
        assert task.play(party, after, task.tokens.index("(a2)")) is None  # not where the boat is
        assert task.play(party, after, task.tokens.index("(a1)")) == task.start(party)


def test_no_crew_of_strangers_is_in_the_vocabulary():
    task = River()
    crews = [set(name.strip("()").split(",")) for name in task.tokens if name.startswith("(")]
    assert all(peaceful(crew) and len(crew) <= 3 for crew in crews)
    everyone = itertools.chain.from_iterable(itertools.combinations(task.people, size) for size in (1, 2, 3))
    assert len(crews) == sum(peaceful(crew) for crew in everyone)


@pytest.mark.parametrize(("boat", "pairs"), [(2, 2), (3, 2), (4, 2), (3, 3)])
def test_chance_is_one_over_the_different_answers(boat, pairs):
    task = River(boat=boat, pairs=4)
    parties = [Party(order) for order in itertools.permutations(range(4), pairs)]
    answers = [task.solve(party) for party in parties]
    assert task.chance(pairs) == pytest.approx(max(map(answers.count, answers)) / len(answers))
    assert len(parties) == task.space(pairs)


@pytest.mark.parametrize(
    "tokens", [[4, 5, 16, 16], [4, 6, 16, 16, 0], [4, 5, 4, 5, 16, 16, 16, 16, 0], [4, 5, 16, 17, 0]]
)
def test_tokens_that_state_no_party_are_refused(tokens):
    with pytest.raises(ValueError, match="river: tokens must be pairs"):
        River().decode(np.array(tokens))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"boat": 5}, "River.boat must be 2, 3 or 4. Got 5."),
        ({"pairs": 7}, "River.pairs must be from 2 to 6. Got 7."),
        ({"pairs": 3, "train": (4,)}, "difficulty must be at most 3 for river: more pairs have no name. Got 4."),
    ],
)
def test_bad_options_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        River(**fields)
