"""Continuous depth batching: which rows run next. No torch, no threads.

One `tick` applies what has come back, then makes at most one launch, the first of these that may run:

    coda      at least `min_coda_rows` rows wait for their readout, and fewer than two readouts are under way
    prefill   a prompt is due (`engine.admission`)
    core      some block has ready rows; the fullest launch first, no row passed over for long (`engine.queues`)
    flush     a readout of fewer rows
    wait      for the oldest result
    preempt   some choice lacks a page: another gives up its own, and is replayed later with its recorded depths

Source: continuous depth batching, arXiv:2608.09444. Deviations: rows of one launch may stand at different iterations
under every cache rule; successors enter at the tail, so that no row waits for ever where more are resident than a
launch takes; prompts are cut on a grid that does not depend on load; recomputation replays depths.
"""

import hashlib
import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

from looplab.engine.admission import Admission, Piece
from looplab.engine.config import EngineConfig
from looplab.engine.drafts import guess_depths
from looplab.engine.integrity import check_integrity, dump
from looplab.engine.lives import Lives
from looplab.engine.pages import PagePool
from looplab.engine.prefix import PrefixCache
from looplab.engine.queues import RowQueue, choose_block
from looplab.engine.reports import Judge, Launch, Report
from looplab.engine.request import (
    DepthParams,
    RefusedError,
    Request,
)
from looplab.engine.residents import Choice, Group, Token
from looplab.engine.seats import Seats
from looplab.engine.stages import Decision, Drawn, Facts, Prefilled, Row, Runner, Span
from looplab.engine.stats import Book, EngineStats

CODAS_IN_FLIGHT = 2
"""Readouts whose results have not been seen."""


class EngineStall(RuntimeError):
    """Work is left and nothing can run: a fault of the scheduler. The message holds its whole state."""


class Flight(NamedTuple):
    """A launch whose result has not been seen."""

    serial: int
    ticket: int
    pieces: Sequence[Piece]
    """prefill."""
    tokens: Sequence[Token]
    """coda."""
    choices: Sequence[Sequence[Choice]]
    """Who sits it out, per piece or token."""


