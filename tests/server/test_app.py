"""The routes over a real socket, with an engine that says what a script says."""

import json
import socket
import threading
import time

import pytest

from looplab.engine.request import RequestFailed
from server.live import serving
from server.scripted_engine import with_facts

HI = [{"role": "user", "content": "hi"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def server():
    with serving(names=("scripted", "alias")) as live:
        yield live


def error(response):
    found = response.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return response.status_code, found["code"], found["message"]


def http_post(path, body):
    """The bytes of a request, for a socket of one's own."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def text_of(events):
    """Text of choice 0 of a stream of completions."""
    return "".join(choice["text"] for event in events[:-1] for choice in event["choices"] if choice["index"] == 0)


def test_a_completion_has_text_reason_seed_and_depth(server):
    body = server.complete(max_tokens=5, seed=3, return_depths=True).json()
    assert body["object"] == "text_completion" and body["model"] == "scripted"
    assert body["system_fingerprint"] == "fp_scripted"
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"], choice["seed"]) == ("hello", "length", 3)
    assert choice["depths"] == [4, 2, 2, 2, 2]
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 5,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
        "depth": {
            "exit_rule": "full",
            "threshold": None,
            "max_steps": 4,
            "prefill_steps": 4,
            "decode_tokens": 4,
            "mean": 2.0,
            "histogram": {"2": 4},
            "applications": 8,
            "full_depth_applications": 16,
            "saved_flops_fraction": 0.4,
            "kv_rule": "last_exited",
            "reuse": "unknown",
            "cached_exited_tokens": 0,
            "warnings": [],
        },
    }


def test_prompts_and_choices_are_ordered_by_index(server):
    body = server.complete(prompt=["a", "b", "c"], n=2, max_tokens=3).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3, 4, 5]
    assert [request.tokens for request in server.engine.seen[-3:]] == [(97,), (98,), (99,)]
    assert body["usage"]["prompt_tokens"] == 3 and body["usage"]["completion_tokens"] == 18
    assert body["usage"]["depth"]["histogram"] == {"2": 12}
    seeds = [choice["seed"] for choice in body["choices"]]
    assert seeds[0] == seeds[1] != seeds[2], "a seed belongs to a prompt"


def test_a_stream_adds_up_to_the_whole_answer(server):
    asked = {"prompt": "ab", "max_tokens": 30, "stop": ["lo, w"], "logprobs": 1, "return_depths": True, "seed": 1}
    whole = server.post(COMPLETIONS, asked).json()
    events = server.events(COMPLETIONS, asked)
    assert events[-1] == "[DONE]" and "usage" in events[-2]
    assert text_of(events) == whole["choices"][0]["text"] == "hello world, hello"
    assert events[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert events[-2]["usage"] == whole["usage"]
    parts = [event["choices"][0] for event in events[:-1]]
    assert [depth for part in parts for depth in part["depths"]] == whole["choices"][0]["depths"]
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [one for part in parts for one in part["logprobs"][field]] == whole["choices"][0]["logprobs"][field]


def test_usage_comes_alone_where_it_was_asked_for(server):
    asked = {"prompt": "a", "max_tokens": 4, "n": 2, "stream_options": {"include_usage": True}}
    events = server.events(COMPLETIONS, asked)
    assert events[-1] == "[DONE]" and events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == 8
    assert all(event["usage"] is None for event in events[:-2])
    ends = [c["index"] for e in events[:-2] for c in e["choices"] if c["finish_reason"]]
    assert sorted(ends) == [0, 1]


def test_a_chat_goes_through_the_template(server):
    body = server.post(CHAT, {"messages": HI, "max_tokens": 5, "logprobs": True, "top_logprobs": 2}).json()
    assert bytes(server.engine.seen[-1].tokens) == b"<user>hi<assistant>"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello", "refusal": None}
    first = choice["logprobs"]["content"][0]
    assert (first["token"], first["logprob"], first["bytes"]) == ("h", -0.25, [104])
    assert [top["token"] for top in first["top_logprobs"]] == ["h", "B"]
    assert body["object"] == "chat.completion"


def test_a_chat_without_a_limit_gets_the_rest_of_the_context(server):
    server.post(CHAT, {"messages": HI})
    request = server.engine.seen[-1]
    assert len(request.tokens) + request.sampling.max_tokens == 1024


def test_a_streamed_chat_says_the_role_first_and_once(server):
    events = server.events(CHAT, {"messages": HI, "max_tokens": 40})
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert deltas[0]["role"] == "assistant" and all("role" not in delta for delta in deltas[1:])
    assert "".join(delta["content"] for delta in deltas) == "hello world, hello"
    assert events[0]["object"] == "chat.completion.chunk"
    assert events[-2]["choices"][0]["finish_reason"] == "stop"


def test_echo_with_logprobs_reads_the_prompt_as_lm_eval_wants_it(server):
    asked = {"prompt": [[97, 98, 99], [100]], "echo": True, "max_tokens": 1, "logprobs": 1, "temperature": 0, "seed": 1}
    body = server.post(COMPLETIONS, asked).json()
    first, second = body["choices"]
    assert first["text"] == "abch" and second["text"] == "dh"
    found = first["logprobs"]
    assert found["token_logprobs"] == [None, -0.5, -0.5, -0.25]
    assert found["top_logprobs"][0] is None and found["top_logprobs"][1] == {"b": -0.5, "A": -3.0}
    assert found["tokens"] == ["a", "b", "c", "h"] and found["text_offset"] == [0, 1, 2, 3]
    assert second["logprobs"]["token_logprobs"] == [None, -0.25]


def test_echo_without_output_says_the_prompt_alone(server):
    body = server.complete(prompt="xyz", echo=True, max_tokens=0, logprobs=0).json()
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("xyz", "length")
    assert len(choice["logprobs"]["tokens"]) == 3
    assert body["usage"]["completion_tokens"] == 0 and body["usage"]["prompt_tokens"] == 3
    events = server.events(COMPLETIONS, {"prompt": "xyz", "echo": True, "max_tokens": 0})
    assert text_of(events) == "xyz"


def test_tokens_go_both_ways(server):
    assert server.post("/tokenize", {"prompt": "h\u00e9"}).json() == {"tokens": [104, 195, 169], "count": 3}
    assert server.post("/detokenize", {"tokens": [104, 195, 169]}).json() == {"prompt": "h\u00e9"}
    assert error(server.post("/detokenize", {"tokens": [999]}))[:2] == (400, "invalid_token")
    assert error(server.post("/tokenize", {}))[:2] == (400, "missing_parameter")
    info = server.client.get("/tokenizer_info").json()
    assert set(info) == {"eos_token", "bos_token", "pad_token", "chat_template"} and info["chat_template"]


def test_models_say_what_they_can(server):
    found = server.client.get("/v1/models").json()
    assert [one["id"] for one in found["data"]] == ["scripted", "alias"]
    assert found["data"][0]["looplab"]["exit_rules"] == ["full", "hazard", "latent"]
    assert server.complete(model="alias").json()["model"] == "alias"


# Every row of the table of bad input that does not need a server of its own.
ROWS = [
    (1, {"data": b'{"a" 1}'}, 400, "invalid_json", "line 1 column 6"),
    (2, {"data": b'{"prompt": "\xff"}'}, 400, "invalid_encoding", "bad byte at offset 12"),
    (3, {"data": b'{"prompt": "' + b"a" * (5 * 2**20) + b'"}'}, 413, "body_too_large", "body is 5.0 MiB; limit 4 MiB"),
    (
        4,
        {"data": b"{}", "headers": {"content-type": "text/plain"}},
        415,
        "unsupported_media_type",
        "send application/json",
    ),
    (5, {"temprature": 1}, 400, "unknown_parameter", "unknown field temprature; did you mean temperature?"),
    (6, {"prompt": {}}, 400, "invalid_type", "prompt must be a string or token ids; got object"),
    (6, {"prompt": None}, 400, "missing_parameter", "prompt is missing"),
    (7, {"prompt": [1, 2, 3, 99999]}, 400, "invalid_token", "token id 99999 at position 3; vocabulary has 259"),
    (7, {"prompt": [-1]}, 400, "invalid_token", "token id -1 at position 0"),
    (8, {"prompt": ["a"] * 200}, 400, "too_many_prompts", "200 prompts; limit 128"),
    (9, {"prompt": "a" * 500, "max_tokens": 600}, 400, "context_length_exceeded", "lower max_tokens to 524"),
    (11, {"max_tokens": True}, 400, "invalid_type", "got true"),
    (11, {"max_tokens": -1}, 400, "invalid_value", "got -1"),
    (12, {"temperature": 3}, 400, "invalid_value", "temperature must be in [0, 2]; got 3"),
    (13, {"stop": ["a"] * 17}, 400, "invalid_value", "17 stop strings; limit 16"),
    (13, {"logit_bias": {"300": 1}}, 400, "invalid_value", "logit_bias has token id 300; vocabulary has 259"),
    (14, {"tools": [{}]}, 400, "unsupported_parameter", "tools are not supported by this server; remove tools"),
    (15, {"response_format": {"type": "json_object"}}, 400, "unsupported_parameter", "only text content is supported"),
    (18, {"model": "foo"}, 404, "model_not_found", "no model foo; served: scripted, alias"),
    (19, {"num_steps": 9}, 400, "invalid_depth", "num_steps must be in 1..8; trained with 4"),
    (19, {"draft_steps": 8}, 400, "invalid_depth", "draft_steps must be in 1..7, below the 8 steps of a token, or 0"),
    (19, {"draft_steps": True}, 400, "invalid_depth", "draft_steps must be an integer; got true"),
    (19, {"draft_steps": 1, "draft_tokens": 9}, 400, "invalid_depth", "draft_tokens must be in 1..4"),
    (19, {"draft_steps": 1, "exit_rule": "latent", "exit_threshold": 1}, 400, "invalid_depth", "latent may stop them"),
    (20, {"exit_rule": "kl", "exit_threshold": 1}, 400, "exit_unavailable", "start with --allow-costly-exit"),
    (22, {"exit_rule": "hazard", "exit_threshold": 1.5}, 400, "invalid_value", "threshold must be in (0, 1]"),
    (24, {"headers": {"host": "evil.example"}}, 421, "bad_host", "host not allowed"),
]


@pytest.mark.parametrize(("row", "sent", "status", "code", "message"), ROWS, ids=lambda value: str(value)[:30])
def test_bad_input_gets_the_status_and_code_of_the_table(server, row, sent, status, code, message):
    before = len(server.engine.seen)
    if "data" in sent or "headers" in sent:
        response = server.post(COMPLETIONS, {"prompt": "a"}, **sent)
    else:
        response = server.complete(**sent)
    found = error(response)
    assert found[:2] == (status, code) and message in found[2], found
    assert response.headers["x-should-retry"] == "false"
    assert len(server.engine.seen) == before, "the engine was asked"


def test_a_chat_of_unknown_roles_is_refused(server):
    found = error(server.post(CHAT, {"messages": [{"role": "robot", "content": "x"}]}))
    assert found == (400, "invalid_value", "messages[0].role must be system, user or assistant; got robot")


def test_wrong_methods_and_routes_name_the_right_ones(server):
    response = server.client.get(COMPLETIONS)
    assert error(response) == (405, "method_not_allowed", "/v1/completions takes POST; got GET")
    assert response.headers["allow"] == "POST"
    assert error(server.client.get("/v1/model")) == (404, "not_found", "no route /v1/model; did you mean /v1/models?")


def test_a_request_id_is_echoed_and_held_while_it_is_in_flight():
    with serving() as live:
        live.engine.go.clear()
        given = {"x-request-id": "mine"}
        done = []
        first = threading.Thread(target=lambda: done.append(live.post(COMPLETIONS, {"prompt": "a"}, headers=given)))
        first.start()
        live.wait_until(lambda: live.engine.live)
        second = live.post(COMPLETIONS, {"prompt": "a"}, headers=given)
        assert error(second) == (409, "duplicate_request", "request id is in use")
        assert second.headers["x-should-retry"] == "false"
        live.engine.go.set()
        first.join()
        assert done[0].status_code == 200 and done[0].headers["x-request-id"] == "mine"
        assert live.post(COMPLETIONS, {"prompt": "a"}, headers=given).status_code == 200
        bad = live.post(COMPLETIONS, {"prompt": "a"}, headers={"x-request-id": "a b"})
        assert error(bad)[:2] == (400, "invalid_value")


def test_a_full_queue_says_when_to_come_again():
    with serving(engine_args={"max_waiting": 1}) as live:
        live.engine.go.clear()
        waiting = threading.Thread(target=live.complete)
        waiting.start()
        live.wait_until(lambda: live.engine.live)
        response = live.complete()
        assert error(response) == (429, "queue_full", "1 requests waiting; retry in 7 s")
        assert response.headers["retry-after"] == "7" and "x-should-retry" not in response.headers
        several = live.complete(prompt=["a", "b"])
        assert several.status_code == 429
        assert live.client.get("/ready").status_code == 503
        live.engine.go.set()
        waiting.join()
        live.wait_until(lambda: not live.engine.live)
        assert live.complete(prompt=["a", "b"]).status_code == 429, "the second prompt finds the queue full"
        live.wait_until(lambda: not live.engine.live)


FAILURES = [
    (RequestFailed(code="deadline_exceeded", message="12 of 64 tokens after 30 s"), 504, "false"),
    (RequestFailed(code="non_finite", message="non-finite logits at token 5, step 3"), 500, "false"),
    (RequestFailed(code="kv_exhausted", message="the cache is full"), 503, None),
    (RequestFailed(code="internal", message="the engine stopped"), 500, None),
]


def test_what_fails_in_the_engine_has_a_status_of_its_own():
    with serving() as live:
        for failed, status, retry in FAILURES:
            live.engine.fail_at = {3: failed}
            response = live.complete()
            assert error(response) == (status, failed.code, failed.message)
            assert response.headers.get("x-should-retry") == retry
            events = live.events(COMPLETIONS, {"prompt": "a"})
            assert events[-1]["error"]["code"] == failed.code, "an error in a stream is its last event"
            assert "".join(c["text"] for e in events[:-1] for c in e["choices"]) == "hel"
            live.engine.fail_at = {0: failed}
            assert live.complete(stream=True).status_code == status, "before the first token the status says it"
            assert live.complete(prompt=["a", "b"]).status_code == status
            live.wait_until(lambda: not live.engine.live)


def test_deadlines_reach_the_engine():
    with serving(engine_args={"tick_seconds": 0.05}) as live:
        found = error(live.complete(timeout=0.12, max_tokens=100))
        assert found[:2] == (504, "deadline_exceeded") and "of 100 tokens after 0.12 s" in found[2]


def test_keys_are_asked_for_and_salt_the_cache():
    with serving(keys=("one", "two")) as live:
        for sent in ({}, {"authorization": "Bearer three"}, {"authorization": "Basic one"}):
            response = live.post(COMPLETIONS, {"prompt": "a"}, headers=sent)
            assert error(response) == (401, "invalid_api_key", "missing or wrong bearer token")
            assert response.headers["www-authenticate"] == "Bearer"
        for key in ("one", "two", "one"):
            assert (
                live.post(COMPLETIONS, {"prompt": "a"}, headers={"authorization": f"Bearer {key}"}).status_code == 200
            )
        salts = [request.cache_salt for request in live.engine.seen]
        assert salts[0] == salts[2] != salts[1] and "one" not in salts[0]
        assert live.client.get("/health").status_code == 200 and live.client.get("/").status_code == 200
        assert live.client.get("/metrics").status_code == 401


def test_no_chat_without_a_template():
    with serving(template=None) as live:
        found = error(live.post(CHAT, {"messages": HI}))
        assert found == (400, "no_chat_template", "the tokenizer has no chat template; use /v1/completions")


def test_a_template_that_refuses_messages_says_so():
    with serving(template="{{ raise_exception('roles must take turns') }}") as live:
        found = error(live.post(CHAT, {"messages": HI}))
        assert found[:2] == (400, "invalid_value") and "roles must take turns" in found[2]


def test_what_never_fits_the_cache_and_exits_that_it_forbids_are_refused():
    facts = with_facts(pages=4, exits_refused="depth_indexed forbids exits; use last_exited")
    with serving(engine_args={"facts": facts}) as live:
        assert error(live.complete(max_tokens=200)) == (
            400, "kv_too_small", "needs 13 pages; cache has 4; raise --kv-fraction or --num-pages",
        )  # fmt: skip
        found = error(live.complete(exit_rule="hazard", exit_threshold=0.5))
        assert found == (400, "exit_refused", "depth_indexed forbids exits; use last_exited")
        chat = live.post(CHAT, {"messages": HI})
        assert chat.status_code == 200 and live.engine.seen[-1].sampling.max_tokens == 64 - 19


def test_an_empty_prompt_begins_with_the_token_that_begins_texts(server):
    assert server.complete(prompt="").status_code == 200
    assert server.engine.seen[-1].tokens == (256,)


def test_a_client_that_hangs_up_frees_its_requests():
    with serving(script=lambda *_: 97, engine_args={"tick_seconds": 0.005}) as live:
        with live.client.stream("POST", COMPLETIONS, json={"prompt": "a", "max_tokens": 900, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            assert live.engine.live
        live.wait_until(lambda: not live.engine.live)
        with socket.create_connection(("127.0.0.1", live.port)) as raw:
            raw.sendall(http_post(COMPLETIONS, b'{"prompt": ["a", "b"], "max_tokens": 900}'))
            live.wait_until(lambda: len(live.engine.live) == 2)
        live.wait_until(lambda: not live.engine.live)
        assert not live.app.state.front.running


def test_a_slow_reader_is_dropped_and_others_are_not_held_up():
    paced = {"tick_seconds": 0.005, "facts": with_facts(context=10**6, pages=10**6)}
    with serving(script=lambda *_: 97, send_timeout=0.3, send_buffer=4096, engine_args=paced) as live, \
            socket.socket() as slow:  # fmt: skip
        live.app.state.front.drop = lambda client: [
            one.transport.abort() for one in live.server.server_state.connections if one.client == tuple(client)
        ]
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", live.port))
        asked = {"prompt": "a", "max_tokens": 400_000, "stream": True, "logprobs": 5, "n": 8}
        slow.sendall(http_post(COMPLETIONS, json.dumps(asked).encode()))
        live.wait_until(lambda: live.engine.live)
        long = next(iter(live.engine.live))
        began = time.monotonic()
        while long in live.engine.live:  # nobody reads from `slow`
            assert live.complete(max_tokens=4).status_code == 200
            assert time.monotonic() - began < 60, "a slow reader is kept for ever"
        live.wait_until(lambda: len(live.server.server_state.connections) <= 1, 20)


def test_metrics_are_read_by_the_parser_of_prometheus(server):
    from prometheus_client.parser import text_string_to_metric_families

    server.complete()
    server.complete(temprature=1)
    families = {one.name: one for one in text_string_to_metric_families(server.client.get("/metrics").text)}
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert samples["looplab_requests_total", (("route", COMPLETIONS), ("status", "200"))] >= 1
    assert samples["looplab_rejected_total", (("code", "unknown_parameter"),)] >= 1
    assert samples["looplab_exit_steps_bucket", (("le", "2"),)] == 3
    assert samples["looplab_exit_steps_bucket", (("le", "+Inf"),)] == 4 and samples["looplab_exit_steps_sum", ()] == 10
    assert {
        "looplab_requests", "looplab_requests_resident", "looplab_queue_length", "looplab_ttft_seconds",
        "looplab_tpot_seconds", "looplab_request_seconds", "looplab_queue_seconds", "looplab_exit_steps",
        "looplab_applications", "looplab_applications_wasted", "looplab_launches", "looplab_launch_rows",
        "looplab_launch_seconds", "looplab_kv_pages", "looplab_kv_bytes", "looplab_prefix_tokens",
        "looplab_preemptions", "looplab_tokens", "looplab_refills", "looplab_graph_fallbacks",
        "looplab_numeric_errors", "looplab_rejected", "looplab_drafted_tokens", "looplab_accepted_tokens",
        "looplab_draft_rounds",
    } <= set(families)  # fmt: skip
    server.client.get("/no/such/secret")
    assert "secret" not in server.client.get("/metrics").text, "a label holds what a client wrote"


def test_no_origin_may_read_unless_it_was_named(server):
    asked = {"origin": "https://example.org"}
    assert "access-control-allow-origin" not in server.client.get("/health", headers=asked).headers
    with serving(cors=("https://example.org",)) as live:
        found = live.client.get("/health", headers=asked).headers
        assert found["access-control-allow-origin"] == "https://example.org"


def test_the_page_loads_nothing_from_elsewhere_and_can_be_left_out(server):
    response = server.client.get("/")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert "http://" not in response.text and "https://" not in response.text
    assert "innerHTML" not in response.text and "insertAdjacent" not in response.text
    with serving(page=False) as live:
        assert live.client.get("/").status_code == 404


def test_a_fault_of_ours_shows_no_traceback(server, monkeypatch):
    monkeypatch.setattr(server.app.state.front, "sizes", None)
    found = error(server.complete())
    assert found == (500, "internal", "internal error; see the server's log")
