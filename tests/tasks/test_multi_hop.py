import itertools

import numpy as np
import pytest
from scipy import stats

from looplab.tasks.multi_hop import MultiHop, Question

TASK = MultiHop(layers=4, entities=10, relations=5)


def facts_of(task):
    """(entity, relation) -> entity, read off all questions of one hop."""
    found = {}
    for entity, relation in itertools.product(range((task.layers - 1) * task.entities), range(task.relations)):
        tokens = task.example(Question(entity, (relation,)))
        found[entity, relation] = int(tokens.labels[-1])
    return found


def test_hops_follow_the_facts():
    facts = facts_of(TASK)
    for hops in (1, 2, 3):
        for index in range(40):
            question = TASK.sample(hops, 0, index)
            at = question.entity
            for k, relation in enumerate(question.relations):
                assert TASK.trace_labels(question, k)[-1] == at
                at = facts[at, relation]
            assert TASK.reference(question).answer == at
            assert at // 10 == question.entity // 10 + hops


def test_a_relation_maps_every_layer_to_the_next_at_random():
    facts = MultiHop().facts
    assert facts.shape == (4, 20, 100)
    assert stats.chisquare(np.bincount(facts.ravel(), minlength=100)).pvalue > 1e-4
    assert len({row.tobytes() for layer in facts for row in layer}) == 80
    assert (MultiHop(world=1).facts != facts).mean() > 0.9


def test_questions_are_uniform():
    drawn = [TASK.sample(2, 0, index) for index in range(600)]
    assert stats.chisquare(np.bincount([q.entity for q in drawn], minlength=20)).pvalue > 1e-4
    assert stats.chisquare(np.bincount([r for q in drawn for r in q.relations], minlength=5)).pvalue > 1e-4
    assert {len(q.relations) for q in drawn} == {2}


def test_facts_are_all_for_training_and_compositions_are_not():
    task = MultiHop()
    assert task.space(1) == 8000 and task.space(2) == 120_000
    assert {task.split(1, task.sample(1, 0, index)) for index in range(200)} == {"train"}
    splits = [task.split(2, task.sample(2, 0, index)) for index in range(400)]
    assert 0.7 < splits.count("train") / 400 < 0.9 and set(splits) == {"train", "validation", "test"}
    assert {task.split(3, task.sample(3, 0, index)) for index in range(20)} == {"test"}
    assert MultiHop(train=(1, 2, 3)).test_difficulties == (1, 2, 3, 4)


def test_the_check_knows_where_an_answer_can_come_from():
    question = TASK.sample(2, 0, 0)
    answer = TASK.reference(question).answer
    right = [entity for entity in range(40) if TASK.verify(question, np.array([entity]))]
    assert right == [answer]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": 1}, r"MultiHop.layers must be at least 2. Got 1"),
        ({"entities": 0}, r"MultiHop.entities must be at least 1. Got 0"),
        ({"train": (2,)}, r"MultiHop.train must contain 1"),
        ({"train": (1, 5)}, r"difficulty must be below 5 for multi_hop with layers=5. Got 5"),
    ],
)
def test_bad_options_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        MultiHop(**fields)


@pytest.mark.parametrize("tokens", [[0, 1], [1, 1, 41], [0, 31, 41], [0, 1, 40], [0, 1, 46], [0, 21, 41, 41]])
def test_tokens_that_are_no_question_are_refused(tokens):
    with pytest.raises(ValueError, match=r"multi_hop: tokens must be <bos>, an entity and relations"):
        TASK.decode(np.array(tokens))


def test_an_entity_may_be_as_late_as_its_relations_allow():
    assert TASK.decode(np.array([0, 30, 41])) == Question(29, (0,))
    assert TASK.decode(np.array([0, 20, 41, 42])) == Question(19, (0, 1))
