"""What the scheduler tells a runner to do, and what it is told back. No torch.

    prefill   a span of a prompt through all blocks; the last span is read out and draws the first tokens
    encode    embedding and prelude of tokens that are already known
    core      one iteration of one block (or, where `Facts.whole`, the whole plan) over some rows
    coda      coda, head and draw; then `encode` of what was drawn, for rows with a successor

A seat is a place among the residents, with everything that a runner keeps of one choice: states (one per lane), memory
of the exit rule, tokens. A page covers some positions of a text in every cache layer. Calls are made in the order in
which their effects must happen; `core` answers at once, `prefill` and `coda` when `poll` says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from looplab.engine.request import DepthParams, SamplingParams, TokenLogprob


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a scheduler has to know of a model."""

    blocks: int
    """Looped blocks; a token runs through them in order and leaves each at a step of its own."""
    max_steps: tuple[int, ...]
    """Per block, the most iterations a token may run."""
    whole: bool
    """Whether a core launch takes its rows through the whole plan (`core` then always ends a row)."""
    pages: int
    """Pages of the pool, page 0 included, which takes the writes of padding and is never handed out."""
    page_tokens: int
    max_tokens: int
    """Longest text, prompt and output."""
    depth_causal: bool
    """Whether iteration t reads entries written at iterations <= t only: cached pages are then exact anywhere."""
    resumes: bool = False
    """Whether a token that has been read out at few steps may go on from there to more."""

    def steps_of(self, steps: int) -> int:
        """Iterations over all blocks of a token that runs so many of each."""
        return sum(min(steps, most) for most in self.max_steps)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a runner must know of a choice before its first launch."""

    request: str
    choice: int
    tokens: tuple[int, ...]
    """The prompt."""
    sampling: SamplingParams
    seed: int
    depth: DepthParams
    """Resolved by the engine: either num_steps, or a rule with min_steps, max_steps and exit_delay, or replay."""
    prefill_steps: int


class Span(NamedTuple):
    """Tokens start .. stop of the prompt of a seat."""

    seat: int
    start: int
    stop: int
    pages: tuple[int, ...]
    """The seat's pages, in order, up to token stop at least."""
    seats: tuple[int, ...]
    """Seats that draw a first token, one per choice, where the span ends the prompt; else none. Also none where the
    first token is known (replay) or none is wanted."""
    prompt_logprobs: int | None
    """Alternatives to report for the tokens start + 1 .. stop of the prompt; None: no readout."""


class Row(NamedTuple):
    """One token of one choice.

    Rows of one choice may share a launch, in order of position: each writes its entries before any of them reads.
    """

    seat: int
    position: int
    """Where the token stands in its text, from 0."""
    steps: int
    """core: iterations of this block that are already done. coda: the depth it ran (of the last block)."""
    pages: tuple[int, ...]
    """The seat's pages, in order; for a row with a successor up to that token."""
    successor: bool = False
    """coda: whether the drawn token is encoded, as the next token of the text."""
    forced: int | None = None
    """coda: the token that takes the place of a draw, where one is already known (replay)."""
    depths: tuple[int, ...] = ()
    """core: iterations of every block, where they are known for this token: those that it ran before its choice was put
    back (replay), or those of a draft. They take the place of the rule: the row leaves block b after iteration
    depths[b] - 1, whatever its score."""
    lane: int = 0
    """Which of the places of its seat holds its state; all but drafts and what confirms them use the first."""
    next_lane: int = 0
    """coda: that of its successor."""


class Drawn(NamedTuple):
    """A drawn token. `error` says why there is none: the code non_finite, with token and step in words."""

    token: int
    logprob: TokenLogprob | None = None
    error: str = ""


class Prefilled(NamedTuple):
    """What a span gave."""

    drawn: tuple[Drawn, ...]
    """One per seat that draws."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of the tokens start + 1 .. of the prompt, where they were asked for."""
    error: str = ""


class Decision(NamedTuple):
    """What the exit rule of a row made of a core launch."""

    chosen: int
    """0: the row goes on. Otherwise it leaves the block, and this is the depth that the rule chose, which is smaller
    than the iterations done where the decision came late."""
    depths: tuple[int, ...] = ()
    """Where `Facts.whole`: the iterations done in every block; empty means (chosen,). `chosen` is then their sum,
    or less where decisions came late."""


@runtime_checkable
class Runner(Protocol):
    """Executes launches. It knows pages and seats by number only, and never who waits for what."""

    facts: Facts

    def open(self, seat: int, job: Job) -> None:
        """Puts a choice into a free seat. Nothing of its former occupant may matter any more."""

    def close(self, seat: int) -> None:
        """Frees a seat; no launch refers to it any more."""

    def copy_page(self, source: int, target: int) -> None:
        """Copies all entries of a page: before a second writer touches one that is partly filled."""

    def prefill(self, spans: Sequence[Span]) -> int:
        """Starts a launch; returns its ticket."""

    def encode(self, rows: Sequence[Row], tokens: Sequence[int]) -> None:
        """Embedding and prelude of known tokens at `position`: the first token after a prompt, or after a stall.

        A runner that keeps texts puts a token at index `position`; the draw may have put it there before.
        """

    def core(self, block: int, rows: Sequence[Row]) -> Sequence[Decision]:
        """Runs iteration `steps` of a block for every row."""

    def coda(self, rows: Sequence[Row]) -> int:
        """Starts a launch; returns its ticket."""

    def poll(self, ticket: int, *, wait: bool) -> tuple[Prefilled, ...] | tuple[Drawn, ...] | None:
        """Results of a launch, in the order of its rows; None while it is under way and `wait` is False."""
