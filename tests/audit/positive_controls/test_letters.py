"""Documents whose law is known."""

import numpy as np

import tolerances
from looplab.audit.positive_controls.letters import Chain, Letters, document_set


def test_letters_are_read_as_they_were_written():
    letters = Letters(120)
    ids = list(range(120))
    assert letters.encode(letters.decode(ids)) == ids
    assert letters.encode_all(["", letters.decode([5, 5])]) == [[], [5, 5]]


def test_no_two_letters_are_the_same_document():
    keys = {document.content_key for document in document_set("x", [([i], [i]) for i in range(120)]).documents}
    assert len(keys) == 120


def test_the_stationary_law_stays_as_it_is():
    chain = Chain.drawn(3)
    np.testing.assert_allclose(chain.stationary @ chain.moves, chain.stationary, **tolerances.SCORES)


def test_documents_follow_the_chain_to_sampling_error():
    chain = Chain.drawn(0, size=6)
    counts = np.zeros((6, 6))
    firsts = np.zeros(6)
    for document in chain.documents(0, count=2000).documents:
        ids = Letters(6).encode(document.text)
        firsts[ids[0]] += 1
        np.add.at(counts, (ids[:-1], ids[1:]), 1)
    seen = counts.sum(axis=1, keepdims=True)
    error = np.sqrt(chain.moves * (1 - chain.moves) / seen)
    assert (abs(counts / seen - chain.moves) < 4.5 * error).all()
    law = chain.stationary
    assert (abs(firsts / 2000 - law) < 4.5 * np.sqrt(law * (1 - law) / 2000)).all()


def test_a_seed_draws_the_same_documents_again_and_another_seed_others():
    chain = Chain.drawn(0)
    texts = [[document.text for document in chain.documents(seed, count=5).documents] for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert len({len(text) for text in texts[0]}) > 1
