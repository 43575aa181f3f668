"""Between the engine's thread and a socket: events wait in a mailbox until the client has room for them.

    engine thread --put--> Mailbox --take--> Answer --chunks--> socket

The engine never waits: a slow reader finds what came meanwhile in one chunk per choice. What waits is bounded by the
`max_tokens` of its own request. A reader who takes nothing for `send_timeout` seconds is dropped, and so is one who
hangs up: its requests end and their pages are free at the next launch.
"""

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

from looplab.engine.request import Event, RequestFailed
from looplab.server.answer import Answer
from looplab.server.ask import ServedEngine, Taken, Work
from looplab.server.errors import ApiError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
DONE = b"data: [DONE]\n\n"
PORTION = 256
"""Most events that are taken from a mailbox at once."""


class HangUp(Exception):
    """The client has gone, or reads too slowly."""


class Mailbox:
    """Events of one HTTP request: `put` from any thread, `take` in the loop that made it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: deque[tuple[int, Event]] = deque()
        self._filled = asyncio.Event()
        self._told = False

    def put(self, prompt: int, event: Event) -> None:
        """Leaves an event of the request of a prompt; never waits and never fails."""
        self._events.append((prompt, event))
        if not self._told:
            self._told = True
            with suppress(RuntimeError):  # the loop has ended, and nobody reads any more
                self._loop.call_soon_threadsafe(self._filled.set)

    async def take(self) -> list[tuple[int, Event]]:
        """Waits until there is something, and takes it, in portions that leave the loop to others in between."""
        await self._filled.wait()
        self._filled.clear()
        self._told = False
        found = [self._events.popleft() for _ in range(min(len(self._events), PORTION))]
        if self._events:
            self._filled.set()
        return found


class Running:
    """The requests of one HTTP request, under way; as a context, they end with it."""

    def __init__(self, engine: ServedEngine, work: Work, receive: Receive):
        self._engine, self._work, self._receive = engine, work, receive
        self._mailbox = Mailbox()
        self._taken: list[Taken] = []
        self._gone: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Running":
        try:
            for prompt, request in enumerate(self._work.requests):
                self._taken.append(self._engine.submit(request, self._post(prompt)))
        except BaseException:
            self.cancel()
            raise
        self._gone = asyncio.create_task(self._hung_up())
        return self

    async def __aexit__(self, *error: object) -> None:
        self.cancel()
        assert self._gone is not None
        self._gone.cancel()

    @property
    def seeds(self) -> list[int]:
        """Of the requests, in order."""
        return [taken.seed for taken in self._taken]

    def cancel(self) -> None:
        """Ends what has not ended."""
        for taken in self._taken:
            taken.cancel()

    def fail(self, code: str, message: str) -> None:
        """Ends the answer with an error, whatever the engine does."""
        self._mailbox.put(0, RequestFailed(code=code, message=message))

    async def take(self) -> list[tuple[int, Event]]:
        """The next events, in order.

        Raises:
            HangUp: The client went away first.
        """
        assert self._gone is not None
        events = asyncio.create_task(self._mailbox.take())
        try:
            await asyncio.wait((events, self._gone), return_when=asyncio.FIRST_COMPLETED)
            if self._gone.done():  # also where there are events: a fast engine always has some
                raise HangUp
            return events.result()
        finally:
            events.cancel()

    def _post(self, prompt: int) -> Callable[[Event], None]:
        return lambda event: self._mailbox.put(prompt, event)

    async def _hung_up(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


class EventStream:
    """A response of server-sent events (an ASGI application).

    Args:
        first: Events that were waited for before the status was sent.
        drop: Closes the client's connection without waiting for what is in its buffer.
    """

    def __init__(
        self,
        running: Running,
        answer: Answer,
        first: list[tuple[int, Event]],
        *,
        send_timeout: float,
        drop: Callable[[], None],
        ended: Callable[[], None],
    ):
        self._running, self._answer, self._first = running, answer, first
        self._send_timeout, self._drop, self._ended = send_timeout, drop, ended

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        try:
            async with asyncio.timeout(self._send_timeout):
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._follow(send)
        except HangUp:
            pass
        except TimeoutError:
            self._drop()
        finally:
            await self._running.__aexit__()
            self._ended()

    async def _follow(self, send: Send) -> None:
        events = self._first
        while True:
            try:
                for prompt, event in events:
                    self._answer.take(prompt, event)
            except ApiError as error:  # what came before it is still said; no [DONE] after it
                await self._write(send, [*self._answer.chunks(), error.body()], last=b"")
                return
            await self._write(send, self._answer.chunks(), last=DONE if self._answer.done else None)
            if self._answer.done:
                return
            events = await self._running.take()

    async def _write(self, send: Send, chunks: list[dict[str, Any]], *, last: bytes | None) -> None:
        """Writes chunks in one piece; with `last` the response ends."""
        data = b"".join(b"data: " + dumps(chunk) + b"\n\n" for chunk in chunks)
        if not data and last is None:
            return
        async with asyncio.timeout(self._send_timeout):
            await send({"type": "http.response.body", "body": data + (last or b""), "more_body": last is None})


async def whole(running: Running, answer: Answer) -> dict[str, Any]:
    """Waits for the whole answer.

    Raises:
        ApiError: The request failed.
        HangUp: The client went away.
    """
    while not answer.done:
        for prompt, event in await running.take():
            answer.take(prompt, event)
    return answer.body()


def dumps(value: Any) -> bytes:
    """JSON in one line; a number that JSON does not know is a fault of ours."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
