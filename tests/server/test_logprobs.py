"""Both formats of log-probabilities."""

from looplab.engine.request import TokenLogprob
from looplab.server.logprobs import LEAST, Placed, chat_logprobs, completion_logprobs
from server.live import byte_tokenizer


class Twice:
    """Ids 0 and 1 are one text."""

    bos = eos = pad = chat_template = None
    vocab = 4

    def encode(self, text, special=True):
        return []

    def decode(self, ids):
        return "".join("aab"[i] if i < 3 else "" for i in ids)

    def written(self, token):
        return "<end>" if token == 3 else None


def test_of_two_ids_with_one_text_the_likelier_value_is_kept():
    """What scores with echo asks whether the largest value of an entry is the token's own."""
    likely = TokenLogprob(0, -0.1, ((0, -0.1), (1, -2.5)))
    unlikely = TokenLogprob(1, -2.5, ((0, -0.1), (2, -3.0)))
    found = completion_logprobs([Placed(0, likely, 0), Placed(1, unlikely, 1)], Twice())
    assert found["top_logprobs"] == [{"a": -0.1}, {"a": -0.1, "b": -3.0}]
    assert found["token_logprobs"] == [-0.1, -2.5]


def test_a_token_is_among_its_alternatives_even_where_it_is_none_of_the_likeliest():
    found = completion_logprobs([Placed(2, TokenLogprob(2, -9.0, ((0, -0.1),)), 0)], Twice())
    assert found["top_logprobs"] == [{"a": -0.1, "b": -9.0}]


def test_special_tokens_and_minus_infinity_can_be_written_down():
    found = completion_logprobs([Placed(3, TokenLogprob(3, float("-inf")), 5), Placed(0, None, 5)], Twice())
    assert found == {
        "tokens": ["<end>", "a"],
        "token_logprobs": [LEAST, None],
        "top_logprobs": [{"<end>": LEAST}, None],
        "text_offset": [5, 5],
    }


def test_bytes_are_said_where_they_are_known():
    first, half = chat_logprobs([TokenLogprob(104, -0.5), TokenLogprob(0xC3, -1.0)], byte_tokenizer())["content"]
    assert first == {"token": "h", "logprob": -0.5, "bytes": [104], "top_logprobs": []}
    assert half["token"] == "\ufffd" and half["bytes"] is None
