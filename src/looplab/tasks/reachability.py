"""Reachability in a directed graph given as a list of edges.

    S_0 = {source},   S_k = S_{k-1} and all that one edge leads to from there;   "=" answers whether the target is in

    <bos> u v  u v  .. ? source target | n0 n1 .. =

The answer is yes in half of the problems: then the shortest path has exactly d edges. In the others a shortest path of
d - 1 edges leads from the source elsewhere, and one edge to the target from a node that the source does not reach: as
many edges are planted, and as deep a search is needed. All graphs have equally many edges; further ones are drawn at
random, and those that would change the answer or shorten the path are left out. The listed nodes have room for S_k
(`trace_labels`).

Reference: Merrill, Sabharwal, "A Little Depth Goes a Long Way: The Expressive Power of Log-Depth Transformers",
arXiv:2503.03961 (graph connectivity as a measure of depth). Deviation: the planting is ours.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from looplab.tasks.base import IGNORED, TASKS, Draws, Example, Task, Trace, check_trained

MARKS = ("<bos>", "?", "|", "=")
BOS, ASK, BAR, EQUALS = range(len(MARKS))
NO, YES = 0, 1
PATIENCE = 40
"""Batches of random edges until the graph is begun anew."""


@dataclass(frozen=True)
class Graph:
    """Edges in the order they are listed, and what is asked."""

    edges: tuple[tuple[int, int], ...]
    source: int
    target: int


@TASKS.register("reachability")
@dataclass(frozen=True, kw_only=True)
class Reachability(Task):
    """Whether a path leads from one node to another."""

    reference_paper = "arXiv:2503.03961"
    nodes: int = 16
    """Of every graph."""
    edges: int = 32
    """Of every graph."""
    train: tuple[int, ...] = (2, 3, 4)
    """Lengths of the shortest path to train at; tests go to three times the largest."""

    def __post_init__(self) -> None:
        if self.nodes < 3:
            raise ValueError(f"Reachability.nodes must be at least 3. Got {self.nodes}. 16 is usual.")
        check_trained(self, self.train)
        most = self.nodes * (self.nodes - 1) // 4
        if not max(self.train) <= self.edges <= most:
            raise ValueError(
                f"Reachability.edges must be from {max(self.train)}, the longest path, to {most}, half of all. "
                f"Got {self.edges}. Twice the nodes is usual."
            )

    def check(self, difficulty: int) -> None:
        """Refuses paths that leave no node unreached."""
        super().check(difficulty)
        most = min(self.nodes - 2, self.edges)
        if difficulty > most:
            raise ValueError(
                f"difficulty must be at most {most} for {self.name} with nodes={self.nodes}, edges={self.edges}. "
                f"Got {difficulty}. Raise nodes."
            )

    @property
    def tokens(self) -> tuple[str, ...]:
        return (*MARKS, *(f"n{node}" for node in range(self.nodes)))

    symbols = ("no", "yes")  # type: ignore[assignment]

    @property
    def train_difficulties(self) -> tuple[int, ...]:
        return self.train

    @property
    def test_difficulties(self) -> tuple[int, ...]:
        longest = max(self.train)
        further = {3 * longest // 2, 2 * longest, 3 * longest}
        return tuple(sorted({*self.train, *(d for d in further if d <= min(self.nodes - 2, self.edges))}))

    def length(self, difficulty: int) -> int:
        return 2 * self.edges + self.nodes + 6

    def chance(self, difficulty: int) -> float:
        return 0.5

    def draw(self, difficulty: int, draws: Draws) -> Graph:
        while True:
            order = draws.permutation(self.nodes)
            source, target = order[0], order[difficulty]
            path = list(zip(order[:difficulty], order[1 : difficulty + 1], strict=True))
            limits = {target: difficulty}
            if not draws.chance(0.5):
                path[-1] = (order[difficulty + 1], target)
                limits = {target: 2 * self.nodes, order[difficulty - 1]: difficulty - 1}
            edges = self._filled(path, source, limits, draws)
            if len(edges) == self.edges:
                listed = list(edges)
                return Graph(tuple(listed[i] for i in draws.permutation(self.edges)), source, target)

    def canonical(self, problem: Graph) -> bytes:
        """The graph up to renaming of nodes and the order of edges, as far as refining colours tells nodes apart."""
        out: list[list[int]] = [[] for _ in range(self.nodes)]
        into: list[list[int]] = [[] for _ in range(self.nodes)]
        for u, v in problem.edges:
            out[u].append(v)
            into[v].append(u)
        colours = [2 * (node == problem.source) + (node == problem.target) for node in range(self.nodes)]
        while True:
            seen = [
                (colours[n], sorted(colours[v] for v in out[n]), sorted(colours[u] for u in into[n]))
                for n in range(self.nodes)
            ]
            kinds = sorted({repr(kind) for kind in seen})
            if len(kinds) == len(set(colours)):
                return repr(sorted(map(repr, seen))).encode()
            colours = [kinds.index(repr(kind)) for kind in seen]

    def example(self, problem: Graph) -> Example:
        first = len(MARKS)
        listed = [first + node for edge in problem.edges for node in edge]
        asked = [ASK, first + problem.source, first + problem.target, BAR]
        tokens = np.array([BOS, *listed, *asked, *range(first, first + self.nodes), EQUALS], np.int64)
        labels = np.full(len(tokens), IGNORED, np.int64)
        labels[-1] = self.reference(problem).answer
        return Example(tokens=tokens, labels=labels, answer=slice(len(tokens) - 1, len(tokens)))

    def trace_labels(self, problem: Graph, k: int) -> NDArray[np.int64]:
        """At every listed node whether k steps reach it, and at the answer whether they reach the target."""
        values = self.reference(problem).values
        reached = values[min(k, len(values) - 1)]
        labels = np.full(self.length(1), IGNORED, np.int64)
        labels[-self.nodes - 1 : -1] = [node in reached for node in range(self.nodes)]
        labels[-1] = problem.target in reached
        return labels

    def decode(self, tokens: NDArray[np.int64]) -> Graph:
        word, first, e = [int(t) for t in tokens], len(MARKS), 2 * self.edges
        tail = [BAR, *range(first, first + self.nodes), EQUALS]
        listed = word[1 : e + 1] + word[e + 2 : e + 4]
        legal = len(word) == self.length(1) and [word[0], word[e + 1], *word[e + 4 :]] == [BOS, ASK, *tail]
        if not (legal and all(first <= t < first + self.nodes for t in listed)):
            raise ValueError(
                f"reachability: tokens must be <bos>, {self.edges} edges, ?, two nodes, |, all nodes and =. "
                f"Got {word}. Write them so."
            )
        nodes = [t - first for t in listed]
        edges = tuple((nodes[i], nodes[i + 1]) for i in range(0, e, 2))
        return Graph(edges, nodes[-2], nodes[-1])

    def reference(self, problem: Graph) -> Trace:
        """Step by step, until a step reaches nothing new."""
        values = [frozenset([problem.source])]
        while True:
            after = values[-1] | {v for u, v in problem.edges if u in values[-1]}
            if after == values[-1]:
                return Trace(tuple(values), YES if problem.target in after else NO)
            values.append(after)

    def verify(self, problem: Graph, predicted: NDArray[np.int64]) -> bool:
        """The transitive closure of all pairs, by Warshall's rule."""
        reach = np.eye(self.nodes, dtype=bool)
        for u, v in problem.edges:
            reach[u, v] = True
        for between in range(self.nodes):
            reach |= reach[:, between, None] & reach[None, between]
        return predicted.tolist() == [int(reach[problem.source, problem.target])]

    def _filled(
        self, path: list[tuple[int, int]], source: int, limits: dict[int, int], draws: Draws
    ) -> dict[tuple[int, int], None]:
        """The edges of `path`, and random ones until there are enough; none brings a node nearer than its limit.

        Twice the nodes stands for "not at all": no path has so many edges.
        """
        edges: dict[tuple[int, int], None] = {}
        out: list[list[int]] = [[] for _ in range(self.nodes)]
        into: list[list[int]] = [[] for _ in range(self.nodes)]
        far = [2 * self.nodes] * self.nodes
        after, before = list(far), {node: list(far) for node in limits}  # steps from the source, and to those nodes
        _nearer(after, out, source, 0)
        for node, steps in before.items():
            _nearer(steps, into, node, 0)

        def add(u: int, v: int) -> None:
            edges[u, v] = None
            out[u].append(v)
            into[v].append(u)
            _nearer(after, out, v, after[u] + 1)
            for steps in before.values():
                _nearer(steps, into, u, steps[v] + 1)

        for u, v in path:
            add(u, v)
        for _ in range(PATIENCE):
            for u, v in draws.integers(self.nodes, 2 * self.edges).reshape(-1, 2).tolist():
                spoils = any(after[u] + 1 + before[node][v] < limit for node, limit in limits.items())
                if u != v and not spoils and (u, v) not in edges and len(edges) < self.edges:
                    add(u, v)
            if len(edges) == self.edges:
                break
        return edges


def _nearer(steps: list[int], neighbours: list[list[int]], node: int, found: int) -> None:
    """Notes that a node is `found` steps away, and what follows for those after it."""
    if found < steps[node]:
        steps[node] = found
        for other in neighbours[node]:
            _nearer(steps, neighbours, other, found + 1)
