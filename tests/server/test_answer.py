"""The last chunk of a stream carries the usage, however events and reads fall together."""

from dataclasses import replace

import pytest

from looplab.engine.request import ChoiceEnded, RequestEnded, TokenSaid
from looplab.server.answer import Answer, Header, depth_block
from looplab.server.ask import Sizes, prepare
from looplab.server.schema import completion_ask
from server.live import byte_tokenizer
from server.scripted_engine import Open, ScriptedEngine


def test_guesses_are_told_where_some_were_to_be_made():
    tokenizer = byte_tokenizer()
    work = prepare(
        completion_ask({"prompt": "a"}, max_prompts=1),
        tokenizer,
        None,
        Sizes(context=64, pages=8, page_tokens=16),
        name="r",
    )
    plain = ScriptedEngine(tokenizer, None).usage(Open(work.requests[0], 5, None, tokenizer))
    assert "drafted_tokens" not in depth_block([plain])
    guessed = replace(plain, depth=replace(plain.depth, drafted_tokens=4, accepted_tokens=3, draft_rounds=1))
    found = depth_block([guessed, guessed])
    assert (found["drafted_tokens"], found["accepted_tokens"], found["draft_rounds"]) == (8, 6, 2)


@pytest.mark.parametrize("include", [False, True])
def test_the_end_of_the_last_choice_waits_for_the_usage(include):
    tokenizer = byte_tokenizer()
    body = {"prompt": "a", "stream": True, "stream_options": {"include_usage": include}}
    sizes = Sizes(context=64, pages=8, page_tokens=16)
    work = prepare(completion_ask(body, max_prompts=1), tokenizer, None, sizes, name="r")
    answer = Answer(work, Header(id="r", created=0, model="m", fingerprint="f"), tokenizer, [5])
    answer.take(0, TokenSaid(choice=0, token=98, text="b", steps=1))
    answer.take(0, ChoiceEnded(choice=0, reason="stop", text="c"))
    (chunk,) = answer.chunks()
    assert chunk["choices"][0]["text"] == "bc"
    assert chunk["choices"][0]["finish_reason"] == ("stop" if include else None)
    one = Open(work.requests[0], 5, None, tokenizer)
    one.counts = [1]
    answer.take(0, RequestEnded(usage=ScriptedEngine(tokenizer, None).usage(one)))
    (last,) = answer.chunks()
    assert last["usage"]["completion_tokens"] == 1
    assert last["choices"] == [] if include else last["choices"][0]["finish_reason"] == "stop"
