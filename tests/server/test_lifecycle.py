"""Listening, draining, ending: a process in a thread, told what signals would tell it."""

import asyncio
import json
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace

import httpx
import pytest

from looplab.server.app import build_app
from looplab.server.config import ServerConfig
from looplab.server.lifecycle import DIED, DONE, INTERRUPTED, Process, bind, check_binding, is_local, read_keys
from server.live import byte_tokenizer
from server.scripted_engine import FACTS, ScriptedEngine


class Running:
    """A process around a scripted engine that says the letter a."""

    def __init__(self, *, tick_seconds=0.01, send_buffer=None, **config):
        tokenizer = byte_tokenizer()
        facts = replace(FACTS, context=10**6, pages=10**6)
        self.engine = ScriptedEngine(tokenizer, lambda *_: 97, tick_seconds=tick_seconds, facts=facts)
        self.engine.start()
        app = build_app(self.engine, tokenizer, ServerConfig(names=("m",), **{"drain_seconds": 5.0} | config))
        self.listening = bind("127.0.0.1", 0)
        if send_buffer is not None:
            self.listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)  # connections inherit it
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}"
        self.code, self.loop = None, None
        self.process = Process(app, self.listening)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        while self.loop is None or not self.process._server.started:
            time.sleep(0.005)

    def _run(self):
        async def run():
            self.loop = asyncio.get_running_loop()
            self.code = await self.process.run()

        asyncio.run(run())

    def told(self, sig):
        self.loop.call_soon_threadsafe(self.process.told, sig)

    def stream(self, tokens, then):
        """Streams an answer; `then` is called after its first event. Returns the data of all events."""
        asked = {"prompt": "x", "max_tokens": tokens, "stream": True}
        found = []
        with httpx.stream("POST", f"{self.url}/v1/completions", json=asked, timeout=30) as response:
            for line in response.iter_lines():
                if line:
                    found.append(line.removeprefix("data: "))
                if len(found) == 1 and then is not None:
                    then()
                    then = None
        return found

    def end(self):
        self.thread.join(timeout=20)
        assert not self.thread.is_alive(), "the process did not end"
        self.engine.close()
        self.listening.close()
        return self.code


def test_sigterm_lets_answers_finish_and_takes_nothing_new():
    running = Running(drain_seconds=60.0)
    seen = {}

    def during():
        running.engine.go.clear()  # the answer waits until all questions are answered
        running.told(signal.SIGTERM)
        while not running.engine.draining:
            time.sleep(0.005)
        seen["new"] = httpx.post(f"{running.url}/v1/completions", json={"prompt": "a"})
        seen["ready"] = httpx.get(f"{running.url}/ready")
        seen["health"] = httpx.get(f"{running.url}/health")
        running.engine.go.set()

    events = running.stream(100, during)
    assert events[-1] == "[DONE]" and json.loads(events[-2])["usage"]["completion_tokens"] == 100
    assert running.end() == DONE
    assert seen["new"].status_code == seen["ready"].status_code == 503 and seen["health"].status_code == 200
    assert seen["new"].json()["error"] | {"type": ""} == {
        "message": "server is shutting down", "type": "", "param": None, "code": "not_ready",
    }  # fmt: skip
    assert "retry-after" in seen["new"].headers


def test_what_is_not_done_when_the_time_is_up_ends_with_an_error():
    running = Running(drain_seconds=0.2)
    events = running.stream(1000, lambda: running.told(signal.SIGINT))
    assert json.loads(events[-1])["error"]["code"] == "not_ready"
    assert running.end() == INTERRUPTED


def test_a_second_signal_ends_at_once():
    running = Running(drain_seconds=30.0)
    with pytest.raises(httpx.HTTPError):
        running.stream(1000, lambda: (running.told(signal.SIGTERM), running.told(signal.SIGTERM)))
    assert running.end() == DONE


def test_the_death_of_the_engine_ends_the_process():
    running = Running()
    events = running.stream(1000, running.engine.die)
    assert json.loads(events[-1])["error"] == {
        "message": "the engine stopped", "type": "server_error", "param": None, "code": "internal",
    }  # fmt: skip
    assert running.end() == DIED


def test_a_port_in_use_is_refused():
    with bind("127.0.0.1", 0) as first, pytest.raises(OSError, match="in use"):
        bind("127.0.0.1", first.getsockname()[1])


def test_only_this_machine_is_served_without_a_key():
    assert is_local("127.0.0.1") and is_local("localhost") and is_local("::1") and is_local("127.9.9.9")
    assert not is_local("0.0.0.0") and not is_local("example.org")
    check_binding("127.0.0.1", (), insecure=False)
    check_binding("0.0.0.0", ("key",), insecure=False)
    check_binding("0.0.0.0", (), insecure=True)
    with pytest.raises(ValueError, match=r"--host must be a local address where no API key is set\. Got 0\.0\.0\.0"):
        check_binding("0.0.0.0", (), insecure=False)


def test_keys_come_from_a_file_and_the_environment(tmp_path):
    (tmp_path / "keys").write_text("# mine\none\n\n two \n", encoding="utf-8")
    assert read_keys(tmp_path / "keys", {"LOOPLAB_API_KEYS": "three, one"}) == ("one", "two", "three")
    assert read_keys(None, {}) == ()
    (tmp_path / "empty").write_text("# none\n", encoding="utf-8")
    with pytest.raises(ValueError, match="--keys must be a file with a key per line"):
        read_keys(tmp_path / "empty", {})


def test_ipv6_is_listened_on():
    try:
        listening = bind("::1", 0)
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    with listening:
        assert listening.family == socket.AF_INET6


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_stops_reading_is_dropped_and_others_are_served(stream):
    running = Running(tick_seconds=0.01, send_buffer=4096, send_timeout=0.5)
    asked = {"prompt": "a", "max_tokens": 100_000 if stream else 100, "stream": stream, "logprobs": 5, "n": 8}
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    unsent, answered = [0], 0
    with socket.socket() as slow, httpx.Client(base_url=running.url) as fast:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(running.listening.getsockname())
        slow.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + body)
        name, end = slow.getsockname(), time.monotonic() + 60
        held = []
        while not held or any(one.client == name for one in held):
            response = fast.post("/v1/completions", json={"prompt": "b", "max_tokens": 2}, timeout=60)
            answered += response.status_code == 200
            held = list(running.process._server.server_state.connections)
            unsent += [one.transport.get_write_buffer_size() for one in held if one.client == name]
            assert time.monotonic() < end, "a client that does not read is kept for ever"
        taken = b""
        with suppress(ConnectionResetError):
            while piece := slow.recv(65536):
                taken += piece
    whole = b"[DONE]" if stream else b'"usage"'
    assert whole not in taken, "the client got all of it"
    while running.engine.live:
        assert time.monotonic() < end, "the request of a dropped client goes on"
        time.sleep(0.005)
    assert answered == len(running.engine.seen) - 1 > 0
    assert max(unsent) > 0
    if stream:
        assert max(unsent) < 2**18, "more waits than the transport takes before it pauses, and one chunk"
    running.told(signal.SIGTERM)
    assert running.end() == DONE
