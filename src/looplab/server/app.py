"""The routes: an application that any ASGI server can run, alone or as one of many replicas.

    app = build_app(engine, tokenizer, ServerConfig(names=("demo",)))

Whoever builds it starts the engine before, and closes it after. `app.state.front` is what a process around it needs: it
drains, and it ends what is open.
"""

import asyncio
import base64
import hashlib
import itertools
import re
import time
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from looplab._registry import did_you_mean
from looplab.engine.check import check_prompt
from looplab.engine.request import BusyError, RefusedError, RequestFailed
from looplab.engine.tokenizer import ServedTokenizer
from looplab.server.answer import Answer, Header
from looplab.server.ask import ServedEngine, Sizes, Work, check_model, prepare
from looplab.server.body import check_media_type, check_size, parse_object
from looplab.server.chat import ChatTemplate, special_text
from looplab.server.config import ServerConfig
from looplab.server.errors import RETRY_AFTER, ApiError, api_error
from looplab.server.guard import Guard
from looplab.server.metrics import Metrics
from looplab.server.schema import boolean, chat_ask, completion_ask, known_fields, text, token_ids
from looplab.server.stream import EventStream, HangUp, Running, whole

GONE = 499
"""Status of an answer whose reader has hung up; nobody sees it but the counter."""
SHUTTING_DOWN = "server is shutting down"
DISCARDED_BODIES = 16
"""A body above the limit is read and thrown away up to so many limits, so that the client reads the refusal."""
PAGE = "page.html"


