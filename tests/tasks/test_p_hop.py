import numpy as np
import pytest
from scipy import stats

from looplab.tasks.p_hop import Hops, PHop

TASK = PHop(size=40, train=(3,))


def place_by_definition(letters, hops):
    """find(i) = max of {j <= i: x_{j-1} = x_i}, places from 1 as in the paper; 0 where there is none."""
    x = [None, *letters]
    i = len(letters)
    for _ in range(hops):
        i = max([j for j in range(2, i + 1) if x[j - 1] == x[i]], default=0)
        if i == 0:
            return None
    return i - 1


def test_places_are_those_of_the_definition():
    random = np.random.default_rng(0)
    fell = 0
    for _ in range(200):
        letters = tuple(random.integers(0, 4, 20).tolist())  # equal neighbours too: the definition covers them
        for hops in (1, 2, 6):
            wanted = place_by_definition(letters, hops)
            if wanted is None:
                fell += 1
                with pytest.raises(ValueError, match=r"p_hop: the chain must stay in the string"):
                    TASK.reference(Hops(letters, hops))
                continue
            trace = TASK.reference(Hops(letters, hops))
            assert trace.values[-1] == wanted and trace.answer == letters[wanted]
            assert len(trace.values) == hops + 1
    assert fell > 5


def test_every_hop_goes_back_and_stays_inside():
    for hops in (1, 3, 10):
        for index in range(40):
            problem = TASK.sample(hops, 0, index)
            places = TASK.reference(problem).values
            assert all(a > b for a, b in zip(places, places[1:], strict=False))
            assert len(places) == hops + 1 and places[-1] >= 1
            assert [TASK.trace_labels(problem, k)[-1] for k in (0, hops)] == [
                problem.letters[-1],
                problem.letters[places[-1]],
            ]


def test_letters_and_steps_between_neighbours_are_uniform():
    drawn = np.array([TASK.sample(1, 0, index).letters for index in range(300)])
    for column in (0, 20, 39):
        assert stats.chisquare(np.bincount(drawn[:, column], minlength=4)).pvalue > 1e-4
    steps = np.bincount((np.diff(drawn, axis=1) % 4).ravel(), minlength=4)
    assert steps[0] == 0
    assert stats.chisquare(steps[1:]).pvalue > 1e-4


def test_answers_are_uniform():
    answers = [TASK.reference(TASK.sample(6, 0, index)).answer for index in range(400)]
    assert stats.chisquare(np.bincount(answers, minlength=4)).pvalue > 1e-4


def test_renaming_letters_does_not_change_the_canonical_form():
    random = np.random.default_rng(0)
    for index in range(40):
        problem = TASK.sample(3, 0, index)
        names = random.permutation(4)
        renamed = Hops(tuple(names[list(problem.letters)].tolist()), 7)
        assert TASK.canonical(renamed) == TASK.canonical(problem)
    assert len({TASK.canonical(TASK.sample(3, 0, index)) for index in range(40)}) == 40


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match=r"PHop.alphabet must be from 3 to 26. Got 2"):
        PHop(alphabet=2)
    with pytest.raises(
        ValueError, match=r"difficulty must be at most 10 for p_hop with size 40 and alphabet 4. Got 11"
    ):
        TASK.sample(11, 0, 0)
    tokens = TASK.example(TASK.sample(3, 0, 0)).tokens
    for place, wrong in ((0, 1), (1, 2), (40, 1), (41, 13), (43, 0)):
        broken = tokens.copy()
        broken[place] = wrong
        with pytest.raises(ValueError, match=r"p_hop: tokens must be <bos>, 40 letters, 2 digits and ="):
            TASK.decode(broken)
