"""What no load can make right: a request is compared with the facts of an engine before it enters. No torch.

    sampling   numbers in their ranges, ids in the vocabulary
    size       prompt and output fit the context, and the longest form fits the empty cache
    depth      steps within what the engine runs, a rule that is loaded and that the cache rule admits

Every refusal is a RefusedError whose message says what, what it must be, what it got and, where that is not plain, what
to do. Values are checked as well as types, because a request may come from Python or out of a body of JSON.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from looplab._registry import did_you_mean
from looplab.engine.drafts import check_drafts
from looplab.engine.pages import pages_of_request
from looplab.engine.request import DepthParams, RefusedError, Request, SamplingParams

MAX_CHOICES = 16
MAX_STOPS = 16
MAX_LOGPROBS = 20
MAX_BIAS = 100.0
SEEDS = 2**63
"""Seeds are from -2^63 to 2^63 - 1, as in a signed word of 64 bits."""
FRACTIONS = ("hazard", "lookahead", "preloop")
"""Rules whose threshold is a probability."""
COUNTS = ("argmax", "fixed")
"""Rules whose number counts something."""
PLAIN = ("full",)
"""Rules without a number, by which no token stops early."""


@dataclass(frozen=True, kw_only=True)
class CheckFacts:
    """What an engine can do, as far as a request may ask for more."""

    vocab: int
    context: int
    """Longest text, prompt and output, in tokens."""
    pages: int
    """Pages that can be handed out."""
    page_tokens: int
    seats: int
    max_steps: int
    """Most steps that a token may run."""
    trained_steps: str = ""
    """In words, such as 4 or 1..8; empty where nobody knows."""
    exit_rules: tuple[str, ...] = ()
    """Names of the rules that are loaded."""
    default_rule: str | None = None
    """Rule of requests that name none."""
    refused_rules: tuple[tuple[str, str], ...] = ()
    """(rule, why): rules that are not loaded, because the model has nothing for them or because they cannot pay."""
    exits_refused: str = ""
    """Why no token may stop early, such as "depth_indexed forbids exits; use last_exited"; empty: they may."""
    draft_tokens: int = 4
    """Most tokens that may be guessed in a round."""
    draft_steps: int | None = None
    """At which they are, where a request does not say; None: none are."""
    drafts_refused: str = ""
    """Why none may be guessed."""


def check(request: Request, facts: CheckFacts) -> None:
    """Refuses what the engine can never serve.

    Raises:
        RefusedError: With the code of the server's table and the name of the field.
    """
    check_sampling(request.sampling, facts.vocab, reads_prompt=request.prompt_logprobs is not None)
    integer("n", request.n, 1, MAX_CHOICES)
    if request.n > facts.seats:
        raise RefusedError("invalid_value", f"n must be at most {facts.seats}, the seats; got {request.n}", "n")
    if request.prompt_logprobs is not None:
        integer("logprobs", request.prompt_logprobs, 0, MAX_LOGPROBS)
    integer("priority", request.priority, 0, 9)
    if request.timeout is not None:
        number("timeout", request.timeout, 0.0, open_low=True)
    check_prompt(request.tokens, facts.vocab)
    check_size(request, facts)
    check_depth(request.depth, facts)
    if request.depth.replay is not None:
        check_replay(request.depth.replay, request.n, facts.max_steps)


def check_prompt(tokens: Sequence[int], vocab: int, name: str = "prompt") -> None:
    """Refuses no token at all, and ids outside the vocabulary."""
    if not tokens:
        raise RefusedError("empty_prompt", "prompt is empty and no token begins a text", "prompt")
    for position, token in enumerate(tokens):
        if not 0 <= token < vocab:
            raise RefusedError(
                "invalid_token", f"token id {token} at position {position}; vocabulary has {vocab}", name
            )


def check_size(request: Request, facts: CheckFacts) -> None:
    """Refuses what is longer than the context, or larger than the whole cache."""
    prompt, output = len(request.tokens), request.sampling.max_tokens
    if prompt + output > facts.context:
        room = facts.context - prompt
        todo = f"lower max_tokens to {room}" if room > 0 else "shorten the prompt"
        raise RefusedError(
            "context_length_exceeded",
            f"{prompt} prompt + {output} output tokens; context {facts.context}; {todo}",
            "max_tokens" if room > 0 else "prompt",
        )
    needed = pages_of_request(prompt, output, request.n, facts.page_tokens)
    if needed > facts.pages:
        raise RefusedError(
            "kv_too_small",
            f"needs {needed} pages; cache has {facts.pages}; raise --kv-fraction or --num-pages",
            "max_tokens",
        )


def check_sampling(sampling: SamplingParams, vocab: int, *, reads_prompt: bool = False) -> None:
    """Refuses numbers out of their ranges.

    Args:
        reads_prompt: Whether log-probabilities of the prompt are asked for; no output at all is then allowed.
    """
    integer("max_tokens", sampling.max_tokens, 0 if reads_prompt else 1)
    number("temperature", sampling.temperature, 0.0, 2.0)
    integer("top_k", sampling.top_k, 0)
    number("top_p", sampling.top_p, 0.0, 1.0, open_low=True)
    number("min_p", sampling.min_p, 0.0, 1.0)
    number("repetition_penalty", sampling.repetition_penalty, 0.0, open_low=True)
    number("presence_penalty", sampling.presence_penalty, -2.0, 2.0)
    number("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0)
    integer("min_tokens", sampling.min_tokens, 0)
    if sampling.min_tokens > sampling.max_tokens:
        raise RefusedError(
            "invalid_value",
            f"min_tokens must be at most max_tokens, {sampling.max_tokens}; got {sampling.min_tokens}",
            "min_tokens",
        )
    if sampling.logprobs is not None:
        integer("logprobs", sampling.logprobs, 0, MAX_LOGPROBS)
    if sampling.seed is not None:
        integer("seed", sampling.seed, -SEEDS, SEEDS - 1)
    check_stops(sampling.stop)
    for token, bias in sampling.logit_bias:
        _known("logit_bias", token, vocab)
        number("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
    for token in sampling.stop_token_ids:
        _known("stop_token_ids", token, vocab)


def check_stops(stops: Sequence[str]) -> None:
    """Refuses too many stop strings, and empty ones."""
    if len(stops) > MAX_STOPS:
        raise RefusedError("invalid_value", f"{len(stops)} stop strings; limit {MAX_STOPS}", "stop")
    for i, text in enumerate(stops):
        if not text:
            raise RefusedError("invalid_value", f"stop string {i} is empty", "stop")


def check_depth(depth: DepthParams, facts: CheckFacts) -> None:
    """Refuses steps that the engine does not run, and rules that it cannot follow."""
    _check_steps(depth, facts)
    rule = depth.exit_rule or facts.default_rule
    if depth.exit_threshold is not None and rule is None:
        raise RefusedError("invalid_depth", "exit_threshold needs exit_rule; got none; name one", "exit_threshold")
    early = (depth.exit_rule is not None and depth.exit_rule not in PLAIN) or depth.replay is not None
    if early and facts.exits_refused:
        raise RefusedError("exit_refused", facts.exits_refused, "exit_rule")
    if depth.exit_rule is not None:
        _check_rule(depth.exit_rule, facts)
    if rule is not None and (depth.exit_rule is not None or depth.exit_threshold is not None):
        _check_threshold(rule, depth.exit_threshold, optional=rule == facts.default_rule)
    stops = "replay" if depth.replay is not None else None if depth.num_steps is not None or rule in PLAIN else rule
    check_drafts(
        depth,
        rule=stops,
        full_steps=depth.num_steps or depth.max_steps or facts.max_steps,
        most_tokens=facts.draft_tokens,
        default_steps=facts.draft_steps,
        refused=facts.drafts_refused,
    )


def check_replay(replay: Sequence[Sequence[int]], choices: int, most: int) -> None:
    """Refuses recorded depths of another number of choices, and those that no token can run."""
    if len(replay) != choices:
        raise RefusedError(
            "invalid_depth", f"replay must have depths for every choice, {choices}; got {len(replay)}", "replay"
        )
    for choice, depths in enumerate(replay):
        for index, steps in enumerate(depths):
            if not (_is_int(steps) and 1 <= steps <= most):
                place = f"token {index + 1} of choice {choice}"
                raise RefusedError(
                    "invalid_depth", f"replay must be in 1..{most}; got {said(steps)} at {place}", "replay"
                )


def _check_steps(depth: DepthParams, facts: CheckFacts) -> None:
    trained = f"; trained with {facts.trained_steps}" if facts.trained_steps else ""
    for name in ("num_steps", "min_steps", "max_steps"):
        steps = getattr(depth, name)
        if steps is not None and not (_is_int(steps) and 1 <= steps <= facts.max_steps):
            raise RefusedError(
                "invalid_depth", f"{name} must be in 1..{facts.max_steps}{trained}; got {said(steps)}", name
            )
    if depth.num_steps is not None:
        for name in ("exit_rule", "exit_threshold", "min_steps", "max_steps", "exit_delay", "replay"):
            if getattr(depth, name) is not None:
                raise RefusedError("invalid_depth", f"num_steps and {name} exclude each other; leave one out", name)
    most = depth.max_steps if depth.max_steps is not None else facts.max_steps
    if depth.min_steps is not None and depth.min_steps > most:
        raise RefusedError(
            "invalid_depth", f"min_steps must be at most max_steps, {most}; got {depth.min_steps}", "min_steps"
        )
    if depth.exit_delay is not None and not (_is_int(depth.exit_delay) and depth.exit_delay >= 0):
        raise RefusedError(
            "invalid_depth", f"exit_delay must be an integer >= 0; got {said(depth.exit_delay)}", "exit_delay"
        )


def _check_rule(name: str, facts: CheckFacts) -> None:
    why = dict(facts.refused_rules).get(name)
    if why is not None:
        raise RefusedError("exit_unavailable", why, "exit_rule")
    if name not in facts.exit_rules:
        hint = did_you_mean(name, facts.exit_rules).replace("'", "").replace("Did", "did")
        raise RefusedError(
            "exit_unavailable",
            f"exit_rule {name} is not loaded; loaded: {', '.join(facts.exit_rules) or 'none'};{hint or ' choose one'}",
            "exit_rule",
        )


def _check_threshold(rule: str, threshold: float | None, *, optional: bool) -> None:
    if rule in PLAIN:
        if threshold is not None:
            raise RefusedError(
                "invalid_value", f"threshold must be left out for {rule}; got {said(threshold)}", "exit_threshold"
            )
        return
    must = "in (0, 1]" if rule in FRACTIONS else "an integer >= 1" if rule in COUNTS else "a finite number above 0"
    if threshold is None:
        if optional:
            return
        raise RefusedError("invalid_value", f"threshold of {rule} must be {must}; got none", "exit_threshold")
    fits = (
        not isinstance(threshold, bool)
        and 0 < threshold <= sys.float_info.max
        and (rule not in FRACTIONS or threshold <= 1)
        and (rule not in COUNTS or float(threshold).is_integer())
    )
    if not fits:
        raise RefusedError("invalid_value", f"threshold must be {must}; got {said(threshold)}", "exit_threshold")


def integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """The value, if it is an integer in its range; true and 16.0 are none."""
    must = f"an integer >= {least}" if most is None else f"an integer in {least}..{most}"
    if not _is_int(value):
        raise RefusedError("invalid_type", f"{name} must be {must}; got {said(value)}", name)
    if value < least or (most is not None and value > most):
        raise RefusedError("invalid_value", f"{name} must be {must}; got {said(value)}", name)
    return value


def number(name: str, value: Any, low: float, high: float | None = None, *, open_low: bool = False) -> float:
    """The value, if it is a finite number in its range."""
    if high is None:
        must = f"a finite number {'above' if open_low else 'of at least'} {low:g}"
    else:
        must = f"in {'(' if open_low else '['}{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        must = must if must.startswith("a ") else f"a number {must}"
        raise RefusedError("invalid_type", f"{name} must be {must}; got {said(value)}", name)
    above = value > low if open_low else value >= low
    if not (above and value <= (sys.float_info.max if high is None else high)):
        raise RefusedError("invalid_value", f"{name} must be {must}; got {said(value)}", name)
    return float(value)


def said(value: Any) -> str:
    """A value as JSON writes it, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _known(name: str, token: Any, vocab: int) -> None:
    if not _is_int(token) or not 0 <= token < vocab:
        raise RefusedError("invalid_value", f"{name} has token id {said(token)}; vocabulary has {vocab}", name)
