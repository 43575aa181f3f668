"""A server on the loopback for tests: a real socket, in a thread of this process."""

import json
import socket
import threading
import time
from contextlib import contextmanager

import httpx
import uvicorn

from looplab.data.tokenizers import ByteTokenizer
from looplab.engine.tokenizer import PlainTokenizer
from looplab.server.app import build_app
from looplab.server.config import ServerConfig
from server.scripted_engine import ScriptedEngine, spelling

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer(template=TEMPLATE):
    return PlainTokenizer(ByteTokenizer(), chat_template=template)


class Live:
    """What tests need of a running server."""

    def __init__(self, engine, app, port):
        self.engine, self.app, self.port = engine, app, port
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=20)

    def post(self, path, body=None, *, data=None, headers=None):
        sent = json.dumps(body).encode() if data is None else data
        return self.client.post(path, content=sent, headers={"content-type": "application/json", **(headers or {})})

    def complete(self, **body):
        return self.post("/v1/completions", {"prompt": "ab", "max_tokens": 8, **body})

    def events(self, path, body):
        """The data of a stream, parsed; "[DONE]" as it is."""
        found = []
        with self.client.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line:
                    data = line.removeprefix("data: ")
                    found.append(data if data == "[DONE]" else json.loads(data))
        return found

    def wait_until(self, true, seconds=5.0):
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, "waited in vain"
            time.sleep(0.005)


@contextmanager
def serving(
    engine=None, *, script=None, template=TEMPLATE, names=("scripted",), engine_args=None, send_buffer=None, **config
):
    """A server on a free port; `config` is that of ServerConfig."""
    tokenizer = byte_tokenizer(template) if engine is None else engine.tokenizer
    if engine is None:
        engine = ScriptedEngine(tokenizer, script or spelling("hello world, hello"), **(engine_args or {}))
        engine.start()
    app = build_app(engine, tokenizer, ServerConfig(names=names, **config))
    listening = socket.create_server(("127.0.0.1", 0))
    if send_buffer is not None:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)  # connections inherit it
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1, proxy_headers=False)
    )
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.002)
    live = Live(engine, app, listening.getsockname()[1])
    live.server = server
    try:
        yield live
    finally:
        live.client.close()
        server.should_exit = server.force_exit = True
        thread.join()
        engine.close()