class Front:
    """What all routes share."""

    def __init__(self, engine: ServedEngine, tokenizer: ServedTokenizer, config: ServerConfig):
        self.engine, self.tokenizer, self.config = engine, tokenizer, config
        self.card = engine.describe()
        self.sizes = Sizes.of(self.card)
        source = tokenizer.chat_template
        self.template = None if source is None else ChatTemplate(source, tokenizer)
        self.metrics = Metrics()
        self.running: set[Running] = set()
        self.draining = False
        self.drop: Callable[[Any], None] = lambda client: None
        """Closes the connection of a client (host, port) at once; set by who listens."""
        self._numbers = itertools.count()

    def fail_open(self, code: str, message: str) -> None:
        """Ends every open answer with an error."""
        for running in self.running:
            running.fail(code, message)

    async def completions(self, http: Any) -> Any:
        """POST /v1/completions."""
        return await self._generate(http, chat=False)

    async def chat_completions(self, http: Any) -> Any:
        """POST /v1/chat/completions."""
        return await self._generate(http, chat=True)

    async def models(self, http: Any) -> Any:
        """GET /v1/models."""
        keys = ("trained_steps", "max_steps", "exit_rules", "kv_rule", "reuse", "context", "numerics")
        block = {key: self.card[key] for key in keys} | {"chat": self.template is not None}
        return _json(
            {
                "object": "list",
                "data": [
                    {"id": name, "object": "model", "created": 0, "owned_by": "looplab", "looplab": block}
                    for name in self.config.names
                ],
            }
        )

    async def tokenize(self, http: Any) -> Any:
        """POST /tokenize."""
        body = parse_object(await self._body(http))
        known_fields(body, ("model", "prompt", "add_special_tokens"))
        prompt, special = text("prompt", body.get("prompt")), body.get("add_special_tokens")
        wanted = True if special is None else boolean("add_special_tokens", special)
        tokens = await asyncio.to_thread(self.tokenizer.encode, prompt, wanted)
        return _json({"tokens": tokens, "count": len(tokens)})

    async def detokenize(self, http: Any) -> Any:
        """POST /detokenize."""
        body = parse_object(await self._body(http))
        known_fields(body, ("model", "tokens"))
        tokens = token_ids("tokens", body.get("tokens"))
        if tokens:
            check_prompt(tokens, self.tokenizer.vocab, "tokens")
        return _json({"prompt": self.tokenizer.decode(tokens)})

    async def tokenizer_info(self, http: Any) -> Any:
        """GET /tokenizer_info."""
        special = {f"{name}_token": special_text(self.tokenizer, name) for name in ("eos", "bos", "pad")}
        return _json({**special, "chat_template": self.tokenizer.chat_template})

    async def health(self, http: Any) -> Any:
        """GET /health: whether the engine can still answer."""
        if not self.engine.alive:
            raise ApiError("not_ready", "the engine has stopped", retry_after=RETRY_AFTER)
        return _json({"status": "ok"})

    async def ready(self, http: Any) -> Any:
        """GET /ready: whether a request that came now would be taken."""
        if self.draining:
            raise ApiError("not_ready", SHUTTING_DOWN, retry_after=RETRY_AFTER)
        if not self.engine.ready:
            raise ApiError("not_ready", "the engine is busy or has stopped", retry_after=RETRY_AFTER)
        return _json({"status": "ready"})

    async def show_metrics(self, http: Any) -> Any:
        """GET /metrics."""
        from starlette.responses import Response

        stats = await asyncio.to_thread(self.engine.stats)
        return Response(self.metrics.text(stats), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def page(self, http: Any) -> Any:
        """GET /: the built-in page, which may run its own script and ask its own server, and nothing else."""
        from starlette.responses import HTMLResponse

        html = files("looplab.server").joinpath(PAGE).read_text(encoding="utf-8")
        return HTMLResponse(html, headers={"content-security-policy": page_policy(html)})

    async def _generate(self, http: Any, *, chat: bool) -> Any:
        if self.draining:
            raise ApiError("not_ready", SHUTTING_DOWN, retry_after=RETRY_AFTER)
        data = await self._body(http)
        name = f"{http.state.name}#{next(self._numbers)}"
        work = await asyncio.to_thread(self._work, data, chat, name, http.state.key)
        header = Header(
            id=http.state.name,
            created=int(time.time()),
            model=work.ask.model or self.config.names[0],
            fingerprint=self.card["fingerprint"],
        )
        return await self._answer(http, Running(self.engine, work, http.receive), work, header)

    async def _answer(self, http: Any, running: Running, work: Work, header: Header) -> Any:
        async with _Open(self, running) as opened:
            answer = Answer(work, header, self.tokenizer, running.seeds)
            if not work.ask.stream:
                return _json(await whole(running, answer))
            first = await running.take()  # until something is known, the status may still be that of an error
            if isinstance(first[0][1], RequestFailed):
                raise api_error(first[0][1])
            opened.hand_over()
            return EventStream(
                running,
                answer,
                first,
                send_timeout=self.config.send_timeout,
                drop=lambda: self.drop(http.scope.get("client")),
                ended=lambda: self.running.discard(running),
            )

    def _work(self, data: bytes, chat: bool, name: str, salt: str) -> Work:
        """Bytes to requests; in a thread of its own, as a long prompt takes a while to encode."""
        body = parse_object(data)
        ask = chat_ask(body) if chat else completion_ask(body, max_prompts=self.config.max_prompts)
        check_model(ask.model, self.config.names)
        work = prepare(ask, self.tokenizer, self.template, self.sizes, name=name, salt=salt)
        for request in work.requests:
            self.engine.check(request)
        return work

    async def _body(self, http: Any) -> bytes:
        from starlette.requests import ClientDisconnect

        check_media_type(http.headers.get("content-type"))
        limit, size, parts = self.config.max_body_bytes, 0, []
        try:
            async for part in http.stream():
                size += len(part)
                if size <= limit:
                    parts.append(part)
                else:
                    parts.clear()
                if size > DISCARDED_BODIES * limit:
                    break
        except ClientDisconnect:
            raise HangUp from None
        check_size(size, limit)
        return b"".join(parts)


class _Open:
    """Requests that are under way, known to the front; they end with the block unless a stream takes them over."""

    def __init__(self, front: Front, running: Running):
        self._front, self._running, self._handed = front, running, False

    async def __aenter__(self) -> "_Open":
        await self._running.__aenter__()
        self._front.running.add(self._running)
        return self

    def hand_over(self) -> None:
        """Somebody else ends them."""
        self._handed = True

    async def __aexit__(self, *error: object) -> None:
        if not self._handed:
            self._front.running.discard(self._running)
            await self._running.__aexit__()


def build_app(engine: ServedEngine, tokenizer: ServedTokenizer, config: ServerConfig) -> Any:
    """The application.

    Raises:
        ImportError: The extra is not installed; the message names it.
        ValueError: The tokenizer's chat template is none.
    """
    require_serve()
    from fastapi import FastAPI
    from starlette.exceptions import HTTPException
    from starlette.middleware.cors import CORSMiddleware
    from starlette.responses import Response

    front = Front(engine, tokenizer, config)
    # Its own pages of documentation would load scripts from elsewhere.
    app = FastAPI(title="looplab", openapi_url=None, docs_url=None, redoc_url=None)
    app.state.front = front
    routes = _routes(front)
    for (method, path), endpoint in routes.items():
        app.add_route(path, endpoint, methods=[method])
    paths = tuple(dict.fromkeys(path for _, path in routes))

    def known(http: Any, error: Any) -> Any:
        said = error if isinstance(error, ApiError) else api_error(error)
        return _error(front.metrics, said)

    def unknown_route(http: Any, error: Any) -> Any:
        return _error(front.metrics, _route_error(http, error, paths))

    def fault(http: Any, error: Exception) -> Any:
        return _error(front.metrics, ApiError("internal", "internal error; see the server's log"))

    def gone(http: Any, error: Any) -> Any:
        return Response(status_code=GONE)

    app.add_exception_handler(HangUp, gone)
    for kind in (ApiError, RefusedError, BusyError):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(HTTPException, unknown_route)
    app.add_exception_handler(Exception, fault)
    app.add_middleware(Guard, config=config, metrics=front.metrics, routes=paths)
    if config.cors:
        app.add_middleware(CORSMiddleware, allow_origins=config.cors, allow_methods=["*"], allow_headers=["*"])
    return app


def require_serve() -> None:
    """Raises an ImportError that names the extra, where its packages are not installed."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"serve: {error.name} must be installed. It is not. Install it: pip install 'looplab[serve]'"
        ) from None


def page_policy(html: str) -> str:
    """The content security policy of the page: the one script by its hash, no other resource, no other server."""
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _routes(front: Front) -> dict[tuple[str, str], Any]:
    routes = {
        ("GET", "/v1/models"): front.models,
        ("POST", "/v1/completions"): front.completions,
        ("POST", "/v1/chat/completions"): front.chat_completions,
        ("POST", "/tokenize"): front.tokenize,
        ("POST", "/detokenize"): front.detokenize,
        ("GET", "/tokenizer_info"): front.tokenizer_info,
        ("GET", "/health"): front.health,
        ("GET", "/ready"): front.ready,
        ("GET", "/metrics"): front.show_metrics,
    }
    return routes | ({("GET", "/"): front.page} if front.config.page else {})


def _route_error(http: Any, error: Any, paths: tuple[str, ...]) -> ApiError:
    path = http.url.path[:128]
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return ApiError("method_not_allowed", f"{path} takes {allowed}; got {http.method}", headers={"allow": allowed})
    hint = did_you_mean(path, paths).replace("'", "").replace(" Did", "; did")
    return ApiError("not_found", f"no route {path}{hint or '; routes: ' + ', '.join(paths)}")


def _error(metrics: Metrics, error: ApiError) -> Any:
    metrics.rejected(error.code)
    return _json(error.body(), status=error.status, headers=error.headers)


def _json(value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Any:
    from starlette.responses import JSONResponse

    return JSONResponse(value, status_code=status, headers=headers)
