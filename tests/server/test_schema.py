"""Bodies are read field by field, and nothing that is not understood passes."""

import pytest

from looplab.engine.request import DepthParams, RefusedError
from looplab.server.body import parse_object
from looplab.server.errors import ApiError
from looplab.server.schema import NEUTRAL, chat_ask, completion_ask

HI = [{"role": "user", "content": "hi"}]


def completion(**body):
    return completion_ask({"prompt": "a", **body}, max_prompts=128)


def refused(call, *args, **body):
    with pytest.raises(RefusedError) as error:
        call(*args, **body)
    return error.value.code, str(error.value)


@pytest.mark.parametrize(
    ("data", "code", "message"),
    [
        (b"{'a'", "invalid_json", "body is not valid JSON at line 1 column 2"),
        (b'{\n "a": }', "invalid_json", "body is not valid JSON at line 2 column 7"),
        (b"", "invalid_json", "body is not valid JSON at line 1 column 1"),
        (b'{"a":' * 200 + b"1" + b"}" * 200, "invalid_json", "body is not valid JSON here: nested deeper than 64"),
        (b"[" * 5000, "invalid_json", "body is not valid JSON here: nested deeper than 64"),
        (b'{"prompt": "' + b"a" * 19 + b'\xff"}', "invalid_encoding", "body must be UTF-8; bad byte at offset 31"),
        (b"[1]", "invalid_type", "body must be a JSON object; got array"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "invalid_json", "body is not valid JSON: Exceeds the limit"),
    ],
    ids=range(8),
)
def test_bytes_that_are_no_object_are_refused_where_they_are_wrong(data, code, message):
    with pytest.raises(ApiError) as error:
        parse_object(data)
    assert error.value.code == code and error.value.message.startswith(message)


