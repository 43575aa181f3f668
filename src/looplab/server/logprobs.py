"""Log-probabilities in both formats of the OpenAI API.

    completions   parallel lists: tokens, token_logprobs, top_logprobs (token text -> value), text_offset
    chat          a list of {token, logprob, bytes, top_logprobs: [{token, logprob, bytes}]}

Two ids may decode to one text: of the values under one text the larger is kept, so that the largest of an entry is
always the likeliest token's own. What scores with `echo` compares the two for equality (lm-eval does).
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from looplab.engine.request import TokenLogprob
from looplab.engine.text import BROKEN
from looplab.engine.tokenizer import ServedTokenizer

LEAST = -9999.0
"""Stands for minus infinity, which JSON does not know."""


class Placed(NamedTuple):
    """A token of a text."""

    token: int
    logprob: TokenLogprob | None
    """None for the first token of a prompt."""
    offset: int
    """Characters of the text before it."""


def completion_logprobs(tokens: Iterable[Placed], tokenizer: ServedTokenizer) -> dict[str, list[Any]]:
    """The `logprobs` object of a choice of /v1/completions."""
    found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for placed in tokens:
        found["tokens"].append(token_text(tokenizer, placed.token))
        found["token_logprobs"].append(None if placed.logprob is None else _finite(placed.logprob.logprob))
        found["top_logprobs"].append(None if placed.logprob is None else _top(placed.logprob, tokenizer))
        found["text_offset"].append(placed.offset)
    return found


def chat_logprobs(tokens: Iterable[TokenLogprob], tokenizer: ServedTokenizer) -> dict[str, Any]:
    """The `logprobs` object of a choice of /v1/chat/completions."""
    return {
        "content": [
            {
                **_entry(one.token, one.logprob, tokenizer),
                "top_logprobs": [_entry(token, value, tokenizer) for token, value in one.top],
            }
            for one in tokens
        ],
        "refusal": None,
    }


def token_text(tokenizer: ServedTokenizer, token: int) -> str:
    """A token alone, as text; special ones as the vocabulary writes them."""
    return tokenizer.decode([token]) or tokenizer.written(token) or ""


def _top(one: TokenLogprob, tokenizer: ServedTokenizer) -> dict[str, float]:
    top: dict[str, float] = {}
    for token, value in (*one.top, (one.token, one.logprob)):
        text = token_text(tokenizer, token)
        top[text] = max(_finite(value), top.get(text, LEAST))
    return top


def _entry(token: int, value: float, tokenizer: ServedTokenizer) -> dict[str, Any]:
    text = token_text(tokenizer, token)
    return {"token": text, "logprob": _finite(value), "bytes": None if BROKEN in text else list(text.encode())}


def _finite(value: float) -> float:
    return max(value, LEAST)
