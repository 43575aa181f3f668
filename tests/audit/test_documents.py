"""The split and the token table: disjoint, nested, stable, and scored where the text is."""

import re

import numpy as np
import pytest
import torch

from looplab.audit.documents import ScoredDocument, Split, overlap, pad, prepare, unit
from looplab.data.documents import DataError, Document, DocumentSet, Grid
from looplab.data.tokenizers import ByteTokenizer

BYTES = ByteTokenizer(specials=False)


def exactly(message):
    return f"^{re.escape(message)}$"


def text_of(i):
    return f"document {i} says " + " ".join(f"word{(i * 7 + j) % 50}" for j in range(5 + i % 11))


def corpus(count=120, **more):
    return DocumentSet("corpus.jsonl", tuple(Document(text_of(i), line=i + 1, **more) for i in range(count)), "hash")


def keys(split):
    return [document.content_key for document in split.documents]


def test_the_sides_are_disjoint_and_decided_by_the_hash():
    domain = prepare("text", corpus(), BYTES)
    assert not set(keys(domain.evaluation)) & set(keys(domain.calibration))
    assert all(unit(0, document.key) >= 0.5 for document in domain.evaluation.documents)
    assert all(unit(0, document.key) < 0.5 for document in domain.calibration.documents)
    assert len(domain.evaluation.documents) + len(domain.calibration.documents) == 120


def test_the_split_does_not_depend_on_the_order_of_the_file():
    documents = corpus()
    turned = DocumentSet("corpus.jsonl", documents.documents[::-1], "hash")
    assert keys(prepare("text", documents, BYTES).evaluation) == keys(prepare("text", turned, BYTES).evaluation)


def test_a_smaller_run_is_a_subset_of_a_larger_one():
    small = prepare("text", corpus(), BYTES, evaluation=25, calibration=12)
    large = prepare("text", corpus(), BYTES)
    assert keys(small.evaluation) == keys(large.evaluation)[:25]
    assert keys(small.calibration) == keys(large.calibration)[:12]


def test_another_seed_is_another_split():
    assert keys(prepare("text", corpus(), BYTES).evaluation) != keys(
        prepare("text", corpus(), BYTES, seed=1).evaluation
    )


def test_a_group_stays_on_one_side():
    documents = DocumentSet("c", tuple(Document(text_of(i), group=f"g{i // 4}") for i in range(120)), "hash")
    domain = prepare("text", documents, BYTES)
    near, far = ({d.key for d in side.documents} for side in (domain.calibration, domain.evaluation))
    assert near
    assert far
    assert not near & far


def test_duplicates_and_empty_documents_are_removed_and_counted():
    documents = corpus().documents
    spaced = Document(documents[0].text.replace(" ", "   "))
    domain = prepare("text", DocumentSet("c", (*documents, spaced, documents[3], Document(" \n")), "hash"), BYTES)
    assert (domain.read, domain.duplicates, domain.empty, domain.unscored) == (123, 2, 1, 0)


def test_prompt_tokens_are_read_and_never_scored():
    documents = DocumentSet("c", tuple(Document(text_of(i), prompt="ask:") for i in range(80)), "hash")
    document = prepare("text", documents, BYTES).evaluation.documents[0]
    assert document.first == 4
    assert bytes(document.tokens.tolist()).decode() == "ask:" + document.text
    assert document.scored == document.text_bytes == len(document.text)


def test_the_first_position_is_never_scored():
    document = prepare("text", corpus(), BYTES).evaluation.documents[0]
    assert document.first == 1
    assert document.scored == document.text_bytes == len(document.text) - 1


def test_bos_comes_first_where_the_tokenizer_begins_texts_with_one():
    class Beginning(ByteTokenizer):
        starts_with_bos = True

    document = prepare("text", corpus(), Beginning()).evaluation.documents[0]
    assert document.tokens[0] == 256
    assert document.first == 1
    assert document.scored == document.text_bytes == len(document.text)


def test_documents_are_cut_and_bytes_count_what_is_scored():
    documents = DocumentSet("c", tuple(Document("é" * 40 + text_of(i)) for i in range(80)), "hash")
    document = prepare("text", documents, BYTES, max_tokens=20).evaluation.documents[0]
    assert document.cut
    assert len(document.tokens) == 20
    assert document.scored == document.text_bytes == 19


def test_the_token_table_lists_documents_in_order():
    split = prepare("text", corpus(), BYTES).evaluation
    expected = [(i, p, int(d.tokens[p])) for i, d in enumerate(split.documents) for p in range(d.first, len(d.tokens))]
    found = list(zip(split.owners.tolist(), split.positions.tolist(), split.targets.tolist(), strict=True))
    assert found == expected
    assert split.tokens == len(expected) == int(split.counts.sum())


