"""Requests under way, as the engine keeps them: their texts, and what they are told. No torch."""

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from looplab.engine.reports import Finished, Report
from looplab.engine.request import (
    ChoiceEnded,
    DepthParams,
    Event,
    PromptRead,
    Request,
    RequestEnded,
    RequestFailed,
    TokenSaid,
    Usage,
)
from looplab.engine.text import TextStream
from looplab.engine.tokenizer import ServedTokenizer


@dataclass
class Live:
    """One request, from its arrival to its last event."""

    request: Request
    depth: DepthParams
    """Resolved."""
    prefill_steps: int
    seed: int
    on_event: Callable[[Event], None]
    texts: list[TextStream] = field(default_factory=list)
    """One per choice."""
    pieces: list[str] = field(default_factory=list)
    """Per choice, what the token that was judged last adds to the text."""

    def open_texts(self, tokenizer: ServedTokenizer) -> None:
        """Makes the text of every choice."""
        stop = self.request.sampling.stop
        self.texts = [TextStream(tokenizer, context=self.request.tokens, stop=stop) for _ in range(self.request.n)]
        self.pieces = [""] * self.request.n
        self._said = [0] * self.request.n

    def judge(self, choice: int, token: int, eos: int | None) -> str | None:
        """Reads a token that was drawn; "stop" where the text ends with it."""
        sampling = self.request.sampling
        self._said[choice] += 1
        self.pieces[choice] = ""
        ends = token in sampling.stop_token_ids or (token == eos and not sampling.ignore_eos)
        if ends and self._said[choice] > sampling.min_tokens:
            return "stop"
        self.pieces[choice] = self.texts[choice].push(token)
        return "stop" if self.texts[choice].stopped else None

    def event(self, report: Report, usage: Callable[["Live", Finished], Usage]) -> Event:
        """What the client is told of a scheduler's report: the same, with its text."""
        match report:
            case TokenSaid():
                return replace(report, text=self.pieces[report.choice])
            case ChoiceEnded():
                return replace(report, text=self.texts[report.choice].close())
            case Finished():
                return RequestEnded(usage=usage(self, report))
            case PromptRead() | RequestFailed():
                return report


class Handle:
    """A request that was taken. Iterating waits for its events and ends after the last one."""

    def __init__(self, id: str, seed: int, cancel: Callable[[str], None]):
        self.id, self.seed = id, seed
        self._cancel = cancel
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def cancel(self) -> None:
        """Ends the request; harmless where it is over. Its last event is then RequestFailed, code cancelled."""
        self._cancel(self.id)

    def put(self, event: Event) -> None:
        """Hands an event to whoever iterates."""
        self._events.put(event)

    def __iter__(self) -> Iterator[Event]:
        while True:
            event = self._events.get()
            yield event
            if isinstance(event, RequestEnded | RequestFailed):
                return
