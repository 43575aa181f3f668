"""Requests, their choices, and the one token that each choice works on. No torch.

WAITING -> PREFILL -> DECODE -> ENDED     DECODE <-> STALLED (no page for the next token)
DECODE | STALLED -> REPLAY -> PREFILL
"""

import enum
from dataclasses import dataclass

from looplab.engine.request import DepthParams, Request, TokenLogprob


class State(enum.Enum):
    """Where a choice is in its life."""

    WAITING = "waiting"
    PREFILL = "prefill"
    """Its prompt is read, or a sibling reads it."""
    DECODE = "decode"
    STALLED = "stalled"
    """It lacks a page for its next token."""
    REPLAY = "replay"
    """It gave up its seat and pages and waits for its return."""
    ENDED = "ended"
    """Over; its seat and pages stay until the launches that refer to them have come back."""


class Token:
    """One token on its way through the blocks: the work item of a choice."""

    __slots__ = ("block", "choice", "chosen", "dead", "depths", "executed", "index", "position", "recorded", "steps")

    def __init__(self, choice: "Choice", index: int):
        self.choice = choice
        self.index = index
        """Which output token it is, from 0; it yields token index + 1."""
        self.position = len(choice.group.request.tokens) + index
        self.recorded: tuple[int, ...] = choice.depths[index] if index < len(choice.depths) else ()
        """Iterations per block that it ran before its choice was put back."""
        self.block = self.steps = self.executed = self.chosen = 0
        self.depths: tuple[int, ...] = ()
        """Iterations of the blocks that it has left."""
        self.dead = False
        """Its choice has ended: nobody waits for what it yields."""


class Choice:
    """One continuation of a request."""

    __slots__ = (
        "cursor",
        "depths",
        "first_time",
        "group",
        "in_flight",
        "index",
        "item",
        "last_time",
        "order",
        "output",
        "preempted",
        "read",
        "seat",
        "state",
        "table",
    )

    def __init__(self, group: "Group", index: int):
        self.group, self.index = group, index
        self.state = State.WAITING
        self.seat = -1
        self.order = -1
        """Rank by first admission: the smallest is the oldest resident."""
        self.table: tuple[int, ...] = ()
        self.read = 0
        """Tokens of the prompt that the table holds."""
        self.output: list[int] = []
        self.depths: list[tuple[int, ...]] = []
        """Iterations per block of output token i; the last token has none."""
        self.cursor = 0
        """STALLED: the output token that lacks a page."""
        self.item: Token | None = None
        """Its newest token under way; the one before it may still be in flight."""
        self.in_flight = 0
        """Launches that refer to its seat and have not come back."""
        self.preempted = 0
        """Since its last new token."""
        self.first_time = self.last_time = 0.0

    @property
    def known(self) -> int:
        """Tokens of its text so far."""
        return len(self.group.request.tokens) + len(self.output)


@dataclass(eq=False)
class Group:
    """A request and its choices."""

    request: Request
    depth: DepthParams
    seed: int
    prefill_steps: int
    keys: tuple[bytes, ...]
    """Of the full pages of its prompt; empty without a prefix cache."""
    root: bytes
    arrival: float
    limit: int
    """Output tokens that every choice may have."""
    rank: tuple[int, int]
    """(class, arrival number): its place in the waiting line."""

    def __post_init__(self) -> None:
        self.choices = [Choice(self, index) for index in range(self.request.n)]
        self.open = self.request.n
        """Choices that have not ended."""
        self.passed = 0
        """Requests that overtook it while it headed the line."""
        self.cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprob] = []
        self.output_tokens = self.decode_tokens = self.applications = self.preemptions = 0
        self.histogram: dict[int, int] = {}
