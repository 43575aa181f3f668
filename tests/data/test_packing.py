import dataclasses
import hashlib
import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from looplab._config import from_dict, to_dict
from looplab.data.corpus import builtin_corpus
from looplab.data.documents import DataError, Document, DocumentSet, Grid, read_documents
from looplab.data.order import permuted
from looplab.data.packing import DataState, PackedLoader, PackedText, Packing, load_packed
from looplab.data.tokenizers import ByteTokenizer

EOS = 257
GOLDEN = "ddd1a8943f289baf"
"""Recorded from this implementation (NumPy 2.4.6), see the test that uses it."""
TEXTS = ["first", "2", "a third and longer one", "", "fifth text"]


def loader(texts=TEXTS, *, seq_len=7, rows=4, document_mask=False, seed=0, vocab_size=259, name="a.txt"):
    documents = tuple(t if isinstance(t, Document) else Document(t) for t in texts)
    source = DocumentSet(name, documents, hashlib.blake2b(repr(documents).encode()).hexdigest())
    packing = Packing(seq_len=seq_len, rows=rows, document_mask=document_mask)
    return PackedLoader([source], ByteTokenizer(), packing, seed=seed, vocab_size=vocab_size)


def written_out(texts, *, tokens, seed=0):
    """The definition as plain loops: (token, document, offset, number of the document in the stream)."""
    stream, epoch, number = [], 0, 0
    while len(stream) < tokens:
        for document in permuted(np.arange(len(texts)), len(texts), seed=seed, epoch=epoch).tolist():
            for offset, token in enumerate([*texts[document].encode(), EOS]):
                stream.append((token, document, offset, number))
            number += 1
        epoch += 1
    return stream


@settings(deadline=None, max_examples=40)
@given(
    texts=st.lists(st.text("abc", max_size=12), min_size=1, max_size=6),
    seq_len=st.integers(1, 9),
    rows=st.integers(1, 5),
    step=st.integers(0, 12),
)
def test_a_batch_equals_the_written_out_stream(texts, seq_len, rows, step):
    plain, masked = (loader(texts, seq_len=seq_len, rows=rows, document_mask=mask) for mask in (False, True))
    stream = written_out(texts, tokens=(step + 1) * rows * (seq_len + 1))
    batch, blocked = plain.batch(step), masked.batch(step)
    for row in range(rows):
        begin = (step * rows + row) * (seq_len + 1)
        piece = stream[begin : begin + seq_len + 1]
        assert batch.tokens[row].tolist() == blocked.tokens[row].tolist() == [p[0] for p in piece[:-1]]
        assert batch.labels[row].tolist() == [p[0] for p in piece[1:]]
        assert batch.positions[row].tolist() == list(range(seq_len))
        numbers = [p[3] for p in piece]
        assert blocked.labels[row].tolist() == [b[0] if a[3] == b[3] else -100 for a, b in itertools.pairwise(piece)]
        assert blocked.document_ids[row].tolist() == [n - numbers[0] for n in numbers[:-1]]
        assert blocked.positions[row].tolist() == [i - numbers.index(n) for i, n in enumerate(numbers[:-1])]
    start = stream[step * rows * (seq_len + 1)]
    assert (batch.start.document, batch.start.offset) == start[1:3]
    assert batch.start.epoch == start[3] // len(texts)
    assert batch.document_ids is None


def test_some_rows_are_those_of_the_whole_batch():
    data = loader()
    for step in range(20):
        whole = data.batch(step)
        for parts in ([[0, 1, 2, 3]], [[0, 2], [1, 3]], [[3, 0], [2, 1]], [[0], [1], [2], [3]]):
            for rows in parts:
                part = data.batch(step, rows=torch.tensor(rows))
                assert part.rows.tolist() == rows
                assert part.start == whole.start
                for field in ("tokens", "labels", "positions"):
                    assert torch.equal(getattr(part, field), getattr(whole, field)[part.rows]), field


def digests(batches, steps):
    """One digest of tokens and labels per step."""
    for batch in itertools.islice(batches, steps):
        data = batch.tokens.numpy().astype("<i8").tobytes() + batch.labels.numpy().astype("<i8").tobytes()
        yield hashlib.blake2b(data, digest_size=8).hexdigest()


@pytest.fixture(scope="module")
def thousand():
    return list(digests(loader().batches(), 1000))


def test_a_thousand_steps_have_the_recorded_hash(thousand):
    """Recorded from this implementation; a change breaks the resuming of every older checkpoint."""
    assert hashlib.blake2b("".join(thousand).encode(), digest_size=8).hexdigest() == GOLDEN


