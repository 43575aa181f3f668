"""Who sits where, and the pages of everyone's text. No torch."""

from collections.abc import Sequence

from looplab.engine.pages import IntegrityError, PagePool, pages_of
from looplab.engine.prefix import PrefixCache
from looplab.engine.residents import Choice
from looplab.engine.stages import Job, Runner


class Seats:
    """Places of a runner and the page tables of those who hold them.

    A choice that ends while a launch refers to it leaves at once for all purposes but two: its seat stays closed to
    others, and its pages are quarantined, until that launch has come back.
    """

    def __init__(self, runner: Runner, seats: int, pool: PagePool, cache: PrefixCache, page_tokens: int):
        self.runner, self.pool, self.cache, self.page_tokens = runner, pool, cache, page_tokens
        self.free = list(range(seats - 1, -1, -1))
        self.taken: dict[int, Choice] = {}
        """Seat -> its choice, ended ones included while a launch refers to them."""
        self.leaving: dict[int, tuple[int, ...]] = {}
        """Seat -> pages in quarantine."""

    def sit(self, choice: Choice) -> None:
        """Gives a choice a seat."""
        group = choice.group
        choice.seat = self.free.pop()
        self.taken[choice.seat] = choice
        self.runner.open(
            choice.seat,
            Job(
                request=group.request.id,
                choice=choice.index,
                tokens=group.request.tokens,
                sampling=group.request.sampling,
                seed=group.seed,
                depth=group.depth,
                prefill_steps=group.prefill_steps,
            ),
        )

    def cover(self, choice: Choice, tokens: int) -> bool:
        """Makes a table long enough for so many tokens; False, and nothing taken, where pages are missing."""
        missing = pages_of(tokens, self.page_tokens) - len(choice.table)
        if missing <= 0:
            return True
        if missing > self.pool.available:
            return False
        choice.table += tuple(self._take() for _ in range(missing))
        return True

    def fork(self, source: Choice, choice: Choice, tokens: int) -> bool:
        """Gives a choice the first tokens of another: full pages are shared, the partly filled one is copied."""
        full, rest = divmod(tokens, self.page_tokens)
        if rest and not self.pool.available:
            return False
        self.pool.share(source.table[:full])
        choice.table = source.table[:full]
        if rest:
            page = self._take()
            self.runner.copy_page(source.table[full], page)
            choice.table += (page,)
        return True

    def leave(self, choice: Choice) -> None:
        """Takes seat and pages from a choice, at once or, where a launch refers to them, when it has come back."""
        table, choice.table = choice.table, ()
        if choice.in_flight:
            self.pool.hold(table)
            self.leaving[choice.seat] = table
        else:
            self._vacate(choice)
        self.pool.release(table)

    def came_back(self, choices: Sequence[Choice]) -> None:
        """A launch that referred to them is over."""
        for choice in choices:
            choice.in_flight -= 1
            if not choice.in_flight and choice.seat in self.leaving:
                self.pool.unhold(self.leaving.pop(choice.seat))
                self._vacate(choice)

    def _vacate(self, choice: Choice) -> None:
        self.runner.close(choice.seat)
        del self.taken[choice.seat]
        self.free.append(choice.seat)
        choice.seat = -1

    def _take(self) -> int:
        page = self.pool.take()
        if page is None:
            raise IntegrityError("pages: fewer can be taken than are counted as available")
        return page
