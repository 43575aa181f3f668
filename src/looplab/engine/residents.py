"""Requests, their choices, and the tokens that each choice works on: one, or those of a round of drafts. No torch.

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

    __slots__ = (
        "block",
        "choice",
        "chosen",
        "dead",
        "depths",
        "drafts",
        "executed",
        "index",
        "lane",
        "position",
        "recorded",
        "steps",
    )

    def __init__(self, choice: "Choice", index: int, *, lane: int = 0, drafts: bool = False):
        self.choice = choice
        self.index = index
        """Which output token it is, from 0; it yields token index + 1."""
        self.position = len(choice.group.request.tokens) + index
        self.recorded: tuple[int, ...] = choice.depths[index] if index < len(choice.depths) else ()
        """Iterations per block that it ran before its choice was put back."""
        self.block = self.steps = self.executed = self.chosen = 0
        self.depths: tuple[int, ...] = ()
        """Iterations of the blocks that it has left."""
        self.lane = lane
        """Where its seat keeps its state: tokens of one round have places of their own."""
        self.drafts = drafts
        """Whether it runs a few steps only, and yields a guess."""
        self.dead = False
        """Nobody waits for what it yields: its choice has ended, or a token before it was not the one guessed."""

    def restart(self) -> None:
        """From its first block and iteration, at full depth."""
        self.block = self.steps = self.executed = 0
        self.go_on()

    def go_on(self) -> None:
        """From where it stands, at full depth."""
        self.drafts, self.depths, self.chosen = False, (), 0


class Round:
    """Some tokens of a choice that were guessed at few steps, on their way through full depth.

    Token `first` is known. Every token guesses the next one; when all have, all of them and the last guess run at full
    depth, and what they yield is said as long as it is what was guessed.
    """

    __slots__ = ("first", "guesses", "size", "tokens")

    def __init__(self, choice: "Choice", first: int, size: int):
        self.first, self.size = first, size
        """Output token that begins it, and how many are guessed."""
        self.guesses: list[int] = []
        """Output tokens first + 1 .. as far as they have been guessed."""
        self.tokens: list[Token] = [Token(choice, first, drafts=True)]
        """In order of position, those that are still needed."""


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
        "round",
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
        """Its newest token under way, outside of rounds; the one before it may still be in flight."""
        self.round: Round | None = None
        """What it does instead where it drafts."""
        self.in_flight = 0
        """Launches that refer to its seat and have not come back."""
        self.preempted = 0
        """Since its last new token."""
        self.first_time = self.last_time = 0.0

    @property
    def known(self) -> int:
        """Tokens of its text so far."""
        return len(self.group.request.tokens) + len(self.output)

    @property
    def foreseen(self) -> int:
        """Output tokens that are known or guessed."""
        if self.round is None:
            return len(self.output)
        return max(len(self.output), self.round.first + 1 + len(self.round.guesses))

    def token(self, index: int) -> int:
        """Output token `index`, which is known or guessed."""
        if index < len(self.output):
            return self.output[index]
        assert self.round is not None
        return self.round.guesses[index - self.round.first - 1]


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
    guess_depths: tuple[int, ...] = ()
    """Iterations of every block of its tokens that guess; empty: none does."""

    def __post_init__(self) -> None:
        self.choices = [Choice(self, index) for index in range(self.request.n)]
        self.open = self.request.n
        """Choices that have not ended."""
        self.passed = 0
        """Requests that overtook it while it headed the line."""
        self.cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprob] = []
        self.output_tokens = self.decode_tokens = self.applications = self.preemptions = 0
        self.drafted = self.confirmed = self.rounds = 0
        """Tokens guessed, those that full depth would have said and did, and how often several were tried at once."""
        self.histogram: dict[int, int] = {}

    @property
    def draft_tokens(self) -> int:
        """Most tokens that are guessed in a round."""
        return (self.depth.draft_tokens or 0) if self.guess_depths else 0