@pytest.mark.parametrize(("stop", "steps"), [(1, 20), (2, 20), (37, 20), (500, 500), (999, 1)])
def test_resuming_at_any_step_continues_the_same_stream(thousand, stop, steps):
    saved = loader().state(stop)
    again = loader()
    again.check(saved)
    assert list(digests(again.batches(saved.step), steps)) == thousand[stop : stop + steps]


def test_a_batch_may_begin_in_the_middle_of_a_document():
    long = loader(["x" * 100 + "y" * 100], seq_len=9, rows=2)
    assert (
        long.position(3) == long.batch(3).start == dataclasses.replace(long.position(3), epoch=0, document=0, offset=60)
    )
    assert long.position(11).epoch == 1
    assert long.position(11).offset == 11 * 20 - 201
    assert long.batch(5).tokens.tolist() == [[ord("y")] * 9, [ord("y")] * 9]


def test_only_the_epochs_in_use_stay_in_memory():
    data = loader()
    for step in range(30):
        data.batch(step)
    assert data.position(30).epoch > 5
    assert len(data._epochs) <= 2


def test_every_token_of_an_epoch_is_read_exactly_once():
    data = loader(seq_len=4, rows=3)
    assert data.num_tokens == sum(map(len, TEXTS)) + len(TEXTS)
    read = torch.cat([torch.cat([b.tokens, b.labels[:, -1:]], 1).flatten() for b in (data.batch(s) for s in range(3))])
    assert read.tolist()[: data.num_tokens] == [t[0] for t in written_out(TEXTS, tokens=1)]


def test_prompts_are_read_and_not_scored():
    batch = loader([Document("answer", prompt="question")], seq_len=14, rows=1).batch(0)
    assert bytes(batch.tokens[0].tolist()) == b"questionanswer"
    assert batch.labels[0].tolist() == [-100] * 7 + [*b"answer", EOS]


def test_with_a_mask_rows_do_not_depend_on_the_neighbours():
    """The tokens, labels and positions of one document are the same whatever stands around it."""

    def own(texts):
        batch = loader(texts, seq_len=40, rows=8, document_mask=True).batch(0)
        for row, ids in zip(range(8), batch.document_ids, strict=True):
            for i in ids.unique().tolist():
                here = ids == i
                if bytes(t for t in batch.tokens[row][here].tolist() if t < 256) == b"the same":
                    return [x[row][here].tolist() for x in (batch.tokens, batch.labels, batch.positions)]
        raise AssertionError("the document is not in the batch")

    assert own(["the same", "other", "more"]) == own(["the same", "words", "before", "x"])


def test_the_seed_decides_the_order_and_nothing_else():
    one, two = loader(seed=1), loader(seed=2)
    assert not torch.equal(one.batch(0).tokens, two.batch(0).tokens)
    assert (one.num_tokens, one.hash) == (two.num_tokens, two.hash)


def test_bits_per_byte_can_be_had_from_the_counts():
    data = loader([Document("caf\u00e9", prompt="ab")])
    assert (data.num_bytes, data.num_tokens) == (7, 8)


def test_the_built_in_corpus_is_packed_whole():
    data = load_packed(PackedText(packing=Packing(seq_len=256, rows=8)), seed=0, vocab_size=259)
    documents = builtin_corpus("train").documents
    assert data.num_bytes == sum(len(d.text.encode()) for d in documents)
    assert data.num_tokens == data.num_bytes + len(documents)
    assert data.batch(3).tokens.shape == (8, 256)


def test_files_of_all_kinds_follow_each_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.jsonl").write_text(json.dumps({"body": "line"}) + "\n3\n")
    config = PackedText(
        sources=("a.txt", "b.jsonl"), text_field="body", on_bad_line="skip", packing=Packing(seq_len=9, rows=1)
    )
    assert from_dict(PackedText, json.loads(json.dumps(to_dict(config)))) == config
    data = load_packed(config, seed=0, vocab_size=259)
    assert data.skipped == 1
    row = data.batch(0)
    assert sorted([*row.tokens[0].tolist(), row.labels[0, -1].item()]) == sorted([*b"textline", EOS, EOS])