def test_brackets_inside_strings_do_not_nest():
    text = '{"prompt": "' + "[" * 100 + '\\"' + "{" * 100 + '"}'
    assert parse_object(text.encode())["prompt"].count("[") == 100
    assert parse_object(b'{"a": ' + b"[" * 63 + b"]" * 63 + b"}")


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ({"temprature": 1}, "unknown_parameter", "unknown field temprature; did you mean temperature?"),
        ({"zzz": 1}, "unknown_parameter", "unknown field zzz; remove it"),
        ({"prompt": None}, "missing_parameter", "prompt is missing; it must be a string or token ids"),
        ({"prompt": {}}, "invalid_type", "prompt must be a string or token ids; got object"),
        ({"prompt": ["a", 3]}, "invalid_type", "prompt[1] must be a string; got number"),
        ({"prompt": [[1], "a"]}, "invalid_type", "prompt[1] must be a list of token ids; got string"),
        ({"prompt": [1, 2.5]}, "invalid_type", "prompt[1] must be a token id; got 2.5"),
        ({"prompt": [1, True]}, "invalid_type", "prompt[1] must be a token id; got true"),
        ({"prompt": ["a"] * 200}, "too_many_prompts", "200 prompts; limit 128"),
        ({"prompt": "a\ud800"}, "invalid_encoding", "prompt has half of a surrogate pair at character 1; send both"),
        ({"max_tokens": True}, "invalid_type", "max_tokens must be an integer >= 1; got true"),
        ({"max_tokens": "16"}, "invalid_type", 'max_tokens must be an integer >= 1; got "16"'),
        ({"max_tokens": 0}, "invalid_value", "max_tokens must be an integer >= 1; got 0"),
        ({"temperature": float("nan")}, "invalid_value", "temperature must be in [0, 2]; got NaN"),
        ({"n": 17}, "invalid_value", "n must be an integer in 1..16; got 17"),
        ({"logprobs": 21}, "invalid_value", "logprobs must be an integer in 0..20; got 21"),
        ({"logprobs": True}, "invalid_type", "logprobs must be an integer in 0..20; got true"),
        ({"stop": ["a", ""]}, "invalid_value", "stop string 1 is empty"),
        ({"stop": 3}, "invalid_type", "stop must be a string or strings; got number"),
        ({"logit_bias": {"x": 1}}, "invalid_value", "logit_bias must have token ids as keys; got x"),
        ({"logit_bias": {"5": 101}}, "invalid_value", "logit_bias must be in [-100, 100]; got 101"),
        ({"stream": 1}, "invalid_type", "stream must be true or false; got 1"),
        ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options needs stream"),
        ({"stream": True, "stream_options": {"usage": 1}}, "unknown_parameter", "unknown field usage; remove it"),
        ({"best_of": 2}, "unsupported_parameter", "best_of must equal n; got 2; remove best_of"),
        ({"suffix": "x"}, "unsupported_parameter", "suffix is not supported by this server; remove suffix"),
        ({"store": True}, "unsupported_parameter", "store is not supported by this server; remove store"),
        ({"accept_exited_prefix": True}, "unsupported_parameter", "accept_exited_prefix is not supported"),
        ({"num_steps": "4"}, "invalid_depth", 'num_steps must be an integer; got "4"'),
        ({"exit_threshold": "x"}, "invalid_type", 'exit_threshold must be a number; got "x"'),
        ({"exit_threshold": 10**400}, "invalid_value", "exit_threshold must be a finite number"),
        ({"timeout": 0}, "invalid_value", "timeout must be a finite number above 0; got 0"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_fields_of_completions_are_refused_by_name(body, code, message):
    found, said = refused(completion, **body)
    assert found == code and said.startswith(message)


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ({"messages": []}, "invalid_value", "messages must hold at least one message; got none"),
        ({"messages": None}, "missing_parameter", "messages is missing; it must be a list of messages"),
        ({"messages": "hi"}, "invalid_type", "messages must be a list; got string"),
        (
            {"messages": [{"role": "robot", "content": "x"}]},
            "invalid_value",
            "messages[0].role must be system, user or assistant; got robot",
        ),
        ({"messages": [{"role": "user"}]}, "invalid_type", "messages[0].content must be a string; got null"),
        ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "unknown_parameter", "unknown field colour"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "unsupported_parameter",
            "only text content is supported; see messages[0].content[0]",
        ),
        ({"tools": [{}]}, "unsupported_parameter", "tools are not supported by this server; remove tools"),
        ({"functions": [{}]}, "unsupported_parameter", "functions are not supported by this server; remove functions"),
        (
            {"response_format": {"type": "json_object"}},
            "unsupported_parameter",
            "only text content is supported; remove response_format",
        ),
        ({"top_logprobs": 3}, "invalid_value", "top_logprobs needs logprobs; set logprobs to true"),
        ({"logprobs": 3}, "invalid_type", "logprobs must be true or false; got 3"),
        ({"max_tokens": 0}, "invalid_value", "max_tokens must be an integer >= 1; got 0"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "invalid_value", "max_tokens and max_completion_tokens differ"),
        ({"prompt": "x"}, "unknown_parameter", "unknown field prompt"),
        ({"echo": True}, "unknown_parameter", "unknown field echo"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_fields_of_chats_are_refused_by_name(body, code, message):
    found, said = refused(chat_ask, {"messages": HI, **body})
    assert found == code and said.startswith(message)


def test_prompts_come_in_four_forms():
    assert completion(prompt="ab").prompts == ("ab",)
    assert completion(prompt=["a", "b"]).prompts == ("a", "b")
    assert completion(prompt=[1, 2]).prompts == ((1, 2),)
    assert completion(prompt=[[1], [2, 3]]).prompts == ((1,), (2, 3))
    assert completion(prompt=[]).prompts == ((),)


def test_fields_reach_what_is_asked():
    ask = completion(
        n=2, max_tokens=5, temperature=0, top_k=3, stop="x", seed=7, stream=True, logit_bias={"5": -1},
        stream_options={"include_usage": True}, echo=True, logprobs=2, min_steps=1, exit_rule="hazard",
        exit_threshold=1, return_depths=True, priority=0, timeout=3, cache_salt="s", model="m",
    )  # fmt: skip
    assert (ask.n, ask.max_tokens, ask.stream, ask.include_usage, ask.echo) == (2, 5, True, True, True)
    assert (ask.sampling.top_k, ask.sampling.stop, ask.sampling.seed, ask.sampling.logprobs) == (3, ("x",), 7, 2)
    assert ask.sampling.logit_bias == ((5, -1.0),) and ask.sampling.temperature == 0
    assert ask.depth == DepthParams(exit_rule="hazard", exit_threshold=1.0, min_steps=1)
    assert (ask.return_depths, ask.priority, ask.timeout, ask.cache_salt, ask.model) == (True, 0, 3.0, "s", "m")
    chat = chat_ask({"messages": HI, "logprobs": True, "top_logprobs": 4, "max_completion_tokens": 9})
    assert (chat.sampling.logprobs, chat.max_tokens, chat.is_chat) == (4, 9, True)
    assert chat_ask({"messages": HI, "logprobs": True}).sampling.logprobs == 0
    assert chat_ask({"messages": HI}).sampling.logprobs is None


def test_no_output_is_allowed_with_echo():
    assert completion(max_tokens=0, echo=True).max_tokens == 0


@pytest.mark.parametrize("name", NEUTRAL)
def test_the_value_of_an_unsupported_field_that_asks_for_nothing_passes(name):
    for value in (*NEUTRAL[name], None):
        completion(**{name: value})


def test_null_is_as_good_as_absent_and_some_fields_change_nothing():
    body = {"temperature": None, "stop": None, "seed": None, "user": "me", "metadata": {"a": "b"}}
    assert completion(**body) == completion()


def test_an_answer_of_the_api_may_come_back_as_a_message():
    back = {"role": "assistant", "content": "hi", "refusal": None, "tool_calls": None, "annotations": []}
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "n"}
    assert chat_ask({"messages": [back, parts]}).messages == (
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "a\nb", "name": "n"},
    )
