"""From listening to the end of the process.

SIGTERM   /ready says 503, new work gets 503, residents go on for `drain_seconds`, the rest end with an error
SIGINT    the same; a second signal ends at once
the engine's thread has died   open answers get 500, /health says 503, the process ends with 1
a client stops reading         its connection is closed after `send_timeout`, also where its answer is complete
"""

import asyncio
import ipaddress
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from looplab.server.app import Front
from looplab.server.config import LOCAL

DONE, DIED, INTERRUPTED = 0, 1, 130
KEYS = "LOOPLAB_API_KEYS"
"""Environment variable with keys, separated by commas."""
LAST_WORDS = 1.0
"""Seconds for answers that have ended to reach their clients."""
WATCH_SECONDS = 0.25


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens. OSError where the port is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=1024)


def check_port(port: int) -> None:
    """Refuses what is no port."""
    if not 0 <= port <= 65535:
        raise ValueError(f"--port must be in 0..65535. Got {port}. 0 takes a free one.")


def is_local(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host in LOCAL:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_binding(host: str, keys: tuple[str, ...], *, insecure: bool) -> None:
    """Refuses to be reachable from elsewhere without a key."""
    if not is_local(host) and not keys and not insecure:
        raise ValueError(
            f"--host must be a local address where no API key is set. Got {host}. "
            f"Set {KEYS}, name a file with --keys, or pass --insecure."
        )


def read_keys(path: Path | None, environment: Mapping[str, str]) -> tuple[str, ...]:
    """API keys: lines of a file (blank ones and those that begin with # left out), then those of the environment."""
    lines = [] if path is None else path.read_text(encoding="utf-8").splitlines()
    found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if path is not None and not found:
        raise ValueError(f"--keys must be a file with a key per line. Got {path}, which has none. Write one.")
    found += [key.strip() for key in environment.get(KEYS, "").split(",") if key.strip()]
    return tuple(dict.fromkeys(found))


def serve(app: Any, listening: socket.socket) -> int:
    """Answers until a signal or the engine's death; returns the exit code. The caller owns the engine."""
    return asyncio.run(Process(app, listening).run())


class Process:
    """One server process."""

    def __init__(self, app: Any, listening: socket.socket):
        import uvicorn

        self._front: Front = app.state.front
        self._listening = listening
        settings = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            proxy_headers=False,  # a client is known by its own address: its connection is closed by it
            timeout_graceful_shutdown=max(1, round(LAST_WORDS)),
        )
        self._server = uvicorn.Server(settings)
        self._code = DONE
        self._drain: asyncio.Task[None] | None = None
        self._unsent: dict[Any, tuple[int, float]] = {}
        """Connection -> bytes that its client has yet to take, and since when there are so many."""

    async def run(self) -> int:
        """Listens until the end."""
        loop = asyncio.get_running_loop()

        def on_signal(sig: int, frame: Any) -> None:
            loop.call_soon_threadsafe(self.told, sig)

        # Its own handler would stop listening at once, and end the process by the signal afterwards.
        self._server.handle_exit = on_signal  # type: ignore[method-assign]
        self._front.drop = self.drop
        watch = asyncio.create_task(self._watch())
        try:
            await self._server.serve(sockets=[self._listening])
        finally:
            watch.cancel()
        return self._code

    def told(self, sig: int) -> None:
        """A signal came: ends gently, and at once if it comes again."""
        if self._drain is not None:
            self._server.should_exit = self._server.force_exit = True
            return
        self._code = INTERRUPTED if sig == signal.SIGINT else DONE
        self._drain = asyncio.create_task(self._end_gently())

    def drop(self, client: Any) -> None:
        """Closes the connection of a client without sending what is in its buffer."""
        for connection in list(self._server.server_state.connections):
            transport = getattr(connection, "transport", None)
            if client is not None and getattr(connection, "client", None) == tuple(client) and transport is not None:
                transport.abort()

    def _drop_stuck(self, now: float) -> None:
        """Closes connections whose clients take nothing: a stream notices by itself, a complete answer has nobody."""
        before, self._unsent = self._unsent, {}
        for connection in list(self._server.server_state.connections):
            transport = getattr(connection, "transport", None)
            size = 0 if transport is None else transport.get_write_buffer_size()
            if transport is None or not size:
                continue
            held, since = before.get(connection, (size, now))
            if size == held and now - since > self._front.config.send_timeout:
                transport.abort()
            else:
                self._unsent[connection] = (size, since if size == held else now)

    async def _end_gently(self) -> None:
        self._front.draining = True
        await asyncio.to_thread(self._front.engine.drain, self._front.config.drain_seconds)
        await self._answered()
        self._server.should_exit = True

    async def _answered(self) -> None:
        """Waits until the last answers are written."""
        end = asyncio.get_running_loop().time() + LAST_WORDS
        while self._front.running and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.02)

    async def _watch(self) -> None:
        while self._front.engine.alive:
            self._drop_stuck(asyncio.get_running_loop().time())
            await asyncio.sleep(WATCH_SECONDS)
        self._code = DIED
        self._front.draining = True
        self._front.fail_open("internal", "the engine stopped")
        await self._answered()
        self._server.should_exit = True
