"""Who owns which page of the cache. No torch.

A page covers some positions of one text in every cache layer. Page 0 takes the writes of padding and is never handed
out; every other page is in exactly one state, the first of these that applies:

    active        some table names it: `references` > 0
    quarantined   a launch that has not come back may still touch it: `holds` > 0
    cached        the prefix cache knows its tokens
    free
"""

from collections.abc import Callable, Iterable, Sequence


class IntegrityError(RuntimeError):
    """Pages, seats, tables or queues contradict each other. The message holds the state."""


def pages_of(tokens: int, page_tokens: int) -> int:
    """Pages that so many tokens cover."""
    return -(-tokens // page_tokens)


def pages_of_request(prompt: int, outputs: int, choices: int, page_tokens: int) -> int:
    """Most pages of a request: choices share the full pages of the prompt, and the last token is not kept."""
    shared = prompt // page_tokens
    return shared + choices * (pages_of(prompt + max(outputs - 1, 0), page_tokens) - shared)


class PagePool:
    """Counts references to pages and hands out what nobody refers to."""

    def __init__(self, pages: int):
        self.pages = pages
        self.free = list(range(pages - 1, 0, -1))
        """Handed out from the end."""
        self.references = [0] * pages
        self.holds = [0] * pages
        self.is_cached = [False] * pages
        """Whether the prefix cache knows the page, whatever its state."""
        self.idle_cached = 0
        """Pages in the state cached."""
        self.quarantined = 0
        self.reclaim: Callable[[], None] | None = None
        """Makes one cached page free; set by the prefix cache."""

    @property
    def available(self) -> int:
        """Pages that `take` can hand out."""
        return len(self.free) + self.idle_cached

    def take(self) -> int | None:
        """A page with one reference, at the cost of a cached one if none is free; None where all are in use."""
        if not self.free:
            if not self.idle_cached or self.reclaim is None:
                return None
            self.reclaim()
        page = self.free.pop()
        self.references[page] = 1
        return page

    def share(self, pages: Iterable[int]) -> None:
        """One more reference to each: a fork, or a hit of the prefix cache."""
        for page in pages:
            if not self.references[page]:
                self._leave(page)
            self.references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One reference less to each."""
        for page in pages:
            self.references[page] -= 1
            if not self.references[page]:
                self._enter(page)

    def hold(self, pages: Iterable[int]) -> None:
        """Keeps pages that a table still names from being handed out until `unhold`, whoever lets go of them."""
        for page in pages:
            self.holds[page] += 1

    def unhold(self, pages: Iterable[int]) -> None:
        """Ends one `hold`."""
        for page in pages:
            idle = not self.references[page]
            if idle:
                self._leave(page)
            self.holds[page] -= 1
            if idle:
                self._enter(page)

    def set_cached(self, page: int, cached: bool) -> None:
        """The prefix cache learns of a page, or forgets it."""
        idle = not self.references[page]
        if idle:
            self._leave(page)
        self.is_cached[page] = cached
        if idle:
            self._enter(page)

    def _enter(self, page: int) -> None:
        """A page that no table names takes one of the other states."""
        if self.holds[page]:
            self.quarantined += 1
        elif self.is_cached[page]:
            self.idle_cached += 1
        else:
            self.free.append(page)

    def _leave(self, page: int) -> None:
        if self.holds[page]:
            self.quarantined -= 1
        elif self.is_cached[page]:
            self.idle_cached -= 1
        else:
            raise IntegrityError(f"pages: page {page} is free, and only `take` hands it out")

    @property
    def active(self) -> int:
        """Pages that tables name."""
        return self.pages - 1 - len(self.free) - self.idle_cached - self.quarantined

    def check(self, tables: Iterable[Sequence[int]], held: Iterable[Sequence[int]]) -> None:
        """Compares the counts with the tables that name pages, and those kept for launches under way.

        Raises:
            IntegrityError: A count is wrong, or a page is in two states.
        """
        references, holds = [0] * self.pages, [0] * self.pages
        for counts, lists in ((references, tables), (holds, held)):
            for table in lists:
                for page in table:
                    counts[page] += 1
        if references != self.references or holds != self.holds:
            raise IntegrityError(f"pages: tables give {references} and {holds}, not {self.references}, {self.holds}")
        if references[0] or holds[0] or self.is_cached[0] or 0 in self.free:
            raise IntegrityError("pages: page 0, the sink, was handed out")
        states = {"free": 0, "active": 0, "cached": 0, "quarantined": 0}
        for page in range(1, self.pages):
            states[self.state(page)] += 1
        free = {page for page in range(1, self.pages) if self.state(page) == "free"}
        counted = {
            "free": len(self.free),
            "active": self.active,
            "cached": self.idle_cached,
            "quarantined": self.quarantined,
        }
        if states != counted or free != set(self.free):
            raise IntegrityError(f"pages: {states} by state, but {counted} were counted")

    def state(self, page: int) -> str:
        """free, active, cached or quarantined."""
        if self.references[page]:
            return "active"
        if self.holds[page]:
            return "quarantined"
        return "cached" if self.is_cached[page] else "free"
