import itertools

import numpy as np
import pytest
from scipy import stats

from looplab.tasks.pointer_chase import Chase, PointerChase

TASKS = [PointerChase(nodes=6), PointerChase(nodes=6, map="permutation")]


@pytest.mark.parametrize("task", TASKS)
def test_hops_are_powers_of_the_matrix(task):
    for index, hops in itertools.product(range(8), (1, 2, 5, 17)):
        problem = task.sample(hops, 0, index)
        matrix = np.eye(6, dtype=int)[list(problem.pointers)]
        for k, node in enumerate(task.reference(problem).values):
            assert np.linalg.matrix_power(matrix, k)[problem.start, node] == 1
            assert task.trace_labels(problem, k)[-1] == node
        assert k == hops == problem.hops


@pytest.mark.parametrize("task", TASKS)
def test_every_pointer_and_start_is_uniform(task):
    drawn = [task.sample(3, 0, index) for index in range(400)]
    for place in range(6):
        assert stats.chisquare(np.bincount([d.pointers[place] for d in drawn], minlength=6)).pvalue > 1e-4
    assert stats.chisquare(np.bincount([d.start for d in drawn], minlength=6)).pvalue > 1e-4
    repeats = [len(set(d.pointers)) < 6 for d in drawn]
    assert not any(repeats) if task.map == "permutation" else sum(repeats) > 350


@pytest.mark.parametrize("task", TASKS)
def test_renaming_nodes_does_not_change_the_canonical_form(task):
    random = np.random.default_rng(0)
    for index in range(80):
        problem = task.sample(3, 0, index)
        names = random.permutation(6).tolist()
        pointers = [0] * 6
        for node, target in enumerate(problem.pointers):
            pointers[names[node]] = names[target]
        assert task.canonical(Chase(tuple(pointers), names[problem.start], 9)) == task.canonical(problem)


def test_canonical_forms_are_as_many_as_maps_up_to_renaming():
    task, forms, orbits = PointerChase(nodes=4), set(), set()
    for pointers in itertools.product(range(4), repeat=4):
        for start in range(4):
            forms.add(task.canonical(Chase(pointers, start, 1)))
            images = []
            for names in itertools.permutations(range(4)):
                back = {name: node for node, name in enumerate(names)}
                images.append((names[start], tuple(names[pointers[back[name]]] for name in range(4))))
            orbits.add(min(images))
    assert len(forms) == len(orbits)


def test_the_hops_stand_in_digits_so_length_does_not_change():
    task = PointerChase(nodes=6)
    assert task.show(Chase((1, 2, 3, 4, 5, 0), 2, 27)).endswith("| n2 x 0 2 7 =\n=> n5")
    assert {task.length(hops) for hops in task.test_difficulties} == {len(task.example(task.sample(64, 0, 0)).tokens)}


def test_spaces_are_counted():
    assert PointerChase(nodes=4).space(1) == 4**4 * 4
    assert PointerChase(nodes=4, map="permutation").space(1) == 24 * 4


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match=r"PointerChase.nodes must be at least 2. Got 1"):
        PointerChase(nodes=1)
    with pytest.raises(ValueError, match=r"difficulty must be below 1000 for pointer_chase, whose hops have 3 digits"):
        PointerChase().sample(1000, 0, 0)
    task = PointerChase(nodes=3)
    tokens = task.example(Chase((0, 1, 2), 0, 5)).tokens
    for place in range(len(tokens)):
        broken = tokens.copy()
        broken[place] = 0 if place else 1
        with pytest.raises(ValueError, match=r"pointer_chase: tokens must be <bos>, 3 nodes, \|, a node, x, 3 digits"):
            task.decode(broken)
