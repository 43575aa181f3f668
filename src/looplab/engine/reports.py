"""What a scheduler says: of requests, and of the launches it makes. No torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from looplab.engine.request import ChoiceEnded, PromptRead, RequestFailed, TokenSaid


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The last event of a request whose choices have all ended: what it took."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    decode_tokens: int
    """Output tokens without the first of every choice."""
    histogram: tuple[tuple[int, int], ...]
    """(steps run, over all blocks; decoded tokens), by steps."""
    applications: int
    """Core applications of its decoded tokens: the sum of steps over the histogram."""
    preemptions: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    draft_rounds: int = 0


Report = PromptRead | TokenSaid | ChoiceEnded | Finished | RequestFailed
"""What a scheduler says of a request. Texts of TokenSaid and ChoiceEnded are empty: the scheduler knows none."""

Judge = Callable[[str, int, int], str | None]
"""(request id, choice, token just drawn) -> "stop" where the text ends with it, else None. Called once per token of a
choice, in order, before the token is reported; end-of-sequence, stop ids, stop strings and `min_tokens` are its own."""


class Launch(NamedTuple):
    """One entry of the launch trace."""

    stage: str
    """prefill, encode, core or coda."""
    block: int
    """-1 where the stage has none."""
    seats: tuple[int, ...]
    positions: tuple[int, ...]
    """Of the rows; prefill: first token of each span."""
    iterations: tuple[int, ...]
    """core: 0-based iteration of each row. coda: steps it ran. prefill: tokens of each span."""
