import itertools
import math
from collections import Counter

import numpy as np
import pytest
from scipy import stats

from looplab.tasks.pointer_stream import Chases, PointerStream


def test_places_of_a_start_are_one_hop_apart():
    task = PointerStream(nodes=5)
    for index, hops in itertools.product(range(6), (1, 2, 7)):
        problem = task.sample(hops, 0, index)
        example = task.example(problem)
        assert (example.labels[: example.answer.start] == -100).all()
        chains = example.labels[example.answer].reshape(5, hops)
        for start, chain in zip(problem.starts, chains.tolist(), strict=True):
            assert chain[0] == problem.pointers[start]
            assert all(problem.pointers[a] == b for a, b in itertools.pairwise(chain))
        for k in range(hops + 2):
            seen = task.trace_labels(problem, k)[example.answer].reshape(5, hops)
            wanted = (
                chains
                if k >= hops
                else np.concatenate(
                    [
                        chains[:, :k],
                        np.repeat(chains[:, k - 1 : k] if k else np.array(problem.starts)[:, None], hops - k, 1),
                    ],
                    axis=1,
                )
            )
            assert (seen == wanted).all(), k


def test_every_pointer_and_every_order_of_starts_is_uniform():
    task = PointerStream(nodes=6)
    drawn = [task.sample(3, 0, index) for index in range(400)]
    for place, name in itertools.product(range(6), ("pointers", "starts")):
        found = np.bincount([getattr(d, name)[place] for d in drawn], minlength=6)
        assert stats.chisquare(found).pvalue > 1e-4, (place, name)
    assert all(sorted(d.pointers) == sorted(d.starts) == list(range(6)) for d in drawn)


def test_renaming_nodes_does_not_change_the_canonical_form():
    task, random = PointerStream(nodes=6), np.random.default_rng(0)
    for index in range(50):
        problem = task.sample(3, 0, index)
        names = random.permutation(6).tolist()
        pointers = [0] * 6
        for node, target in enumerate(problem.pointers):
            pointers[names[node]] = names[target]
        renamed = Chases(tuple(pointers), tuple(names[node] for node in problem.starts), 9)
        assert task.canonical(renamed) == task.canonical(problem)


def test_canonical_forms_are_as_many_as_the_space_says():
    task, every = PointerStream(nodes=4), list(itertools.permutations(range(4)))
    forms = {task.canonical(Chases(pointers, starts, 1)) for pointers in every for starts in every}
    assert len(forms) == math.factorial(4) == task.space(1)


@pytest.mark.parametrize("hops", [1, 2, 4])
def test_no_answer_comes_more_often_than_chance_says(hops):
    task, every = PointerStream(nodes=3), list(itertools.permutations(range(3)))
    answers = Counter(task.reference(Chases(f, s, hops)).answer for f in every for s in every)
    assert max(answers.values()) / answers.total() == pytest.approx(task.chance(hops))


def test_a_problem_in_words():
    task = PointerStream(nodes=3)
    shown = task.show(Chases((1, 2, 0), (2, 0, 1), 2))
    assert shown == "<bos> n1 n2 n0 | n2 ? n0 ? n1 ?\n=> n0 n1 n1 n2 n2 n0"


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match=r"PointerStream.nodes must be at least 2. Got 1"):
        PointerStream(nodes=1)
    task = PointerStream(nodes=3)
    tokens = task.example(Chases((0, 1, 2), (2, 1, 0), 2)).tokens
    for place in range(len(tokens)):
        broken = tokens.copy()
        broken[place] = 0 if place else 1
        with pytest.raises(ValueError, match=r"pointer_stream: tokens must be <bos>, a permutation of 3 nodes, \| and"):
            task.decode(broken)