def test_a_changed_file_is_named_on_resume(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    config = PackedText(sources=("corpus/a.txt", "corpus/b.jsonl"), packing=Packing(seq_len=3, rows=2))
    (tmp_path / "corpus" / "a.txt").write_text("one")
    (tmp_path / "corpus" / "b.jsonl").write_text('{"text": "two"}\n')
    old = load_packed(config, seed=0, vocab_size=259).state(400)
    assert from_dict(DataState, json.loads(json.dumps(to_dict(old)))) == old
    (tmp_path / "corpus" / "b.jsonl").write_text('{"text": "tWo"}\n')
    new = read_documents("corpus/b.jsonl").hash
    with pytest.raises(DataError) as caught:
        load_packed(config, seed=0, vocab_size=259).check(old)
    assert str(caught.value) == (
        f"corpus/b.jsonl changed since step 400 (hash {old.sources[1].hash[:8]}.. is now {new[:8]}..)."
    )
    with pytest.raises(DataError) as caught:
        load_packed(dataclasses.replace(config, sources=("corpus/a.txt",)), seed=0, vocab_size=259).check(old)
    assert str(caught.value) == (
        "data sources changed since step 400: were ['corpus/a.txt', 'corpus/b.jsonl'], are ['corpus/a.txt']. "
        "Restore the list and its order."
    )


def test_another_tokenizer_or_another_order_is_noticed_on_resume():
    old = loader().state(400)
    with pytest.raises(DataError) as caught:
        loader().check(dataclasses.replace(old, tokenizer="0123456789"))
    assert str(caught.value) == (
        f"the tokenizer changed since step 400 (hash 01234567.. is now {ByteTokenizer().hash[:8]}..)."
    )
    for other in (loader(seq_len=8), loader(rows=5), loader(seed=1)):
        with pytest.raises(DataError) as caught:
            other.check(old)
        assert str(caught.value) == (
            f"the data position changed since step 400: was {old.position}, is {other.position(400)}. "
            "Restore seq_len, rows and the seed."
        )


def test_an_id_outside_the_models_vocabulary_is_named():
    with pytest.raises(DataError) as caught:
        loader(["a", "abc", "ab\u00e9"], vocab_size=128)
    assert str(caught.value) == (
        "token id 257 at document 0, offset 1, but vocab_size is 128: tokenizer and model differ."
    )
    with pytest.raises(DataError) as caught:
        loader(["\x01", "abc"], vocab_size=257)
    assert "token id 257 at document 0, offset 1, but vocab_size is 257" in str(caught.value)


class WideBytes(ByteTokenizer):
    """Bytes as ids far above 16 bits."""

    def __init__(self):
        super().__init__()
        self.vocab_size = self.vocab_size + 100_000

    def encode(self, text):
        return [i + 100_000 for i in super().encode(text)]


def test_large_vocabularies_keep_their_ids():
    source = DocumentSet("a", (Document("abc"),), "0")
    data = PackedLoader([source], WideBytes(), Packing(seq_len=3, rows=1), seed=0, vocab_size=100_259)
    assert data.batch(0).tokens.tolist() == [[100_097, 100_098, 100_099]]
    with pytest.raises(DataError, match="token id 100099 at document 0, offset 2, but vocab_size is 100099"):
        PackedLoader([source], WideBytes(), Packing(seq_len=3, rows=1), seed=0, vocab_size=100_099)


def test_what_cannot_be_packed_is_refused():
    grid = DocumentSet("g.jsonl", (Grid((1,), (1,), line=3),), "0")
    packing = Packing(seq_len=3, rows=2)
    with pytest.raises(DataError, match=r"^packing: g.jsonl must hold texts. Got a grid at line 3.$"):
        PackedLoader([grid], ByteTokenizer(), packing, seed=0, vocab_size=259)
    with pytest.raises(DataError, match="must have an eos token"):
        PackedLoader(
            [DocumentSet("a", (Document("a"),), "0")], ByteTokenizer(specials=False), packing, seed=0, vocab_size=256
        )
    with pytest.raises(DataError, match="at least one document. Got none"):
        PackedLoader([], ByteTokenizer(), packing, seed=0, vocab_size=259)
    with pytest.raises(ValueError, match="seed must be from 0 to 2\\*\\*64 - 1. Got -1"):
        loader(seed=-1)
    for bad in ({"seq_len": 0, "rows": 1}, {"seq_len": 1, "rows": 0}):
        with pytest.raises(ValueError, match=r"must be at least 1. Got 0"):
            Packing(**bad)
    with pytest.raises(ValueError, match="sources must name at least one file"):
        PackedText(sources=(), packing=packing)


@pytest.mark.parametrize("rows", [[], [4], [0, -1]])
def test_rows_that_the_batch_does_not_have_are_refused(rows):
    with pytest.raises(ValueError, match="rows must be numbers from 0 to 3"):
        loader().batch(0, rows=torch.tensor(rows, dtype=torch.long))


def test_steps_count_from_zero():
    with pytest.raises(ValueError, match="step must be at least 0. Got -1"):
        loader().batch(-1)
