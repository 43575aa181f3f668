"""Sizes and policies of an engine. No torch."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an engine is built with; None where the engine finds a value itself and says it at the start.

    Source: continuous depth batching, arXiv:2608.09444. Deviations: launch width and residents are two numbers, and
    rows of one launch may be at different iterations under every cache rule.
    """

    launch_rows: int | None = None
    """W: most rows of a launch. None: 16 on a CPU, 64 on CUDA."""
    max_resident: int | None = None
    """R: choices that hold a seat. None: W + max(1, W // 2)."""
    min_coda_rows: int | None = None
    """m: rows that a readout waits for while the core has work. None: fitted at the start."""
    token_budget: int = 2048
    """Most prompt tokens of a launch."""
    prefill_chunk: int = 512
    """Prompts are cut at multiples of it, counted from their first token."""
    page_tokens: int = 16
    num_pages: int | None = None
    """None: what `kv_fraction` of the free memory holds."""
    kv_fraction: float = 0.5
    max_model_len: int | None = None
    """Longest text. None: the model's."""
    refill: bool = True
    """False: new tokens and prompts wait until the rows under way have all been read out (the wave baseline)."""
    segments: Literal["iteration", "plan"] = "iteration"
    """plan: a core launch takes its rows through all iterations, as ordinary continuous batching does."""
    successors: Literal["tail", "head"] = "tail"
    """Where the next token of a row enters the queue of the first block."""
    homogeneous_steps: bool = False
    """Launch rows of equal iteration only, as the reference implementation does under depth-indexed entries."""
    numerics: Literal["exact", "fast"] = "fast"
    """exact: tokens do not depend on neighbours, bit for bit."""
    kv_rule: str | None = None
    """None: the model's own."""
    reuse: Literal["off", "check", "pick", "require"] = "check"
    admit: Literal["optimistic", "reserve"] = "optimistic"
    preempt: Literal["replay", "never"] = "replay"
    free_page_margin: float = 0.2
    min_free_seats: int = 1
    max_bypass: int = 16
    """Smaller requests that may pass one at the head of the queue that lacks pages."""
    max_waiting: int = 256
    max_waiting_tokens: int = 1_000_000
    prefix_cache: bool = True
    exit_rule: str | None = None
    """Rule of requests that name none. None: every token runs all steps."""
    exit_threshold: float | None = None
    min_steps: int = 1
    max_steps: int | None = None
    """None: what the model itself runs."""
    exit_delay: int = 0
    offset_one: bool = False
    """Act on the score of a step after the next one has been launched, which hides the way to the host."""
    allow_costly_exit: bool = False
    """Load rules that need coda and head after every step although they cannot pay here."""
    draft_steps: int | None = None
    """Steps at which tokens are guessed before full depth says them (`engine.drafts`), for requests that do not say.
    None: none are guessed."""
    draft_tokens: int = 4
    """Guesses of a round, and the most that a request may ask for."""
    noise: Literal["zeros", "position", "request"] | None = None
    """First state of models that draw it. None: by position."""
    seed: int = 0

    def __post_init__(self) -> None:
        least = {
            "launch_rows": 1, "max_resident": 1, "min_coda_rows": 1, "num_pages": 2, "max_model_len": 1,
            "page_tokens": 1, "prefill_chunk": 1, "min_steps": 1, "max_steps": 1, "exit_delay": 0, "max_waiting": 1,
        }  # fmt: skip
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ValueError(f"EngineConfig.{name} must be at least {bound}. Got {value}. Raise it.")
        if not 0 < self.kv_fraction <= 1:
            raise ValueError(f"EngineConfig.kv_fraction must be in (0, 1]. Got {self.kv_fraction}. Try 0.5.")
        for low, high in (
            ("launch_rows", "max_resident"),
            ("min_coda_rows", "max_resident"),
            ("min_steps", "max_steps"),
        ):
            below, above = getattr(self, low), getattr(self, high)
            if below is not None and above is not None and below > above:
                raise ValueError(
                    f"EngineConfig.{low} must be at most {high}, {above}. Got {below}. Lower it or raise {high}."
                )
