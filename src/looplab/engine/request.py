"""What is asked of the engine and what it answers. No torch: scheduler and server share these.

    Request   prompt, sampling, depth, choices      -> submit
    Event     a token, an end, a failure            <- in order per choice, a first token before its second

Every record here is frozen and has a JSON form (`looplab._config.to_dict`).
"""

from dataclasses import dataclass, field
from typing import NamedTuple

FINISH_REASONS = ("stop", "length", "cancelled", "error")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen, and when a text ends (spec of the filters: `engine.sampling`)."""

    max_tokens: int = 16
    temperature: float = 1.0
    """0: the likeliest; of equals the lowest id."""
    top_k: int = 0
    """0: all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)."""
    seed: int | None = None
    """None: drawn when the request arrives, and returned with it."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    """How many alternatives are reported with every token; None: not even its own log-probability."""


@dataclass(frozen=True, kw_only=True)
class DepthParams:
    """How many steps the tokens of a request run. All None: what the engine does by default."""

    num_steps: int | None = None
    """Every token, prompt and output, runs so many."""
    exit_rule: str | None = None
    """Name of a rule that the engine has loaded."""
    exit_threshold: float | None = None
    min_steps: int | None = None
    max_steps: int | None = None
    exit_delay: int | None = None
    """Steps that a token still runs after the rule fired."""
    replay: tuple[tuple[int, ...], ...] | None = None
    """Per choice, the steps of every output token after the first: recorded depths, in place of a rule."""
    draft_steps: int | None = None
    """Steps at which tokens are guessed that full depth then confirms or replaces (`engine.drafts`); 0: none are."""
    draft_tokens: int | None = None
    """Most tokens that are guessed before they are confirmed."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and what is wanted of it."""

    tokens: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    depth: DepthParams = field(default_factory=DepthParams)
    n: int = 1
    """Choices: continuations that are drawn independently."""
    prompt_logprobs: int | None = None
    """How many alternatives are reported for every token of the prompt; None: none, and the prompt is not read out."""
    priority: int = 5
    """0, the first, to 9. It orders admission and who is put back when pages run out, never the rows of a launch."""
    timeout: float | None = None
    """Seconds from arrival."""
    cache_salt: str = ""
    """Cached pages are shared by requests of one salt only."""
    id: str = ""
    """Empty: given by the engine."""


class TokenLogprob(NamedTuple):
    """A token and what the model thought of it, by log-softmax of unmodified logits in float32."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens, best first."""


@dataclass(frozen=True, kw_only=True)
class DepthUsage:
    """What the depth of a request came to: the `depth` block of an answer."""

    exit_rule: str
    threshold: float | None
    max_steps: int
    """Most steps of a token, over all blocks."""
    prefill_steps: int
    decode_tokens: int
    """Output tokens without the first of every choice, which comes from the prompt pass."""
    histogram: tuple[tuple[int, int], ...]
    """(steps, tokens)."""
    applications: int
    full_depth_applications: int
    saved_flops_fraction: float
    kv_rule: str
    reuse: str
    """Verdict of the reuse audit; "unknown" where none was made, "full depth" where no token may stop early."""
    cached_exited_tokens: int = 0
    warnings: tuple[str, ...] = ()
    drafted_tokens: int | None = None
    """Tokens guessed at few steps; None, as in the two below, where none were to be."""
    accepted_tokens: int | None = None
    """Guesses that full depth said too."""
    draft_rounds: int | None = None
    """How often guesses were checked: each time full depth says the accepted ones and one token more."""

    @property
    def mean(self) -> float | None:
        """Mean steps per decoded token; None where nothing was decoded."""
        return self.applications / self.decode_tokens if self.decode_tokens else None


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a request took."""

    prompt_tokens: int
    cached_tokens: int
    """Tokens of the prompt whose pages were already there."""
    output_tokens: int
    depth: DepthUsage
    seed: int
    preemptions: int = 0


@dataclass(frozen=True, kw_only=True)
class PromptRead:
    """The prompt has been read; sent once, before the first token, where `prompt_logprobs` asked for it."""

    logprobs: tuple[TokenLogprob | None, ...]
    """One per token of the prompt; None for the first, which nothing predicts."""


@dataclass(frozen=True, kw_only=True)
class TokenSaid:
    """One more token of a choice."""

    choice: int
    token: int
    text: str
    """What it adds to the text; empty while characters are incomplete or may become a stop string."""
    steps: int
    """Steps it ran; the first token of a choice comes from the prompt pass."""
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, kw_only=True)
class ChoiceEnded:
    """A choice has come to its end."""

    choice: int
    reason: str
    """One of FINISH_REASONS."""
    text: str = ""
    """What had been held back."""


@dataclass(frozen=True, kw_only=True)
class RequestEnded:
    """The last event of a request that was not refused or lost."""

    usage: Usage


@dataclass(frozen=True, kw_only=True)
class RequestFailed:
    """The last event of a request that could not be finished."""

    code: str
    """As in the server's table: deadline_exceeded, non_finite, kv_exhausted, cancelled, not_ready, internal."""
    message: str


Event = PromptRead | TokenSaid | ChoiceEnded | RequestEnded | RequestFailed


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One finished choice, as `Engine.generate` returns it."""

    request: str
    choice: int
    tokens: tuple[int, ...]
    text: str
    reason: str
    depths: tuple[int, ...]
    """Steps of every output token."""
    logprobs: tuple[TokenLogprob, ...] | None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None
    usage: Usage


class RefusedError(ValueError):
    """A request that cannot be served, whatever the load. `code` and `param` are those of the server's table."""

    def __init__(self, code: str, message: str, param: str | None = None):
        super().__init__(message)
        self.code, self.param = code, param


class BusyError(RuntimeError):
    """A request that cannot be served now. `code` is queue_full or not_ready."""

    def __init__(self, code: str, message: str, retry_after: int):
        super().__init__(message)
        self.code, self.retry_after = code, retry_after
