import itertools

import numpy as np
import pytest
from scipy import stats

from looplab.tasks.reachability import Graph, Reachability

TASK = Reachability()
SMALL = Reachability(nodes=4, edges=3, train=(2,))


def distances(problem, nodes):
    """Floyd and Warshall."""
    far = np.full((nodes, nodes), np.inf)
    np.fill_diagonal(far, 0)
    for u, v in problem.edges:
        far[u, v] = min(far[u, v], 1)
    for k in range(nodes):
        far = np.minimum(far, far[:, k, None] + far[None, k])
    return far


@pytest.mark.parametrize("length", [1, 2, 4, 12])
def test_the_target_is_as_far_as_the_difficulty_or_out_of_reach(length):
    answers = []
    for index in range(24):
        problem = TASK.sample(length, 0, index)
        far, answer = distances(problem, 16)[problem.source], TASK.reference(problem).answer
        assert far[problem.target] == (length if answer else np.inf)
        assert answer or (far[np.isfinite(far)].max() >= length - 1)
        assert len(set(problem.edges)) == len(problem.edges) == 32 and all(u != v for u, v in problem.edges)
        answers.append(answer)
        for k, reached in enumerate(TASK.reference(problem).values):
            assert reached == {node for node in range(16) if far[node] <= k}
            labels = TASK.trace_labels(problem, k)
            assert labels[-17:-1].tolist() == [node in reached for node in range(16)]
            assert labels[-1] == (problem.target in reached)
    assert 4 < sum(answers) < 20


def test_answers_nodes_and_order_are_uniform():
    drawn = [TASK.sample(3, 0, index) for index in range(200)]
    assert stats.chisquare(np.bincount([TASK.reference(g).answer for g in drawn])).pvalue > 1e-4
    assert stats.chisquare(np.bincount([g.source for g in drawn], minlength=16)).pvalue > 1e-4
    assert stats.chisquare(np.bincount([g.target for g in drawn], minlength=16)).pvalue > 1e-4
    assert stats.chisquare(np.bincount([n for g in drawn for n in g.edges[0]], minlength=16)).pvalue > 1e-4
    place = [next((i for i, e in enumerate(g.edges) if e[1] == g.target), 0) for g in drawn]
    assert np.mean(place) > 5, "the planted edges are listed first"


def test_renaming_nodes_and_the_order_of_edges_do_not_change_the_canonical_form():
    random, distinct = np.random.default_rng(0), set()
    for index in range(24):
        problem = TASK.sample(4, 0, index)
        names, order = random.permutation(16).tolist(), random.permutation(32)
        edges = tuple((names[u], names[v]) for u, v in (problem.edges[i] for i in order))
        renamed = Graph(edges, names[problem.source], names[problem.target])
        assert TASK.canonical(renamed) == TASK.canonical(problem)
        distinct.add(TASK.canonical(problem))
    assert len(distinct) == 24


def test_small_graphs_that_differ_have_canonical_forms_that_differ():
    forms, orbits = set(), set()
    for edges in itertools.combinations(itertools.permutations(range(4), 2), 3):
        forms.add(SMALL.canonical(Graph(edges, 0, 1)))
        images = []
        for rest in itertools.permutations((2, 3)):
            names = (0, 1, *rest)
            images.append(tuple(sorted((names[u], names[v]) for u, v in edges)))
        orbits.add(min(images))
    assert len(forms) == len(orbits)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"nodes": 2}, r"Reachability.nodes must be at least 3. Got 2"),
        ({"edges": 61}, r"Reachability.edges must be from 4, the longest path, to 60, half of all. Got 61"),
        ({"train": (15,)}, r"difficulty must be at most 14 for reachability with nodes=16, edges=32. Got 15"),
    ],
)
def test_bad_options_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Reachability(**fields)


def test_tokens_that_are_no_graph_are_refused():
    problem = SMALL.sample(2, 0, 0)
    tokens = SMALL.example(problem).tokens
    assert SMALL.decode(tokens) == problem
    for place in range(len(tokens)):
        broken = tokens.copy()
        broken[place] = 1 if tokens[place] != 1 else 2
        with pytest.raises(ValueError, match=r"reachability: tokens must be <bos>, 3 edges, \?, two nodes"):
            SMALL.decode(broken)
