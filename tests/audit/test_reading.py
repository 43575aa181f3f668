"""What a model reads of a document: windows, masked passes, grids, and what is refused."""

import re

import numpy as np
import pytest

from looplab.audit.documents import prepare
from looplab.audit.reading import MOST_MASKS, PASSES, Reading
from looplab.data.documents import IGNORED, DataError, Document, DocumentSet, Grid
from looplab.data.tokenizers import ByteTokenizer
from tiny import squares

BYTES = ByteTokenizer(specials=False)
MASK = 7


class Framed(ByteTokenizer):
    """Bytes between bos 256 and eos 257."""

    starts_with_bos = True


def exactly(message):
    return f"^{re.escape(message)}$"


def rows(document, **options):
    (found,) = Reading(**{"tokenizer": BYTES, **options}).rows([document], "math")
    return found


def text(length):
    return "".join(chr(97 + i % 26) for i in range(length))


def read_back(row):
    return bytes(token for token in row.tokens.tolist() if token < 256).decode()


def test_a_window_goes_on_where_the_one_before_ended():
    document = Document(text(50), prompt="0123")
    found = rows(document, max_tokens=16, windows=3)
    assert [read_back(row) for row in found] == ["0123" + text(50)[:12], text(50)[12:28], text(50)[28:44]]
    assert [(row.window, row.first, row.scored, row.cut) for row in found] == [
        (0, 4, 12, True),
        (1, 1, 15, True),
        (2, 1, 15, True),
    ]
    assert [row.text_bytes for row in found] == [12, 15, 15]


def test_every_window_begins_with_bos_and_never_with_the_prompt():
    found = rows(Document(text(20), prompt="0123"), tokenizer=Framed(), max_tokens=10, windows=9)
    assert [row.tokens[0] for row in found] == [256] * 3
    assert "".join(map(read_back, found)) == "0123" + text(20)
    assert [row.scored for row in found] == [5, 9, 6]
    assert not any(row.cut for row in found)


def test_a_prompt_longer_than_a_window_is_read_in_the_next_and_not_scored():
    found = rows(Document(text(9), prompt="p" * 20), max_tokens=16, windows=2)
    assert [(row.first, row.scored) for row in found] == [(16, 0), (4, 9)]


def test_windows_of_a_document_have_noise_of_their_own_and_the_first_that_of_the_document():
    whole, (first, second) = rows(Document(text(30)))[0], rows(Document(text(30)), max_tokens=16, windows=2)
    assert first.item(0) == whole.item(0)
    assert len({first.item(0), first.item(1), second.item(0), second.item(1)}) == 4


@pytest.mark.parametrize(("length", "masks"), [(8, 1), (120, 2), (290, 5), (1000, MOST_MASKS)])
def test_a_pass_masks_two_percent_and_at_most_six(length, masks):
    found = rows(Document(text(length)), mask_token=MASK)
    assert len(found) == PASSES
    for row in found:
        chosen = np.flatnonzero(row.labels != IGNORED)
        assert len(chosen) == row.scored == masks
        assert row.tokens[chosen].tolist() == [MASK] * masks
        kept = np.where(row.labels == IGNORED, row.tokens, row.labels)
        assert bytes(kept.tolist()).decode() == text(length)
        assert row.targets.tolist() == kept[chosen].tolist()
        assert row.read.tolist() == row.positions.tolist() == chosen.tolist()


def test_no_position_is_masked_in_two_passes_and_no_prompt_or_frame_in_any():
    found = rows(Document(text(300), prompt="0" * 40), tokenizer=Framed(), mask_token=MASK)
    positions = [p for row in found for p in row.positions.tolist()]
    assert len(positions) == len(set(positions)) == PASSES * MOST_MASKS
    assert min(positions) > 40
    assert max(positions) < 341
    assert {(row.tokens[0], row.tokens[-1]) for row in found} == {(256, 257)}


def test_the_frame_of_a_masked_text_is_part_of_max_tokens():
    found = rows(Document(text(40)), tokenizer=Framed(), mask_token=MASK, max_tokens=12, windows=2)
    assert {len(row.tokens) for row in found} == {12}
    assert {(row.window, row.masking) for row in found} == {(w, m) for w in range(2) for m in range(PASSES)}


def test_masks_depend_on_the_text_and_the_seed_alone():
    def places(document, **options):
        return [row.positions.tolist() for row in rows(document, mask_token=MASK, **options)]

    assert places(Document(text(200), line=3)) == places(Document(text(200), line=9))
    assert places(Document(text(200))) != places(Document(text(200)), seed=1)


def test_a_short_text_has_as_many_passes_with_a_mask_as_it_has_tokens_to_mask():
    assert [row.scored for row in rows(Document("abc"), mask_token=MASK)] == [1, 1, 0, 0]


def test_a_masked_token_counts_its_share_of_the_bytes():
    found = rows(Document(text(101)), mask_token=MASK)
    assert [row.text_bytes for row in found] == [2] * PASSES


