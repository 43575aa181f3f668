import itertools
import re

import numpy as np
import pytest
from scipy import stats

from looplab.tasks.addition import Addition, Sum


def kinds(problem, base):
    """One letter per place: g makes a carry, p passes one on, k ends it."""
    sums = [a + b for a, b in zip(problem.first, problem.second, strict=True)]
    return "".join("g" if s >= base else "p" if s == base - 1 else "k" for s in sums)


def longest(problem, base):
    return max((len(run) for run in re.findall("gp*", kinds(problem, base))), default=0)


def all_sums(digits, base):
    for numbers in itertools.product(itertools.product(range(base), repeat=digits), repeat=2):
        yield Sum(*numbers)


@pytest.mark.parametrize(("digits", "base"), [(4, 2), (2, 10), (3, 3)])
def test_all_short_sums_and_their_rounds(digits, base):
    task = Addition(digits=digits, base=base, train=(1,))
    for problem in all_sums(digits, base):
        trace, word = task.reference(problem), kinds(problem, base)
        total = sum((a + b) * base**i for i, (a, b) in enumerate(zip(problem.first, problem.second, strict=True)))
        assert sum(digit * base**i for i, digit in enumerate(trace.answer)) == total
        assert len(trace.values) == longest(problem, base) + 1
        for k, digits_after in enumerate(trace.values):
            for place in range(digits + 1):
                carried = re.search("gp*$", word[max(0, place - k) : place]) is not None
                here = problem.first[place] + problem.second[place] if place < digits else 0
                assert digits_after[place] == (here + carried) % base


@pytest.mark.parametrize(("digits", "base"), [(4, 2), (3, 3), (2, 10)])
def test_spaces_are_counted(digits, base):
    task = Addition(digits=digits, base=base, train=(1,))
    runs = [longest(problem, base) for problem in all_sums(digits, base)]
    for run in range(1, digits + 1):
        assert task.space(run) == runs.count(run)


@pytest.mark.parametrize(("task", "runs"), [(Addition(), (2, 4, 28, 32)), (Addition(base=10, digits=12), (1, 3, 12))])
def test_the_longest_run_is_the_difficulty(task, runs):
    for run in runs:
        drawn = [task.sample(run, 0, index) for index in range(40)]
        assert {longest(problem, task.base) for problem in drawn} == {run}


def test_the_planted_run_is_uniform_in_place_and_digits():
    task = Addition(base=10, digits=2, train=(1,))
    made, passed = [], []
    for index in range(900):
        problem = task.sample(2, 0, index)
        made.append((problem.first[0], problem.second[0]))
        passed.append(problem.first[1])
    counts = [made.count(pair) for pair in itertools.product(range(10), repeat=2) if sum(pair) >= 10]
    assert sum(counts) == 900 and stats.chisquare(counts).pvalue > 1e-4
    assert stats.chisquare(np.bincount(passed, minlength=10)).pvalue > 1e-4
    task = Addition(digits=12)
    begins = [re.search("gp{8}", kinds(task.sample(9, 0, index), 2)).start() for index in range(400)]
    assert stats.chisquare(np.bincount(begins, minlength=4)).pvalue > 1e-4


def test_exchanging_the_digits_of_a_place_does_not_change_the_canonical_form():
    task, random = Addition(), np.random.default_rng(0)
    for index in range(20):
        problem = task.sample(4, 0, index)
        swap = random.integers(0, 2, 32)
        pairs = [(b, a) if s else (a, b) for a, b, s in zip(problem.first, problem.second, swap, strict=True)]
        other = Sum(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))
        assert task.canonical(other) == task.canonical(problem)
        assert task.reference(other).answer == task.reference(problem).answer
        assert task.canonical(Sum(problem.second, problem.first)) == task.canonical(problem)
    assert len({task.canonical(task.sample(4, 0, index)) for index in range(20)}) == 20


def test_a_sum_is_shown_from_its_least_digit():
    assert Addition(digits=3, base=10, train=(1,)).show(Sum((9, 9, 0), (1, 0, 5))) == (
        "<bos> 9 9 0 + 1 0 5 = _ _ _ _\n=> 0 0 6 0"
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"base": 1}, r"Addition.base must be from 2 to 10. Got 1"),
        ({"digits": 0}, r"Addition.digits must be at least 1. Got 0"),
        ({"digits": 3}, r"difficulty must be at most 3 for addition with digits=3. Got 4. Raise digits."),
    ],
)
def test_bad_options_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Addition(**fields)


def test_tokens_that_are_no_sum_are_refused():
    task = Addition(digits=2, train=(1,))
    tokens = task.example(Sum((1, 0), (1, 1))).tokens
    for place in range(len(tokens)):
        broken = tokens.copy()
        broken[place] = 2 if tokens[place] != 2 else 3
        with pytest.raises(ValueError, match=r"addition: tokens must be <bos>, 2 digits, \+, 2 digits, = and 3 places"):
            task.decode(broken)