@pytest.mark.parametrize("batch_tokens", [1, 300, 10_000])
def test_batches_put_every_scored_token_in_its_place_of_the_table(batch_tokens):
    split = prepare("text", corpus(), BYTES).evaluation
    targets = torch.full((split.tokens,), -1)
    before = torch.full((split.tokens,), -1)
    for batch in split.batches(batch_tokens):
        assert batch.tokens.numel() <= batch_tokens or len(batch.documents) == 1
        rows, positions = batch.read
        targets[batch.place] = batch.tokens[rows, positions + 1]
        before[batch.place] = positions
        if batch.valid is not None:
            assert bool(batch.valid[rows, positions + 1].all())
    torch.testing.assert_close(targets, split.targets)
    torch.testing.assert_close(before, split.positions - 1)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_stands_on_the_side_asked_for(side):
    documents = prepare("text", corpus(), BYTES).evaluation.documents[:3]
    tokens, valid = pad(documents, side=side, extra=7)
    assert tokens.shape[1] == 7 + max(len(document.tokens) for document in documents)
    for row, document in enumerate(documents):
        start = tokens.shape[1] - len(document.tokens) if side == "left" else 0
        end = start + len(document.tokens)
        assert tokens[row, start:end].tolist() == document.tokens.tolist()
        assert valid[row].nonzero().flatten().tolist() == list(range(start, end))
    assert pad(documents[:1])[1] is None


def test_padding_counts_launched_positions_without_a_token():
    split = Split(prepare("text", corpus(), BYTES).evaluation.documents[:2])
    lengths = [len(document.tokens) for document in split.documents]
    assert split.padding(10_000) == pytest.approx(1 - sum(lengths) / (2 * max(lengths)))


def test_calibration_takes_whole_documents_up_to_the_token_limit():
    domain = prepare("text", corpus(), BYTES, calibration_tokens=700)
    everything = prepare("text", corpus(), BYTES).calibration
    used = len(domain.calibration.documents)
    assert domain.calibration.tokens <= 700 < int(everything.counts[: used + 1].sum())
    assert keys(domain.calibration) == keys(everything)[:used]


def test_noise_is_named_by_document_and_seed():
    first, second = prepare("text", corpus(), BYTES).evaluation.documents[:2]
    assert len({first.item(0), first.item(1), second.item(0)}) == 3
    assert first.item(0) == prepare("other", corpus(), BYTES, max_tokens=9).evaluation.documents[0].item(0)


def test_a_calibration_file_leaves_all_documents_to_evaluation():
    other = DocumentSet("cal.jsonl", tuple(Document(f"other {text_of(i)}") for i in range(30)), "hash")
    domain = prepare("text", corpus(), BYTES, calibration_set=other)
    assert len(domain.evaluation.documents) == 120
    assert len(domain.calibration.documents) == 30


def test_a_document_on_both_sides_is_refused():
    other = DocumentSet("cal.jsonl", tuple(Document(text_of(i + 117), line=i + 12) for i in range(30)), "hash")
    message = "3 calibration documents also occur in evaluation (first: line 12). Remove them or drop --calibration."
    with pytest.raises(DataError, match=exactly(message)):
        prepare("text", corpus(), BYTES, calibration_set=other)


def test_too_few_documents_are_refused_with_their_counts():
    documents = corpus(13).documents
    few = DocumentSet("c", (*documents, *documents[:4], Document("")), "hash")
    near = sum(unit(0, document.key) < 0.5 for document in documents)
    message = (
        "domain math needs 20 evaluation and 10 calibration documents. "
        f"Got {13 - near} and {near} after removing 4 duplicates and 1 empty. Add text or split it by blank lines."
    )
    with pytest.raises(DataError, match=exactly(message)):
        prepare("math", few, BYTES)


def test_prompts_that_fill_the_window_are_refused():
    documents = DocumentSet("c", tuple(Document(text_of(i), prompt="p" * 1024) for i in range(200)), "hash")
    message = "all 200 documents of math have prompts of 1024 tokens or more. Raise --max-tokens or shorten prompts."
    with pytest.raises(DataError, match=exactly(message)):
        prepare("math", documents, BYTES)


def test_a_token_outside_the_vocabulary_is_refused():
    message = "token id 121 is outside the model's vocabulary of 100. The tokenizer belongs to another model."
    with pytest.raises(DataError, match=exactly(message)):
        prepare("math", corpus(), BYTES, vocabulary=100)


def test_grids_are_refused_for_a_model_of_texts():
    documents = DocumentSet("c", (*corpus().documents, Grid((1, 2), (1, 2), line=121)), "hash")
    with pytest.raises(
        DataError, match=r"domain text must hold texts for this model. Got tokens and labels \(line 121\)"
    ):
        prepare("text", documents, BYTES)


def test_the_overlap_is_the_share_of_evaluation_13_grams_seen_in_calibration():
    words = [f"w{i}" for i in range(20)]

    def split(*texts):
        documents = [ScoredDocument(text, text, np.zeros(1, np.int32), 0, 0, text, 0, False) for text in texts]
        return Split(tuple(documents))

    both, fresh = " ".join(words[:14]), " ".join(reversed(words))
    assert overlap(split(both), split(" ".join(words))) == 1.0
    assert overlap(split(both, fresh), split(" ".join(words))) == pytest.approx(2 / (2 + 8))
    assert overlap(split("too short"), split(both)) == 0.0


def test_tokens_keep_their_kind():
    document = prepare("text", corpus(), BYTES).evaluation.documents[0]
    assert document.tokens.dtype == np.int32
