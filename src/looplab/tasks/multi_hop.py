"""Questions of several hops over facts that stand nowhere in the prompt: they are learned as questions of one hop.

    world:      layers of entities; relation r maps every entity of layer i to one of layer i + 1, at random
    question:   <bos> entity r_1 .. r_h;        the last relation's position answers r_h( .. r_1(entity))

All questions of one hop (the facts) are for training. Of the trained numbers of hops the test has compositions that
were never asked, of facts that were; of further numbers all compositions are new.

Reference: Yao et al., "Language models can learn implicit multi-hop reasoning", arXiv:2505.17923 (layers of entities,
random relations). Deviations: tokens instead of sentences; sizes as options.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from looplab.recurrence.philox import stream_key
from looplab.tasks.base import IGNORED, TASKS, Draws, Example, Task, Trace, check_trained

BOS = 0


@dataclass(frozen=True)
class Question:
    """An entity (numbered over all layers) and the relations to follow."""

    entity: int
    relations: tuple[int, ...]


@TASKS.register("multi_hop")
@dataclass(frozen=True, kw_only=True)
class MultiHop(Task):
    """The entity that a chain of relations leads to."""

    reference_paper = "arXiv:2505.17923"
    layers: int = 5
    """Of entities; a relation leads from one to the next."""
    entities: int = 100
    """Per layer."""
    relations: int = 20
    """Maps from every layer to the next."""
    world: int = 0
    """Number of the world: other facts."""
    train: tuple[int, ...] = (1, 2)
    """Numbers of hops to train at; tests have one more, and those of training."""

    def __post_init__(self) -> None:
        for name in ("layers", "entities", "relations"):
            least = 2 if name == "layers" else 1
            if getattr(self, name) < least:
                raise ValueError(f"MultiHop.{name} must be at least {least}. Got {getattr(self, name)}. Raise it.")
        check_trained(self, self.train)
        if 1 not in self.train:
            raise ValueError(f"MultiHop.train must contain 1: the facts are learned so. Got {self.train}. Add 1.")

    def check(self, difficulty: int) -> None:
        """Refuses more hops than layers allow."""
        super().check(difficulty)
        if difficulty >= self.layers:
            raise ValueError(
                f"difficulty must be below {self.layers} for {self.name} with layers={self.layers}. "
                f"Got {difficulty}. Raise layers."
            )

    @cached_property
    def facts(self) -> NDArray[np.int64]:
        """[layer, relation, entity of the layer] -> entity of the next layer."""
        key = stream_key(self.world, f"multi_hop:{self.layers}:{self.entities}:{self.relations}")
        count = (self.layers - 1) * self.relations * self.entities
        return Draws(key, 0).integers(self.entities, count).reshape(self.layers - 1, self.relations, self.entities)

    @cached_property
    def tokens(self) -> tuple[str, ...]:
        return ("<bos>", *self.symbols, *(f"r{relation}" for relation in range(self.relations)))

    @cached_property
    def symbols(self) -> tuple[str, ...]:
        return tuple(f"e{layer}.{entity}" for layer in range(self.layers) for entity in range(self.entities))

    @property
    def train_difficulties(self) -> tuple[int, ...]:
        return self.train

    @property
    def test_difficulties(self) -> tuple[int, ...]:
        return tuple(sorted({*self.train, min(max(self.train) + 1, self.layers - 1)}))

    def length(self, difficulty: int) -> int:
        return difficulty + 2

    def space(self, difficulty: int) -> float:
        return float((self.layers - difficulty) * self.entities * self.relations**difficulty)

    def held_out(self, difficulty: int) -> bool:
        """No fact is kept from training."""
        return difficulty > 1 and super().held_out(difficulty)

    def chance(self, difficulty: int) -> float:
        """For a guess that knows the layer."""
        return 1 / self.entities

    def draw(self, difficulty: int, draws: Draws) -> Question:
        entity = draws.integer((self.layers - difficulty) * self.entities)
        return Question(entity, tuple(draws.integers(self.relations, difficulty).tolist()))

    def canonical(self, problem: Question) -> bytes:
        """The question itself: every entity has facts of its own."""
        return np.array([problem.entity, *problem.relations], "<u4").tobytes()

    def example(self, problem: Question) -> Example:
        first = 1 + len(self.symbols)
        tokens = np.array([BOS, 1 + problem.entity, *(first + r for r in problem.relations)], np.int64)
        labels = np.full(len(tokens), IGNORED, np.int64)
        labels[-1] = self.reference(problem).answer
        return Example(tokens=tokens, labels=labels, answer=slice(len(tokens) - 1, len(tokens)))

    def trace_labels(self, problem: Question, k: int) -> NDArray[np.int64]:
        """At the last position the entity after k hops."""
        example, values = self.example(problem), self.reference(problem).values
        example.labels[-1] = values[min(k, len(values) - 1)]
        return example.labels

    def decode(self, tokens: NDArray[np.int64]) -> Question:
        word, first = [int(t) for t in tokens], 1 + len(self.symbols)
        legal = len(word) > 2 and word[0] == BOS and 1 <= word[1] < first - self.entities * (len(word) - 2)
        if not (legal and all(first <= t < len(self.tokens) for t in word[2:])):
            raise ValueError(
                f"multi_hop: tokens must be <bos>, an entity and relations up to the last layer. Got {word}. "
                "Write them so."
            )
        return Question(word[1] - 1, tuple(t - first for t in word[2:]))

    def reference(self, problem: Question) -> Trace:
        """One relation after the other."""
        values = [problem.entity]
        for relation in problem.relations:
            layer, entity = divmod(values[-1], self.entities)
            values.append((layer + 1) * self.entities + int(self.facts[layer, relation, entity]))
        return Trace(tuple(values), values[-1])

    def verify(self, problem: Question, predicted: NDArray[np.int64]) -> bool:
        """Backwards: the entities from which the relations lead to the predicted one contain the question's."""
        layer, entity = divmod(int(predicted[0]), self.entities)
        sources = {entity}
        for relation in reversed(problem.relations):
            layer -= 1
            if not 0 <= layer < self.layers - 1:
                return False
            sources = {e for e, target in enumerate(self.facts[layer, relation].tolist()) if target in sources}
        return divmod(problem.entity, self.entities) in {(layer, source) for source in sources}
