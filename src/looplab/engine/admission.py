"""Which prompts are read next. No torch.

Prompts are cut at multiples of `prefill_chunk` from their first token, so where does not depend on load. A launch takes
at most one piece of a prompt, in this order: prompts that have been started, choices on their return from a preemption
(oldest first), then the waiting line by (class, arrival). No one overtakes a return; at most `max_bypass` smaller
requests overtake a head of the line that lacks pages.
"""

import enum
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from looplab.engine.config import EngineConfig
from looplab.engine.pages import pages_of, pages_of_request
from looplab.engine.residents import Choice, Group, State
from looplab.engine.seats import Seats
from looplab.engine.stages import Facts
from looplab.engine.stats import Book


class WaitingLine:
    """Requests that hold nothing yet."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.tokens = 0
        """Of their prompts."""

    def __len__(self) -> int:
        return len(self.groups)

    def add(self, group: Group) -> None:
        """Takes its place by class and arrival."""
        insort(self.groups, group, key=lambda other: other.rank)
        self.tokens += len(group.request.tokens)

    def remove(self, group: Group) -> None:
        """Leaves the line."""
        self.groups.remove(group)
        self.tokens -= len(group.request.tokens)


class Piece(NamedTuple):
    """Tokens start .. stop of the prompt of a choice."""

    choice: Choice
    start: int
    stop: int


class Verdict(enum.Enum):
    """What keeps a prompt from being started."""

    NOTHING = 0
    SEATS = 1
    BUDGET = 2
    PAGES = 3


class Admission:
    """Prompts before and while they are read."""

    def __init__(self, config: EngineConfig, facts: Facts, seats: Seats, book: Book, clock: Callable[[], float]):
        self.config, self.facts, self.seats, self.book, self.clock = config, facts, seats, book, clock
        self.line = WaitingLine()
        self.started: list[Choice] = []
        self.returning: list[Choice] = []
        """Choices that were preempted, oldest first."""
        self.prefilled = 0
        """Prompt tokens since the last core launch."""
        self.preempted = False
        """Whether pages were taken from someone since a choice last ended."""
        self.reserved = 0
        """Pages that the admitted requests may come to hold."""
        self.hit_unit = facts.page_tokens
        """A cached prefix is used up to a multiple of it."""
        if not facts.depth_causal or config.numerics == "exact":
            self.hit_unit = config.prefill_chunk
        self._order = 0

    def __len__(self) -> int:
        return len(self.line) + len(self.started) + len(self.returning)

    def pieces(self, *, decoding: int, stalled: int, rows_ready: bool) -> list[Piece]:
        """What the next launch reads; nothing where no prompt is due. Takes seats and pages for those that start.

        Args:
            decoding: Choices that decode.
            stalled: Choices that lack a page.
            rows_ready: Whether the core could run instead.
        """
        budget = self.config.token_budget - (self.prefilled if rows_ready else 0)
        pieces: list[Piece] = []
        for choice in self.started:
            if not choice.in_flight:
                piece = self._next(choice)
                if piece.stop - piece.start > budget:
                    return pieces
                pieces.append(piece)
                budget -= piece.stop - piece.start
        seats_enough = not decoding or len(self.seats.free) >= self.config.min_free_seats
        if seats_enough and (self.returning or self.line.groups):
            self._start(pieces, budget, decoding + stalled)
        return pieces

    def worst(self, group: Group) -> int:
        """Most pages that a request may hold."""
        prompt = len(group.request.tokens)
        return pages_of_request(prompt, group.limit, group.request.n, self.facts.page_tokens)

    def _start(self, pieces: list[Piece], budget: int, decoding: int) -> None:
        """Adds pieces of prompts that start now."""
        for choices, kept in self._candidates():
            if (decoding or self.started) and self._is_tight():
                return
            verdict = self._enter(choices, kept, budget)
            if verdict in (Verdict.SEATS, Verdict.BUDGET):
                return
            if verdict is Verdict.NOTHING:
                pieces.append(self._next(choices[0]))
                budget -= pieces[-1].stop - pieces[-1].start

    def _is_tight(self) -> bool:
        """Whether the pages that are left belong to those under way.

        After a preemption too: what was taken from one would be given to another, and back.
        """
        margin = self.config.free_page_margin * self.facts.pages
        return self.preempted or (self.config.admit == "optimistic" and self.seats.pool.available <= margin)

    def _candidates(self) -> Iterator[tuple[list[Choice], int]]:
        """Choices to seat together, and the tokens whose pages they need, for as long as the ones before them leave."""
        for choice in list(self.returning):
            yield [choice], choice.known
            if choice.state is State.REPLAY:
                return
        groups = self.line.groups
        while groups:
            head = groups[0]
            yield head.choices, len(head.request.tokens)
            if groups and groups[0] is head:
                break
        else:
            return
        smaller = [group for group in groups[1:] if len(group.request.tokens) < len(groups[0].request.tokens)]
        for group in smaller[: self.config.max_bypass]:
            if head.passed >= self.config.max_bypass:
                return
            yield group.choices, len(group.request.tokens)
            head.passed += group.choices[0].order >= 0

    def _enter(self, choices: Sequence[Choice], kept: int, budget: int) -> Verdict:
        """Seats choices whose first one reads the prompt, or says what they lack.

        Args:
            kept: Tokens whose pages must be there; those of the prompt are taken now.
        """
        first, group, pool = choices[0], choices[0].group, self.seats.pool
        if len(self.seats.free) < len(choices):
            return Verdict.SEATS
        if self.config.admit == "reserve" and self.reserved + self.worst(group) > self.facts.pages - 1:
            return Verdict.PAGES
        hits = self._hits(group)
        idle = sum(not pool.references[page] for page in hits)
        if pages_of(kept, self.facts.page_tokens) - len(hits) > pool.available - idle:
            return Verdict.PAGES
        start = len(hits) * self.facts.page_tokens
        if self._stop(start, group) - start > budget:
            return Verdict.BUDGET
        pool.share(hits)
        self.seats.cache.touch(hits)
        first.table, first.read = tuple(hits), start
        self.seats.cover(first, len(group.request.tokens))
        for choice in choices:
            choice.state = State.PREFILL
            self.seats.sit(choice)
        self.started.append(first)
        if first.order < 0:
            self._admit(group, start)
        else:
            self.returning.pop(0)
        return Verdict.NOTHING

    def _admit(self, group: Group, cached: int) -> None:
        self.line.remove(group)
        self.reserved += self.worst(group)
        group.cached_tokens = cached
        for choice in group.choices:
            choice.order = self._order
            self._order += 1
        self.book.total["prompt_tokens"] += len(group.request.tokens)
        self.book.total["cached_tokens"] += cached
        self.book.seconds["queue"].add(self.clock() - group.arrival)

    def _hits(self, group: Group) -> list[int]:
        """Pages of a cached prefix that may be used: at least one token is always computed."""
        if group.request.prompt_logprobs is not None:
            return []
        hits = self.seats.cache.match(group.keys, group.request.tokens)
        size = self.facts.page_tokens
        usable = min(len(hits) * size, len(group.request.tokens) - 1) // self.hit_unit * self.hit_unit
        return hits[: usable // size]

    def _stop(self, start: int, group: Group) -> int:
        chunk = self.config.prefill_chunk
        return min((start // chunk + 1) * chunk, len(group.request.tokens))

    def _next(self, choice: Choice) -> Piece:
        return Piece(choice, choice.read, self._stop(choice.read, choice.group))