def test_a_grid_is_scored_where_it_has_a_label_and_nothing_is_shifted():
    (row,) = rows(Grid((5, 6, 7, 0), (1, IGNORED, 2, 0), line=4), tokenizer=None)
    assert row.tokens.tolist() == [5, 6, 7, 0]
    assert row.positions.tolist() == row.read.tolist() == [0, 2, 3]
    assert row.targets.tolist() == [1, 2, 0]
    assert (row.scored, row.text_bytes, row.line, row.puzzle_id) == (3, 0, 4, None)


@pytest.mark.parametrize(
    ("asked", "given", "expected"), [(None, 3, None), (False, 3, 3), (False, None, None), (True, 3, 3)]
)
def test_a_puzzle_id_is_read_where_the_model_takes_it(asked, given, expected):
    (row,) = rows(Grid((1,), (1,), given), tokenizer=None, puzzle_ids=asked)
    assert row.puzzle_id == expected


def of(*documents):
    return DocumentSet("m.jsonl", documents, "hash")


def grids(count=60, **last):
    changed = {"tokens": (1, 2), "labels": (1, 2), **last}
    return of(*squares(count).documents, Grid(**changed, line=count + 1))


@pytest.mark.parametrize(
    ("documents", "options", "message"),
    [
        (
            of(*squares(60).documents, Document("a b", line=61)),
            {"tokenizer": None},
            "domain math must hold grids for this model, which is not causal and has no mask token. Got a text "
            "(line 61). Give documents with 'tokens' and 'labels', or put the tokenizer of a masked model into its "
            "folder.",
        ),
        (
            of(Document("a b", line=1), Grid((1,), (1,), line=2)),
            {"tokenizer": BYTES},
            "domain math must hold texts for this model. Got tokens and labels (line 2). Give documents with a 'text'.",
        ),
        (
            grids(tokens=(1, 9), labels=(1, 2)),
            {"tokenizer": None, "vocabulary": 8},
            "domain math line 61 must have ids below 8, the model's vocabulary. Got 9. Repair the line, or give the "
            "puzzles that this model was made for.",
        ),
        (
            grids(tokens=(1, 2), labels=(8, 2)),
            {"tokenizer": None, "vocabulary": 8},
            "domain math line 61 must have ids below 8, the model's vocabulary. Got 8. Repair the line, or give the "
            "puzzles that this model was made for.",
        ),
        (
            grids(tokens=(1,) * 12, labels=(1,) * 12),
            {"tokenizer": None, "max_tokens": 9},
            "domain math line 61 must have at most 9 tokens: a grid is never cut. Got 12. Raise --max-tokens or give "
            "smaller grids.",
        ),
        (
            grids(tokens=(1,) * 12, labels=(1,) * 12),
            {"tokenizer": None, "grid_tokens": 9},
            "domain math line 61 must have 9 tokens, the only size that this model takes. Got 12. Give grids of that "
            "size.",
        ),
        (
            grids(puzzle_id=None),
            {"tokenizer": None, "puzzle_ids": True},
            "domain math line 1 must have a 'puzzle_id': this model reads it. Got none. Add the field.",
        ),
        (
            of(*(Grid((i,), (IGNORED,)) for i in range(40))),
            {"tokenizer": None},
            "all 40 documents of math have only labels of -100, which are not scored. Give labels at the positions to "
            "score.",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_by_line(documents, options, message):
    tokenizer = options.pop("tokenizer")
    with pytest.raises(DataError, match=exactly(message)):
        prepare("math", documents, tokenizer, **options)


ONE_CHARACTER = [Document(chr(33 + i)) for i in range(60)]
LONG_PROMPTS = [Document(f"text {i}", prompt="p" * 30) for i in range(60)]


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        (
            ONE_CHARACTER,
            "all 60 documents of math have no token of text after the first position, which is never scored. "
            "Give longer texts.",
        ),
        (
            LONG_PROMPTS,
            "all 60 documents of math have prompts of 24 tokens or more. Raise --max-tokens or shorten prompts.",
        ),
        (
            [*ONE_CHARACTER[:20], *LONG_PROMPTS[:5]],
            "none of the 25 documents of math has a scored token: 5 have prompts of 24 tokens or more, 20 have no "
            "token of text after the first position, which is never scored. Raise --max-tokens or give longer texts.",
        ),
    ],
)
def test_documents_without_a_scored_token_are_told_apart(documents, message):
    with pytest.raises(DataError, match=exactly(message)):
        prepare("math", of(*documents), BYTES, max_tokens=24)


def test_too_few_documents_names_those_without_a_scored_token():
    with pytest.raises(DataError, match=r"after removing 0 duplicates, 0 empty and 60 without a scored token\."):
        prepare("math", of(*ONE_CHARACTER, Document("longer")), BYTES)


@pytest.mark.parametrize(
    ("options", "least"), [({}, 1), ({"tokenizer": Framed()}, 2), ({"tokenizer": Framed(), "mask_token": 1}, 3)]
)
def test_max_tokens_must_leave_room_for_text(options, least):
    Reading(**{"tokenizer": BYTES, **options}, max_tokens=least)
    message = f"--max-tokens must be at least {least} for this tokenizer. Got {least - 1}."
    with pytest.raises(ValueError, match=exactly(message)):
        Reading(**{"tokenizer": BYTES, **options}, max_tokens=least - 1)