class Scheduler:
    """Queues, pages and residents of one engine.

    Args:
        config: With launch_rows, max_resident and min_coda_rows resolved to numbers.
        facts: Of the model that `runner` executes.
        on_event: Called with (request id, report) from within `tick` and `cancel`; it must not call back.
        judge: Says where a text ends.
        root: Of the prefix cache: everything that entries depend on besides the tokens (weights, cache rule, numerics,
            noise). Prefill steps, grid and `cache_salt` are added here.
        hold_ended: See `RowQueue`; for comparison with recorded launches.
        record: Called with every launch.

    Raises:
        ValueError: A size is missing or impossible.
    """

    def __init__(
        self,
        config: EngineConfig,
        facts: Facts,
        runner: Runner,
        *,
        on_event: Callable[[str, Report], None],
        judge: Judge,
        clock: Callable[[], float] = time.monotonic,
        root: bytes = b"",
        hold_ended: bool = False,
        record: Callable[[Launch], None] | None = None,
    ):
        self.launch_rows, self.max_resident, self.min_coda_rows = check_sizes(config, facts)
        self.config, self.facts, self.runner = config, facts, runner
        self.clock, self.root, self.record = clock, root, record
        self.pool = PagePool(facts.pages)
        self.cache = PrefixCache(self.pool, facts.page_tokens)
        self.seats = Seats(runner, self.max_resident, self.pool, self.cache, facts.page_tokens)
        self.book = Book()
        self.admission = Admission(config, facts, self.seats, self.book, clock)
        self.ready = [RowQueue(hold_ended) for _ in range(1 if facts.whole else facts.blocks)]
        self.coda = RowQueue(hold_ended)
        self.staged = RowQueue(hold_ended)
        """Without refill: rows of the next wave."""
        self.reads: deque[Flight] = deque()
        self.codas: deque[Flight] = deque()
        self.deadlines: list[tuple[float, int, Group]] = []
        queues = (*self.ready, self.coda, self.staged)
        self.lives = Lives(
            config, facts, self.seats, self.admission, queues, self.book, on_event=on_event, judge=judge, clock=clock
        )
        self.held = self.lives.rounds.held
        self._serial = 0

    def add(self, request: Request, *, depth: DepthParams, seed: int, prefill_steps: int, root: bytes = b"") -> None:
        """Takes a request (its `id` set and not in use) into the waiting line.

        Args:
            depth: Resolved; handed to the runner in `Job.depth`.
            root: Added to the root of the prefix cache, where entries depend on more than tokens (noise by request).

        Raises:
            RefusedError: Its longest form never fits the cache, or it has more choices than there are seats.
            ValueError: The id is in use.
        """
        if request.id in self.lives.groups:
            raise ValueError(f"Scheduler.add: request id {request.id!r} is in use. Wait for its end, or give another.")
        if request.n > self.max_resident:
            message = f"n is {request.n}, but only {self.max_resident} choices are resident at once; lower n"
            raise RefusedError("invalid_value", message, "n")
        serial, parts = self._next_serial(), (self.root, root, request.cache_salt.encode())
        sizes = f"{prefill_steps} {self.config.prefill_chunk} {[len(part) for part in parts]}"
        tree = hashlib.blake2b(sizes.encode() + b"".join(parts), digest_size=16).digest()
        group = Group(
            request=request,
            depth=depth,
            seed=seed,
            prefill_steps=prefill_steps,
            keys=self.cache.keys(tree, request.tokens) if self.config.prefix_cache else (),
            root=tree,
            arrival=self.clock(),
            limit=max(0, min(request.sampling.max_tokens, self.facts.max_tokens - len(request.tokens))),
            rank=(request.priority, serial),
            guess_depths=guess_depths(depth, self.facts.max_steps),
        )
        if (need := self.admission.worst(group)) > self.facts.pages - 1:
            message = f"needs {need} pages; cache has {self.facts.pages - 1}; raise --kv-fraction"
            raise RefusedError("kv_too_small", message)
        self.lives.groups[request.id] = group
        self.admission.line.add(group)
        self.book.total["accepted"] += 1
        if request.timeout is not None:
            heapq.heappush(self.deadlines, (group.arrival + request.timeout, serial, group))

    def cancel(self, request: str, *, code: str = "cancelled", message: str = "cancelled by the client") -> bool:
        """Ends a request now and reports RequestFailed; False where it is unknown or already over."""
        group = self.lives.groups.get(request)
        if group is not None:
            self.lives.fail(group, code, message)
        return group is not None

    def tick(self) -> bool:
        """Applies results and makes at most one launch; False where there was nothing to do.

        Raises:
            EngineStall: Work is left and nothing can run.
        """
        did = self._apply_results()
        did = self._expire() or did
        did = self._resume() or did
        did = self._launch() or did
        if not did and not self.idle:
            raise EngineStall(f"Work is left and nothing can run.\n{dump(self)}")
        return did

    @property
    def idle(self) -> bool:
        """Nothing waits, is resident or is under way."""
        return not (self.lives.groups or self.reads or self.codas)

    @property
    def waiting(self) -> tuple[int, int]:
        """Requests that wait, and the tokens of their prompts."""
        return len(self.admission.line), self.admission.line.tokens

    def check_integrity(self) -> None:
        """Raises IntegrityError with a dump where pages, seats, tables or queues contradict each other."""
        check_integrity(self)

    def stats(self) -> EngineStats:
        """Counters and lengths as of now."""
        in_flight = [token for flight in self.codas for token in flight.tokens]
        queues = (*self.ready, self.coda, self.staged, self.held)
        return self.book.read(
            waiting=len(self.admission.line),
            waiting_tokens=self.admission.line.tokens,
            residents=len(self.seats.taken),
            prefill=len(self.admission.started),
            ready=sum(map(len, self.ready)) + len(self.staged),
            coda=len(self.coda),
            replay=len(self.admission.returning),
            stalled=len(self.lives.stalled),
            in_flight=len(self.reads) + len(self.codas),
            pending_tokens=len(in_flight),
            pending_applications=sum(token.executed for queue in queues for token in queue.rows if not token.dead)
            + sum(token.executed for token in in_flight),
            pages=self.facts.pages,
            free_pages=len(self.pool.free),
            active_pages=self.pool.active,
            cached_pages=self.pool.idle_cached,
            quarantined_pages=self.pool.quarantined,
            evicted_pages=self.cache.evicted,
        )

    # What comes before a launch.

    def _apply_results(self) -> bool:
        """Results that are there, prompts first: a request's first token is reported before its second."""
        did = False
        for flights in (self.reads, self.codas):
            while flights and self._apply(flights, wait=False):
                did = True
        self._encode()
        return did

    def _apply(self, flights: deque[Flight], *, wait: bool) -> bool:
        """Applies the oldest of some launches; False where it has not come back."""
        stage, start = "prefill" if flights is self.reads else "coda", self.clock()
        results = self.runner.poll(flights[0].ticket, wait=wait)
        self.book.launch_seconds[stage] += self.clock() - start
        if results is None:
            return False
        flight = flights.popleft()
        works: Sequence[Piece | Token] = flight.pieces or flight.tokens
        for work, choices, result in zip(works, flight.choices, results, strict=True):
            self.seats.came_back(choices)
            if isinstance(work, Token):
                assert isinstance(result, Drawn)
                self.lives.apply_drawn(work, result)
            else:
                assert isinstance(result, Prefilled)
                self.lives.apply_piece(work, result)
        return True

    def _expire(self) -> bool:
        """Fails requests whose deadline has passed."""
        did = False
        while self.deadlines and self.deadlines[0][0] <= self.clock():
            group = heapq.heappop(self.deadlines)[2]
            if self.lives.groups.get(group.request.id) is group:
                tokens = f"{group.output_tokens} of {group.limit * group.request.n} tokens"
                self.lives.fail(group, "deadline_exceeded", f"{tokens} after {group.request.timeout:g} s")
                did = True
        return did

    def _resume(self) -> bool:
        """Gives pages to choices that lack one, oldest first."""
        waiting, self.lives.stalled = sorted(self.lives.stalled, key=lambda choice: choice.order), []
        for choice in waiting:
            self.lives.begin(choice, choice.cursor)
        self._encode()
        return len(self.lives.stalled) < len(waiting)

    # Launches.

    def _launch(self) -> bool:
        """The first launch of the list at the top that may run."""
        if len(self.coda) >= self.min_coda_rows and len(self.codas) < CODAS_IN_FLIGHT and self._run_coda():
            return True
        if len(self.admission) and self._run_prefill():
            return True
        if self.staged.rows and not (self.coda.rows or self.reads or any(queue.rows for queue in self.ready)):
            self.ready[0].put_tail(self.staged.take(len(self.staged)))
        while (block := choose_block(self.ready, self.launch_rows)) >= 0:
            if self._run_core(block):
                return True
        while self.coda.rows and len(self.codas) < CODAS_IN_FLIGHT:
            if self._run_coda():
                return True
        if self.reads or self.codas:
            read_first = self.reads and not (self.codas and self.codas[0].serial < self.reads[0].serial)
            self._apply(self.reads if read_first else self.codas, wait=True)
            self._encode()
            return True
        return bool(self.lives.stalled) and self.lives.make_room()

    def _run_prefill(self) -> bool:
        rows_ready = bool(self.staged.rows) or any(queue.rows for queue in self.ready)
        if not self.config.refill and (self.coda.rows or any(queue.rows for queue in self.ready)):
            return False
        pieces = self.admission.pieces(
            decoding=self._decoding(), stalled=len(self.lives.stalled), rows_ready=rows_ready
        )
        if not pieces:
            return False
        spans, sitting = [], []
        for choice, start, stop in pieces:
            group = choice.group
            draws = stop == len(group.request.tokens) and not choice.output and group.limit > 0
            drawing = group.choices if draws else []
            wanted = None if choice.output else group.request.prompt_logprobs
            seats = tuple(member.seat for member in drawing)
            spans.append(Span(choice.seat, start, stop, choice.table, seats, wanted))
            sitting.append(drawing or [choice])
            for member in sitting[-1]:
                member.in_flight += 1
            self.book.total["prefill_tokens"] += stop - start
            self.book.total["prefill_applications"] += (stop - start) * self.facts.steps_of(group.prefill_steps)
        start_time = self.clock()
        ticket = self.runner.prefill(spans)
        tokens = sum(span.stop - span.start for span in spans)
        self.admission.prefilled += tokens
        self.book.launch("prefill", tokens, self.clock() - start_time)
        self.reads.append(Flight(self._next_serial(), ticket, pieces, (), sitting))
        if self.record is not None:
            sizes = tuple(span.stop - span.start for span in spans)
            seats, starts = tuple(span.seat for span in spans), tuple(span.start for span in spans)
            self.record(Launch("prefill", -1, seats, starts, sizes))
        return True

    def _run_core(self, block: int) -> bool:
        queue = self.ready[block]
        tokens = (queue.take_equal if self.config.homogeneous_steps else queue.take)(self.launch_rows)
        if not tokens:
            return False
        rows = [
            Row(
                token.choice.seat,
                token.position,
                token.steps,
                token.choice.table,
                depths=token.choice.group.guess_depths if token.drafts else token.recorded,
                lane=token.lane,
            )
            for token in tokens
        ]
        start = self.clock()
        decisions = self.runner.core(block, rows)
        self.book.launch("core", len(rows), self.clock() - start)
        self.admission.prefilled = 0
        if self.record is not None:
            self._record("core", block, rows)
        if self.facts.whole:
            self._leave_plan(tokens, decisions)
            return True
        survivors, leaving = [], []
        most = self.facts.max_steps[block]
        for token, decision in zip(tokens, decisions, strict=True):
            token.steps += 1
            token.executed += 1
            if decision.chosen:
                token.chosen += decision.chosen
                leaving.append(token)
            elif token.steps < most:
                survivors.append(token)
            else:
                raise EngineStall(f"A row went on after {most} iterations, the most of block {block}.\n{dump(self)}")
        self.book.total["applications"] += len(tokens)
        queue.put_head(survivors)
        self._leave_block(block, leaving)
        return True

    def _leave_block(self, block: int, tokens: Sequence[Token]) -> None:
        last = block + 1 == self.facts.blocks
        for token in tokens:
            token.depths += (token.steps,)
            if not last:
                token.block, token.steps = block + 1, 0
        (self.coda if last else self.ready[block + 1]).put_tail(tokens)

    def _leave_plan(self, tokens: Sequence[Token], decisions: Sequence[Decision]) -> None:
        """Rows that went through all blocks in one launch."""
        for token, decision in zip(tokens, decisions, strict=True):
            token.depths = decision.depths or (decision.chosen,)
            token.steps, token.executed, token.chosen = token.depths[-1], sum(token.depths), decision.chosen
            self.book.total["applications"] += token.executed
        self.coda.put_tail(tokens)

    def _run_coda(self) -> bool:
        # No row runs two tokens ahead of what has been seen: at most one application too many per end.
        waited = False
        while self.codas and any(
            token.choice.foreseen <= token.index for token in islice(self.coda.rows, self.launch_rows)
        ):
            waited = self._apply(self.codas, wait=True)
            self._encode()
        tokens = self.coda.take(self.launch_rows)
        if not tokens:
            return waited
        rows, successors = [], []
        for token in tokens:
            choice, index = token.choice, token.index + 1
            forced = choice.output[index] if index < len(choice.output) else None
            successor = self._successor(token)
            next_lane = 0 if successor is None else successor.lane
            rows.append(
                Row(
                    choice.seat, token.position, token.steps, choice.table, successor is not None, forced,
                    lane=token.lane, next_lane=next_lane,
                )
            )  # fmt: skip
            choice.in_flight += 1
            if successor is not None:
                successors.append(successor)
        start = self.clock()
        ticket = self.runner.coda(rows)
        self.book.launch("coda", len(rows), self.clock() - start)
        self.codas.append(Flight(self._next_serial(), ticket, (), tokens, [(token.choice,) for token in tokens]))
        self._enter(successors, at_head=self.config.successors == "head")
        if self.record is not None:
            self._record("coda", -1, rows)
        return True

    def _successor(self, token: Token) -> Token | None:
        """The next token of a text, where it enters the loop before anyone has seen it."""
        choice, index, round = token.choice, token.index + 1, token.choice.round
        if round is not None:
            if not token.drafts or index == round.first + round.size:
                return None
            round.tokens.append(Token(choice, index, lane=token.lane + 1, drafts=True))
            return round.tokens[-1]
        # A choice that drafts runs what is known, and then begins a round.
        alone = not choice.group.draft_tokens or index + 1 < len(choice.output)
        if not alone or index + 1 >= choice.group.limit or not self.seats.cover(choice, token.position + 2):
            return None
        choice.item = Token(choice, index)
        return choice.item

    def _encode(self) -> None:
        """Known tokens enter the loop; those that were in it before go on where they stand."""
        begun = list(self.lives.begun)
        self.lives.begun.clear()
        for first in range(0, len(begun), self.launch_rows):
            tokens = begun[first : first + self.launch_rows]
            new = [token for token in tokens if not token.steps]
            if new:
                rows = [Row(token.choice.seat, token.position, 0, token.choice.table, lane=token.lane) for token in new]
                start = self.clock()
                self.runner.encode(rows, [token.choice.token(token.index) for token in new])
                self.book.launch("encode", len(rows), self.clock() - start)
                if self.record is not None:
                    self._record("encode", -1, rows)
            self._enter(tokens, at_head=False)

    def _enter(self, tokens: Sequence[Token], *, at_head: bool) -> None:
        """Rows at their first iteration join the first block, or the next wave."""
        if not self.config.refill:
            self.staged.put_tail(tokens)
            return
        queue = self.ready[0]
        self.book.total["refills"] += len(tokens) if queue.rows else max(0, len(tokens) - 1)
        (queue.put_head if at_head else queue.put_tail)(tokens)

    def _record(self, stage: str, block: int, rows: Sequence[Row]) -> None:
        assert self.record is not None
        seats, positions, steps = zip(*(row[:3] for row in rows), strict=True)
        self.record(Launch(stage, block, seats, positions, steps))

    def _decoding(self) -> int:
        reading = sum(1 if choice.output else choice.group.request.n for choice in self.admission.started)
        return len(self.seats.taken) - len(self.seats.leaving) - len(self.lives.stalled) - reading

    def _next_serial(self) -> int:
        self._serial += 1
        return self._serial


def check_sizes(config: EngineConfig, facts: Facts) -> tuple[int, int, int]:
    """launch_rows, max_resident and min_coda_rows of an engine.

    Raises:
        ValueError: One is missing, or they do not fit each other or the pages.
    """
    rows, residents, coda_rows = config.launch_rows, config.max_resident, config.min_coda_rows
    if rows is None or residents is None or coda_rows is None:
        raise ValueError(
            "EngineConfig.launch_rows, max_resident and min_coda_rows must be numbers for a scheduler. "
            f"Got {rows}, {residents} and {coda_rows}. Let the engine resolve them first."
        )
    if not facts.page_tokens <= config.prefill_chunk <= config.token_budget:
        raise ValueError(
            f"EngineConfig.prefill_chunk must be in {facts.page_tokens}..{config.token_budget}. "
            f"Got {config.prefill_chunk}. Change it, or what bounds it."
        )
    if config.prefill_chunk % facts.page_tokens:
        raise ValueError(
            f"EngineConfig.prefill_chunk must be a multiple of the page, {facts.page_tokens} tokens. "
            f"Got {config.prefill_chunk}. Prompts are cut where pages end."
        )
    return rows, residents, coda_rows if config.refill else residents + 1
