import itertools

import numpy as np
import pytest
from scipy import stats

from looplab.tasks.base import IGNORED
from looplab.tasks.modular import OPERATORS, Expression, Modular

TASK = Modular(operations=4)


def infix(items, modulus):
    """Fully bracketed, read from the left."""
    rest = iter(items)

    def part():
        item = next(rest)
        if item < modulus:
            return str(item)
        left = part()
        return f"({left}{OPERATORS[item - modulus]}{part()})"

    return part()


def all_expressions(operations, modulus):
    if operations == 0:
        yield from ((value,) for value in range(modulus))
        return
    for sign, left in itertools.product(range(3), range(operations)):
        for a in all_expressions(left, modulus):
            for b in all_expressions(operations - 1 - left, modulus):
                yield (modulus + sign, *a, *b)


def test_values_are_those_of_python():
    for difficulty in (1, 2, 4):
        for index in range(40):
            problem = TASK.sample(difficulty, 0, index)
            assert TASK.reference(problem).answer == eval(infix(problem.items, 23)) % 23


def test_an_operation_stands_before_its_operands():
    task = Modular(operations=3)
    minus, times, plus = 23 + 1, 23 + 2, 23 + 0
    problem = Expression((minus, times, 5, 7, plus, 11, 20))
    assert task.show(problem) == "<bos> <len_3> - * 5 7 + 11 20 <ans>\n=> 4"  # 35 - 31
    assert task.reference(problem).values == (((2, 5), (3, 7), (5, 11), (6, 20)), ((1, 12), (4, 8)), ((0, 4),))


def test_after_k_iterations_parts_of_height_k_are_known_where_they_end():
    task = Modular(operations=3)
    problem = Expression((23 + 1, 23 + 2, 5, 7, 23 + 0, 11, 20))
    none = IGNORED
    assert task.trace_labels(problem, 0).tolist() == [none, none, none, none, 5, 7, none, 11, 20, none]
    assert task.trace_labels(problem, 1).tolist() == [none, none, none, none, 5, 12, none, 11, 8, none]
    assert task.trace_labels(problem, 2).tolist() == [none, none, none, none, 5, 12, none, 11, 4, 4]


def test_chance_and_space_are_counted():
    task = Modular(modulus=3, operations=3)
    for operations in (1, 2, 3):
        every = list(all_expressions(operations, 3))
        assert len(set(every)) == task.space(operations)
    # The tree is not uniform among all: sizes of the left part are.
    law = {0: np.full(3, 1 / 3)}
    for operations in (1, 2):
        law[operations] = np.zeros(3)
        for sign, left in itertools.product(OPERATORS, range(operations)):
            for a, b in itertools.product(range(3), repeat=2):
                weight = law[left][a] * law[operations - 1 - left][b] / (3 * operations)
                law[operations][eval(f"{a}{sign}{b}") % 3] += weight
        assert task.chance(operations) == pytest.approx(law[operations].max())


def test_operations_numbers_and_splits_are_uniform():
    drawn = [TASK.sample(4, 0, index).items for index in range(600)]
    numbers = [item for items in drawn for item in items if item < 23]
    signs = [item - 23 for items in drawn for item in items if item >= 23]
    assert len(signs) == 4 * 600 and len(numbers) == 5 * 600
    assert stats.chisquare(np.bincount(numbers, minlength=23)).pvalue > 1e-4
    assert stats.chisquare(np.bincount(signs, minlength=3)).pvalue > 1e-4
    left = []
    for items in drawn:
        whole = TASK.parse(Expression(items))
        first = next(node for node in whole if node.begin == 1)
        left.append((first.end - first.begin) // 2)
    assert stats.chisquare(np.bincount(left, minlength=4)).pvalue > 1e-4


def mirrored(items, random, modulus=23):
    """The operands of some additions and multiplications exchanged."""
    rest = iter(items)

    def part():
        item = next(rest)
        if item < modulus:
            return [item]
        a, b = part(), part()
        commutes = OPERATORS[item - modulus] != "-"
        return [item, *(b + a if commutes and random.integers(2) else a + b)]

    return tuple(part())


def test_exchanging_operands_does_not_change_the_canonical_form():
    random, moved = np.random.default_rng(0), 0
    for index in range(60):
        problem = TASK.sample(4, 0, index)
        other = Expression(mirrored(problem.items, random))
        moved += other != problem
        assert TASK.canonical(other) == TASK.canonical(problem)
        assert TASK.reference(other).answer == TASK.reference(problem).answer
    assert moved > 20
    minus = Expression((24, 3, 4)), Expression((24, 4, 3))
    assert TASK.canonical(minus[0]) != TASK.canonical(minus[1])


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match=r"Modular.modulus must be at least 2. Got 1"):
        Modular(modulus=1)
    with pytest.raises(ValueError, match=r"Modular.operations must be at least 1. Got 0"):
        Modular(operations=0)
    with pytest.raises(ValueError, match=r"difficulty must be at most 4 for modular with operations=4. Got 5"):
        TASK.sample(5, 0, 0)
    tokens = TASK.example(Expression((24, 3, 4))).tokens.tolist()
    assert TASK.decode(np.array(tokens)) == Expression((24, 3, 4))
    for broken in (
        [1, *tokens[1:]],  # no <bos>
        [tokens[0], 3, *tokens[2:]],  # another length
        [*tokens[:-1], 0],  # no <ans>
        [*tokens[:2], *tokens[3:]],  # too many numbers
        [*tokens[:-2], 1],  # an operand is missing
        [*tokens[:3], 99, *tokens[4:]],
    ):
        with pytest.raises(ValueError, match=r"modular: tokens must be <bos>, <len_l>, a prefix expression"):
            TASK.decode(np.array(broken))
