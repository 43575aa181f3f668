"""What becomes of the choices of requests: they begin, guess and say tokens, end, fail, or give way and come back.

No torch.
"""

from bisect import insort
from collections.abc import Callable, Sequence

from looplab.engine.admission import Admission, Piece
from looplab.engine.config import EngineConfig
from looplab.engine.drafts import Rounds
from looplab.engine.queues import RowQueue
from looplab.engine.reports import Finished, Judge, Report
from looplab.engine.request import ChoiceEnded, PromptRead, RequestFailed, TokenSaid
from looplab.engine.residents import Choice, Group, State, Token
from looplab.engine.seats import Seats
from looplab.engine.stages import Drawn, Facts, Prefilled
from looplab.engine.stats import Book


class Lives:
    """The choices of all requests that are not over, and what results do to them.

    Args:
        queues: All places where a row may wait.
        book: Where everything is counted.
    """

    def __init__(
        self,
        config: EngineConfig,
        facts: Facts,
        seats: Seats,
        admission: Admission,
        queues: Sequence[RowQueue],
        book: Book,
        *,
        on_event: Callable[[str, Report], None],
        judge: Judge,
        clock: Callable[[], float],
    ):
        self.config, self.facts, self.seats, self.cache = config, facts, seats, seats.cache
        self.admission, self.book = admission, book
        self.on_event, self.judge, self.clock = on_event, judge, clock
        self.groups: dict[str, Group] = {}
        self.stalled: list[Choice] = []
        self.begun: list[Token] = []
        """Tokens that enter the loop in this tick."""
        self.rounds = Rounds(facts, seats, book, self.begun)
        self.queues = (*queues, self.rounds.held)

    def apply_piece(self, piece: Piece, result: Prefilled) -> None:
        """A part of a prompt has been read."""
        choice, group = piece.choice, piece.choice.group
        tokens = group.request.tokens
        if choice.state is State.ENDED:
            return
        error = result.error or next((drawn.error for drawn in result.drawn if drawn.error), "")
        if error:
            self._fail_numbers(group, error)
            return
        choice.read = piece.stop
        group.prompt_logprobs.extend(result.logprobs)
        if piece.stop < len(tokens):
            return
        self.admission.started.remove(choice)
        if self.config.prefix_cache:
            self.cache.insert(group.keys, tokens, choice.table)
        if choice.output:
            self.begin(choice, 0)
            return
        if group.request.prompt_logprobs is not None:
            self._say(group, PromptRead(logprobs=(None, *group.prompt_logprobs)))
        # The reader last: the others copy from its pages.
        for index in reversed(range(group.request.n)):
            member = group.choices[index]
            drawn = result.drawn[index] if result.drawn else None
            if drawn is None:
                self._end(member, "length")
            elif not self._accept(member, drawn, self.facts.steps_of(group.prefill_steps)):
                if member is choice or self.seats.fork(choice, member, len(tokens)):
                    self.begin(member, 0)
                else:
                    self._put_back(member)

    def apply_drawn(self, token: Token, drawn: Drawn) -> None:
        """A token has been drawn."""
        choice, round = token.choice, token.choice.round
        if choice.state is State.ENDED or token.dead:
            self._discard(token, "draft" if token.dead else "cancelled")
            return
        if token.index + 1 < len(choice.output):
            self.book.total["replayed_tokens"] += 1
            self.book.wasted["replay"] += token.executed
        elif drawn.error:  # of a guess too: what it left would be read
            self._discard(token, "cancelled")
            self._fail_numbers(choice.group, drawn.error)
        elif token.drafts:
            self.rounds.guess(token, drawn.token)
        elif self._say_drawn(token, drawn):
            return
        if choice.state is State.ENDED:
            return
        if choice.item is token:
            choice.item = None
            self.begin(choice, token.index + 1)
        elif round is not None and not round.tokens:
            choice.round = None
            self.begin(choice, len(choice.output) - 1)

    def _discard(self, token: Token, cause: str) -> None:
        """Nobody needs what was drawn."""
        self.book.total["discarded_tokens"] += 1
        self.book.wasted[cause] += token.executed

    def _say_drawn(self, token: Token, drawn: Drawn) -> bool:
        """A token is said, and what was guessed after it is kept or dropped; True where the choice ends with it."""
        choice, group, total = token.choice, token.choice.group, self.book.total
        total["decode_tokens"] += 1
        total["chosen"] += token.chosen
        self.book.wasted["delayed"] += token.executed - token.chosen
        self.book.exit_steps[token.executed] += 1
        choice.depths.append(token.depths)
        group.decode_tokens += 1
        group.applications += token.executed
        group.histogram[token.executed] = group.histogram.get(token.executed, 0) + 1
        guessed = choice.round is None or self.rounds.confirms(token, drawn.token)
        if self._accept(choice, drawn, token.executed):
            return True
        if not guessed:
            self._withdraw(choice, "draft")
        return False

    def _accept(self, choice: Choice, drawn: Drawn, steps: int) -> bool:
        """Adds a token to its text and reports it; True where the choice ends with it."""
        group, now = choice.group, self.clock()
        name = group.request.id
        if not choice.output:
            choice.first_time = now
            self.book.total["first_tokens"] += 1
            if not group.output_tokens:
                self.book.seconds["ttft"].add(now - group.arrival)
        choice.last_time = now
        choice.output.append(drawn.token)
        choice.preempted = 0
        group.output_tokens += 1
        self.book.total["output_tokens"] += 1
        reason = self.judge(name, choice.index, drawn.token)
        self._say(group, TokenSaid(choice=choice.index, token=drawn.token, text="", steps=steps, logprob=drawn.logprob))
        if reason is None and len(choice.output) >= group.limit:
            reason = "length"
        if reason is not None:
            self._end(choice, reason)
        return reason is not None

    def begin(self, choice: Choice, index: int) -> None:
        """Output token `index`, which is known, enters the loop, alone or with guesses, or waits for a page."""
        if self.rounds.begin(choice, index):
            choice.state = State.DECODE
        elif self.seats.cover(choice, len(choice.group.request.tokens) + index + 1):
            choice.state, choice.item = State.DECODE, Token(choice, index)
            self.begun.append(choice.item)
        else:
            choice.state, choice.cursor = State.STALLED, index
            self.stalled.append(choice)

    # Ends.

    def _end(self, choice: Choice, reason: str) -> None:
        """A choice has come to its end; with the last one its request."""
        group = choice.group
        self._keep_pages(choice)
        self._take_out(choice, "late")
        self.book.finished[reason] += 1
        if len(choice.output) > 1:
            seconds = choice.last_time - choice.first_time
            self.book.seconds["tpot"].add(seconds / (len(choice.output) - 1))
        self._say(group, ChoiceEnded(choice=choice.index, reason=reason))
        if not group.open:
            self._close(group)
            self._say(group, _finished(group))

    def _keep_pages(self, choice: Choice) -> None:
        """Hands the prefix cache what decoding left as a prompt would: tokens up to the first of less depth."""
        group, config = choice.group, self.config
        if not config.prefix_cache or not self.facts.depth_causal or config.numerics == "exact":
            return
        full = (group.prefill_steps,)
        kept = 0
        if group.depth.num_steps is not None:
            kept = len(choice.depths)
        elif self.facts.blocks == 1:
            kept = next((i for i, depths in enumerate(choice.depths) if depths != full), len(choice.depths))
        text = (*group.request.tokens, *choice.output[:kept])
        if len(text) // self.facts.page_tokens > len(group.keys):
            self.cache.insert(self.cache.keys(group.root, text), text, choice.table)

    def fail(self, group: Group, code: str, message: str) -> None:
        """Ends a request without a result."""
        for choice in group.choices:
            if choice.state is not State.ENDED:
                self._take_out(choice, "cancelled")
        self.book.failed[code] += 1
        self._close(group)
        self._say(group, RequestFailed(code=code, message=message))

    def _fail_numbers(self, group: Group, message: str) -> None:
        """Ends a request whose numbers are not finite; nobody is to read its pages."""
        self.book.total["numeric_errors"] += 1
        for choice in group.choices:
            self.cache.forget(choice.table)
        self.fail(group, "non_finite", message)

    def _take_out(self, choice: Choice, cause: str) -> None:
        """Removes a choice from wherever it is."""
        group, admission = choice.group, self.admission
        self._withdraw(choice, "draft" if choice.round is not None and cause == "late" else cause)
        choice.item = choice.round = None
        if choice.state is State.WAITING and choice.index == 0:
            admission.line.remove(group)
        for places in (admission.started, admission.returning, self.stalled):
            if choice in places:
                places.remove(choice)
        if choice.seat >= 0:
            self.seats.leave(choice)
        choice.state = State.ENDED
        group.open -= 1
        admission.preempted = False

    def _withdraw(self, choice: Choice, cause: str) -> None:
        """Nobody waits any more for what the tokens of a choice will yield."""
        tokens = choice.round.tokens if choice.round is not None else [choice.item] if choice.item is not None else []
        for token in tokens:
            if token in self.begun:
                self.begun.remove(token)
                self.book.wasted[cause] += token.executed
            for queue in self.queues:
                if token in queue.rows:
                    queue.remove(token)
                    token.dead = True
                    self.book.wasted[cause] += token.executed
            if cause == "draft":  # those in flight are counted when they come back
                token.dead = True
        if choice.round is not None:
            choice.round.tokens = []

    def _close(self, group: Group) -> None:
        del self.groups[group.request.id]
        if group.choices[0].order >= 0:
            self.admission.reserved -= self.admission.worst(group)
        self.book.seconds["request"].add(self.clock() - group.arrival)

    # Pages.

    def make_room(self) -> bool:
        """Nothing can run, and every resident lacks a page: one of them gives up its own."""
        by_age = sorted(self.stalled, key=lambda choice: choice.order)
        if self.config.preempt == "never":
            message = "no page is left for any of the requests under way; send fewer at a time, or raise --kv-fraction"
            self.fail(by_age[-1].group, "kv_exhausted", message)
            return True
        if len(by_age) < 2:
            return False
        self._put_back(min(by_age[1:], key=_reluctance))
        return True

    def _put_back(self, choice: Choice) -> None:
        """A choice leaves seat and pages to others; it will read its prompt and run its tokens once more."""
        if choice in self.stalled:
            self.stalled.remove(choice)
        self.seats.leave(choice)
        choice.state, choice.read = State.REPLAY, 0
        choice.preempted += 1
        choice.group.preemptions += 1
        self.book.total["preemptions"] += 1
        self.admission.preempted = True
        insort(self.admission.returning, choice, key=lambda other: other.order)

    def _say(self, group: Group, report: Report) -> None:
        self.on_event(group.request.id, report)


def _reluctance(choice: Choice) -> tuple[bool, int, int, int]:
    """The smallest gives up its pages: not after two preemptions without a token, low class, little to redo, young."""
    group = choice.group
    redo = len(group.request.tokens) * group.prefill_steps + sum(map(sum, choice.depths))
    return choice.preempted >= 2, -group.request.priority, redo, -choice.order


def _finished(group: Group) -> Finished:
    return Finished(
        prompt_tokens=len(group.request.tokens),
        cached_tokens=group.cached_tokens,
        output_tokens=group.output_tokens,
        decode_tokens=group.decode_tokens,
        histogram=tuple(sorted(group.histogram.items())),
        applications=group.applications,
        preemptions=group.preemptions,
        drafted_tokens=group.drafted,
        accepted_tokens=group.confirmed,
        draft_rounds=group.rounds,
    )
