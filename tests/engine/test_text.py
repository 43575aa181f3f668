"""Texts that come token by token: whole characters, and nothing that may still become a stop string."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looplab.data.tokenizers import ByteTokenizer
from looplab.engine.text import Decoder, StopFinder, TextStream
from looplab.engine.tokenizer import PlainTokenizer

BYTES = PlainTokenizer(ByteTokenizer())


def stream(tokens, **options):
    """Pieces of a text, the last one of `close`."""
    text = TextStream(BYTES, **options)
    pieces = []
    for token in tokens:
        pieces.append(text.push(token))
        if text.stopped:
            break
    return [*pieces, text.close()], text.stopped


def cut(text, stops):
    """Slow twin: the text before the stop string that is complete first; of those, before the one that began first."""
    for end in range(1, len(text) + 1):
        found = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: min(found)], True
    return text, False


class Blanks:
    """Words whose blank stands in front, and which loses the first blank of a text, as SentencePiece does."""

    bos = eos = pad = chat_template = None
    vocab = 3
    words = ("<eos>", " one", " two")

    def encode(self, text, special=True):
        return [self.words.index(f" {word}") for word in text.split()]

    def decode(self, ids):
        return "".join(self.words[i] for i in ids if i).removeprefix(" ")

    def written(self, token):
        return self.words[token]


class Pieces(Blanks):
    """Tokens of several bytes, whose borders may lie inside characters."""

    words = (b"X\xe2", b"\x82\xac", b"ab", b"\xf0\x9f", b"\x99\x82Y", b"\xff\xff", b"\xc3", b"\xa9b\xc3", b"!", b"")

    def decode(self, ids):
        return b"".join(self.words[i] for i in ids).decode("utf-8", "replace")


@given(st.lists(st.integers(0, 9), max_size=16), st.lists(st.sampled_from(["X", "b!", "Yab", "\u20ac"]), max_size=2))
def test_tokens_that_cut_characters_say_all_and_stop_as_soon_as_the_text_shows_it(tokens, stops):
    text, said = TextStream(Pieces(), stop=stops), ""
    for number, token in enumerate(tokens, 1):
        said += text.push(token)
        # Whatever comes next, this much of the text is sure.
        shown, found = cut(Pieces().decode(tokens[:number]).rstrip("\ufffd"), stops)
        assert text.stopped == found
        if found:
            assert said == shown
            return
    assert said + text.close() == Pieces().decode(tokens)


@given(st.lists(st.integers(0, 258), max_size=24))
def test_pieces_add_up_to_what_the_tokenizer_makes_of_all_tokens(tokens):
    pieces, _ = stream(tokens)
    assert "".join(pieces) == BYTES.decode(tokens)


@given(st.text(max_size=12), st.lists(st.text(alphabet="ab\u00e9", min_size=1, max_size=4), max_size=3), st.data())
def test_a_text_ends_before_the_stop_string_that_is_complete_first(text, stops, data):
    text += data.draw(st.text(alphabet="ab\u00e9", max_size=12))
    pieces, stopped = stream(text.encode(), stop=stops)
    assert ("".join(pieces), stopped) == cut(text, stops)


def test_an_incomplete_character_is_held_back_and_broken_only_at_the_true_end():
    smile = "\U0001f642".encode()
    assert stream(smile)[0] == ["", "", "", "\U0001f642", ""]
    assert stream(smile[:3])[0] == ["", "", "", "\ufffd"]
    assert stream(smile[:3] + b"!")[0] == ["", "", "", "\ufffd!", ""]


def test_bytes_that_never_become_a_character_are_said_after_a_while():
    text = TextStream(BYTES)
    said = "".join(text.push(0xFF) for _ in range(100))
    assert len(said) >= 96, "a decoder that waits for ever decodes an ever longer text"
    assert said + text.close() == "\ufffd" * 100


def test_the_longest_suffix_that_may_become_a_stop_string_is_held_back():
    pieces, stopped = stream(b"xaab", stop=["aabc"])
    assert (pieces, stopped) == (["x", "", "", "", "aab"], False)
    pieces, stopped = stream(b"aaab", stop=["aab"])
    assert (pieces, stopped) == (["", "", "a", "", ""], True)


def test_nothing_is_said_after_a_stop():
    text = TextStream(BYTES, stop=["b"])
    assert [text.push(t) for t in b"abc"] == ["a", "", ""] and text.close() == ""


def test_a_stop_string_inside_one_token_cuts_it():
    class Words(Blanks):
        words = ("<eos>", " one", " on two")

    text = TextStream(Words(), stop=[" t"])
    assert [text.push(1), text.push(2), text.stopped] == ["one", " on", True]


def test_the_first_word_of_an_answer_keeps_its_blank():
    assert TextStream(Blanks(), context=[1]).push(2) == " two"
    assert TextStream(Blanks()).push(2) == "two"


def test_a_token_without_text_does_not_end_the_text_before_it():
    text = TextStream(Blanks())
    assert [text.push(token) for token in (1, 0, 0, 2)] == ["one", "", "", " two"]


def test_special_tokens_do_not_pile_up():
    class Counting(Blanks):
        longest = 0

        def decode(self, ids):
            self.longest = max(self.longest, len(ids))
            return super().decode(ids)

    counting = Counting()
    decoder = Decoder(counting)
    for _ in range(50):
        decoder.push(0)
    assert counting.longest <= 2, "every token would cost as much as all before it"


@pytest.mark.parametrize("text", ["aabaabaaab", "ababababc", "aaaa"])
def test_a_finder_knows_how_much_of_the_string_ends_the_text(text):
    for wanted in ("aab", "aabaac", "ababc", "aaa"):
        finder = StopFinder(wanted)
        for end in range(1, len(text) + 1):
            over = finder.push(text[end - 1])
            longest = max(k for k in range(len(wanted) + 1) if text[:end].endswith(wanted[:k]))
            assert finder.matched == longest and over == (longest == len(wanted))
            if over:
                break
