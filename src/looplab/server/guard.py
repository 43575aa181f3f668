"""Who may ask: hosts, keys and request ids, looked at before anything else is read (an ASGI middleware).

A foreign `Host` is refused because a page of another site, whose name was made to point here, would otherwise read
answers (DNS rebinding). Keys are compared in constant time, all of them, and are never logged; an answer knows only
which one it was.
"""

import hashlib
import hmac
import re
import secrets
from typing import Any

from looplab.server.config import ServerConfig
from looplab.server.errors import ApiError
from looplab.server.metrics import Metrics
from looplab.server.stream import Message, Receive, Send, dumps

OPEN = ("/health", "/ready", "/")
"""Routes that need no key: they say nothing of the model or of requests."""
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Guard:
    """Wraps an application.

    Args:
        routes: Paths that are counted by name; all others are "other".
    """

    def __init__(self, app: Any, *, config: ServerConfig, metrics: Metrics, routes: tuple[str, ...]):
        self._app, self._config, self._metrics, self._routes = app, config, metrics, routes
        self._in_flight: set[str] = set()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        given = headers.get("x-request-id")
        name = given or f"req-{secrets.token_hex(12)}"
        route = scope["path"] if scope["path"] in self._routes else "other"
        held = False

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.answered(route, message["status"])
                if given is None or REQUEST_ID.fullmatch(given):
                    message = {**message, "headers": [*message["headers"], (b"x-request-id", name.encode("latin-1"))]}
            await send(message)

        try:
            self._check_host(headers.get("host", ""))
            scope["state"] = {**scope.get("state", {}), "key": self._check_key(headers, scope["path"]), "name": name}
            self._check_id(given)
            held = given is not None
            if held:
                self._in_flight.add(name)
            await self._app(scope, receive, counted)
        except ApiError as error:
            self._metrics.rejected(error.code)
            await send_error(error, counted)
        finally:
            if held:
                self._in_flight.discard(name)

    def _check_host(self, host: str) -> None:
        name = host_name(host)
        if "*" not in self._config.hosts and name not in self._config.hosts:
            raise ApiError("bad_host", "host not allowed; start the server with --allow-host to name it")

    def _check_key(self, headers: dict[str, str], path: str) -> str:
        """A name for the key that was sent, safe to keep; empty where none is asked for."""
        if not self._config.keys or path in OPEN:
            return ""
        kind, _, token = headers.get("authorization", "").partition(" ")
        sent = token.strip().encode("latin-1") if kind.lower() == "bearer" else b""
        known = [hmac.compare_digest(sent, key.encode()) for key in self._config.keys]
        if not any(known):
            raise ApiError("invalid_api_key", "missing or wrong bearer token", headers={"www-authenticate": "Bearer"})
        return hashlib.blake2b(sent, digest_size=8).hexdigest()

    def _check_id(self, given: str | None) -> None:
        if given is None:
            return
        if not REQUEST_ID.fullmatch(given):
            raise ApiError("invalid_value", "x-request-id must be 1 to 128 visible ASCII characters", "x-request-id")
        if given in self._in_flight:
            raise ApiError("duplicate_request", "request id is in use", "x-request-id")


def host_name(host: str) -> str:
    """A `Host` header without its port, in lower case; `[::1]:80` is ::1."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


async def send_error(error: ApiError, send: Send) -> None:
    """Sends an error as a whole response."""
    body = dumps(error.body())
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
