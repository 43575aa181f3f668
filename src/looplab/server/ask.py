"""What was asked for, as requests of the engine: prompts become tokens, and what was left open gets its default."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from looplab.engine.request import Event, RefusedError, Request
from looplab.engine.stats import EngineStats
from looplab.engine.tokenizer import ServedTokenizer
from looplab.server.chat import ChatTemplate
from looplab.server.errors import ApiError
from looplab.server.schema import Ask, Prompt

NO_TEMPLATE = "the tokenizer has no chat template; use /v1/completions"
MAX_TOKENS = 16
"""Output of a completion that names no number, as in the OpenAI API."""


@runtime_checkable
class Taken(Protocol):
    """A request that was taken."""

    id: str
    seed: int

    def cancel(self) -> None:
        """Ends it; harmless where it is over."""


@runtime_checkable
class ServedEngine(Protocol):
    """What a server asks of an engine."""

    def submit(self, request: Request, on_event: Callable[[Event], None]) -> Taken:
        """Takes a request; RefusedError or BusyError where it does not."""

    def check(self, request: Request) -> None:
        """Refuses what can never be served."""

    def describe(self) -> dict[str, Any]:
        """Facts for clients and operators."""

    def stats(self) -> EngineStats:
        """Counters as of now; may wait for the engine's thread."""

    def drain(self, seconds: float) -> bool:
        """Takes nothing new and waits until all is answered; what is left then fails."""

    @property
    def alive(self) -> bool:
        """Whether it can still answer."""

    @property
    def ready(self) -> bool:
        """Whether a request that came now would be taken."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much fits: from `describe` of an engine."""

    context: int
    pages: int
    page_tokens: int

    @classmethod
    def of(cls, described: dict[str, Any]) -> "Sizes":
        """The sizes that an engine names."""
        return cls(context=described["context"], pages=described["pages"], page_tokens=described["page_tokens"])

    def room(self, prompt: int, choices: int) -> int:
        """Most output tokens of each choice; at least 1, so that the engine's own check can say why it does not fit."""
        shared = prompt // self.page_tokens
        pages = shared + max(0, self.pages - shared) // choices
        return max(1, min(self.context, pages * self.page_tokens) - prompt)


@dataclass(frozen=True, kw_only=True)
class Work:
    """One HTTP request, or one line of a batch file, ready for the engine."""

    ask: Ask
    requests: tuple[Request, ...]
    """One per prompt."""
    prompt_texts: tuple[str, ...]
    """What `echo` repeats; empty without it."""

    @property
    def hides_output(self) -> bool:
        """Whether no output was asked for; the engine draws one token all the same, which nobody is shown."""
        return self.ask.max_tokens == 0


def prepare(
    ask: Ask,
    tokenizer: ServedTokenizer,
    template: ChatTemplate | None,
    sizes: Sizes,
    *,
    name: str,
    salt: str = "",
) -> Work:
    """Requests for what was asked.

    Args:
        name: Of the request; every prompt's request is named after it.
        salt: Who asks; added to the `cache_salt` of the body, so that nobody can time the prompts of another.
    Raises:
        RefusedError: Chat without a template, or messages that it refuses.
    """
    if ask.is_chat:
        if template is None:
            raise RefusedError("no_chat_template", NO_TEMPLATE, "messages")
        prompts = [tuple(tokenizer.encode(template.render(ask.messages), special=False))]
    else:
        prompts = [_tokens(prompt, tokenizer) for prompt in ask.prompts]
    requests = tuple(
        Request(
            tokens=tokens,
            sampling=replace(ask.sampling, max_tokens=_max_tokens(ask, len(tokens), sizes)),
            depth=ask.depth,
            n=ask.n,
            prompt_logprobs=ask.sampling.logprobs if ask.echo else None,
            priority=ask.priority,
            timeout=ask.timeout,
            cache_salt=f"{salt}:{ask.cache_salt}" if salt or ask.cache_salt else "",
            id=name if len(prompts) == 1 else f"{name}-{i}",
        )
        for i, tokens in enumerate(prompts)
    )
    texts = [_echo(prompt, tokenizer) for prompt in ask.prompts] if ask.echo else []
    return Work(ask=ask, requests=requests, prompt_texts=tuple(texts))


def check_model(name: str | None, served: tuple[str, ...]) -> None:
    """Refuses the name of another model."""
    if name is not None and name not in served:
        raise ApiError("model_not_found", f"no model {name[:64]}; served: {', '.join(served)}", "model")


def _tokens(prompt: Prompt, tokenizer: ServedTokenizer) -> tuple[int, ...]:
    tokens = tuple(tokenizer.encode(prompt)) if isinstance(prompt, str) else prompt
    return tokens or (() if tokenizer.bos is None else (tokenizer.bos,))


def _echo(prompt: Prompt, tokenizer: ServedTokenizer) -> str:
    if isinstance(prompt, str):
        return prompt
    if any(not 0 <= token < tokenizer.vocab for token in prompt):
        return ""  # the engine refuses it
    return tokenizer.decode(prompt)


def _max_tokens(ask: Ask, prompt: int, sizes: Sizes) -> int:
    if ask.max_tokens is not None:
        return max(1, ask.max_tokens)
    return sizes.room(prompt, ask.n) if ask.is_chat else MAX_TOKENS
