import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from looplab.tasks import TASKS, window_targets
from looplab.tasks.base import to_torch
from looplab.tasks.state_tracking import ShorterWords, StateTracking, Word

GROUPS = ["swap_s5", "swap_s6", "s3", "s5", "a5", "z7", "z60"]


def product(task, word):
    """The state of a word, by permutations as functions: slot -> item, one operation after another."""
    if task.group.startswith("z"):
        return (sum(word) % int(task.group[1:]),)
    items = {slot: slot for slot in range(task.elements.shape[1])}
    for operation in word:
        move = {slot: int(source) for slot, source in enumerate(task.generators[operation])}
        items = {slot: items[move[slot]] for slot in items}
    return tuple(items[slot] for slot in sorted(items))


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("classes", [False, True])
def test_labels_are_the_products_of_the_prefixes(group, classes):
    task = StateTracking(group=group, classes=classes, train_length=6)
    tokens, labels = task.batch(6, 1, range(12), "train")
    for row in range(12):
        word = task.decode(tokens[row]).operations
        trace = task.reference(Word(word))
        for place in range(7):
            wanted = product(task, word[:place])
            assert trace.values[place] == wanted
            cells = np.atleast_1d(labels[row, place])
            found = tuple(task.elements[cells[0]]) if task.cells == 1 else tuple(cells)
            assert found == wanted
    assert trace.answer == trace.values[-1]


@pytest.mark.parametrize("group", GROUPS)
def test_an_item_alone_has_the_bytes_it_has_in_a_batch(group):
    task = StateTracking(group=group)
    tokens, labels = task.batch(8, 3, [5, 2, 2**40], "train")
    for row, index in enumerate((5, 2, 2**40)):
        example = task.example(task.sample(8, 3, index, "train"))
        assert example.tokens.tobytes() == tokens[row].tobytes()
        assert example.labels.tobytes() == labels[row].tobytes()


@pytest.mark.parametrize("group", ["swap_s5", "a5", "z7"])
@pytest.mark.parametrize("classes", [False, True])
def test_iteration_k_knows_the_last_k_operations(group, classes):
    task = StateTracking(group=group, classes=classes)
    tokens, labels = task.batch(5, 0, range(20))
    targets = window_targets(task, to_torch(tokens), 7)
    for row, place, k in itertools.product(range(20), range(6), range(8)):
        word = task.decode(tokens[row]).operations[:place]
        wanted = product(task, word[max(0, place - k) :])
        cells = targets[k][row, place].reshape(-1).tolist()
        assert (tuple(task.elements[cells[0]]) if task.cells == 1 else tuple(cells)) == wanted
    assert torch.equal(targets[5], to_torch(labels))
    assert torch.equal(targets[7], targets[5])


def test_replayed_values_advance_by_the_same_rule():
    task = StateTracking()
    generator = np.random.default_rng(0)
    tokens, _ = task.batch(6, 0, range(30))
    start = task.elements[generator.integers(0, 120, (30, 7))]
    start[:, 0] = task.elements[0]
    values = window_targets(task, to_torch(tokens), 3, to_torch(start))
    for row, place in itertools.product(range(30), range(1, 7)):
        for k in range(1, 4):
            source = place - k
            items = tuple(start[row, source]) if source > 0 else tuple(range(5))
            for operation in task.decode(tokens[row]).operations[max(0, source) : place]:
                items = tuple(items[i] for i in task.generators[operation])
            assert tuple(values[k][row, place].tolist()) == items


@pytest.mark.parametrize("length", [1, 3, 8])
@pytest.mark.parametrize("identity", [False, True])
def test_renaming_slots_does_not_change_the_split(length, identity):
    task = StateTracking(identity=identity)
    random = np.random.default_rng(length)
    pairs = list(itertools.combinations(range(5), 2))
    number = {frozenset(pair): i for i, pair in enumerate(pairs)}
    distinct = set()
    for _ in range(300):
        word = random.integers(0, len(task.generators), length)
        names = random.permutation(5)
        renamed = [o if o == len(pairs) else number[frozenset(names[list(pairs[o])].tolist())] for o in word]
        canonical = task.canonical(Word(tuple(int(o) for o in word)))
        assert canonical == task.canonical(Word(tuple(int(o) for o in renamed)))
        distinct.add(canonical)
    assert len(distinct) > 1 or length == 1


def test_canonical_forms_are_as_many_as_words_up_to_renaming():
    task = StateTracking(group="swap_s3")
    pairs = list(itertools.combinations(range(3), 2))
    orbits = set()
    for word in itertools.product(range(3), repeat=4):
        images = [
            tuple(pairs.index(tuple(sorted(names[s] for s in pairs[o]))) for o in word)
            for names in itertools.permutations(range(3))
        ]
        orbits.add(min(images))
    assert len({task.canonical(Word(w)) for w in itertools.product(range(3), repeat=4)}) == len(orbits)


def test_generators_are_uniform():
    tokens, _ = StateTracking().batch(8, 0, range(500), "train")
    assert stats.chisquare(np.bincount(tokens[:, 1:].ravel(), minlength=11)[1:]).pvalue > 1e-4


def test_chance_knows_that_swaps_alternate_parity():
    assert StateTracking().chance(8) == pytest.approx(1 / 60)
    assert StateTracking(identity=True).chance(8) == pytest.approx(1 / 120)
    assert StateTracking(group="a5").chance(8) == pytest.approx(1 / 60)
    assert StateTracking(group="z60").chance(512) == pytest.approx(1 / 60)


def test_the_first_items_of_this_version_never_change():
    tokens, _ = StateTracking().batch(8, 0, range(2), "train")
    assert tokens.tolist() == [[0, 10, 8, 10, 2, 6, 4, 3, 10], [0, 2, 3, 3, 7, 8, 7, 5, 5]]


def test_it_is_registered_and_shows_itself():
    task = TASKS["state_tracking"]()
    text = task.show(Word((0, 4)))
    assert text == "<bos> (01) (12)\n=> 1 2 0 3 4"
    assert task.length(8) == len(task.example(task.sample(8, 0, 0)).tokens) == 9


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"group": "q8"}, r"StateTracking.group must be swap_s<n>.* Got 'q8'"),
        ({"group": "s9"}, r"n = 2..6.* Got 's9'"),
        ({"group": "z7", "identity": True}, r"StateTracking.identity is for swap groups"),
        ({"train_length": 0}, r"train_length must be at least 1. Got 0."),
    ],
)
def test_bad_options_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        StateTracking(**fields)


@pytest.mark.parametrize("tokens", [[], [1, 2], [0, 11], [0, 0]])
def test_tokens_that_state_no_word_are_refused(tokens):
    with pytest.raises(ValueError, match="tokens must be <bos> and then generators 1..10"):
        StateTracking().decode(np.array(tokens, np.int64))


def test_shorter_words_are_trained_too_and_tested_as_far():
    task = ShorterWords(train_length=3)
    assert task.train_difficulties == (1, 2, 3)
    assert task.test_difficulties == (1, 2, 3, 6, 12, 24, 48)
    plain, word = StateTracking(train_length=3), task.sample(3, 0, 0)
    assert task.split(3, word) == plain.split(3, word)
    assert (task.example(word).labels == plain.example(word).labels).all()
