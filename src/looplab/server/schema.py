"""What a body may say: every field by name and type, and nothing else.

An unknown field is refused with a suggestion, `true` is no integer, null is as good as absent. Fields of the OpenAI API
that are not supported pass only with the value that changes nothing. Whether a value is possible for the loaded model
is not asked here (`engine.check`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from looplab._registry import did_you_mean
from looplab.engine.check import MAX_BIAS, MAX_CHOICES, MAX_LOGPROBS, SEEDS, check_stops, integer, number, said
from looplab.engine.request import DepthParams, RefusedError, SamplingParams
from looplab.server.body import json_type

Prompt = str | tuple[int, ...]
Parser = Callable[[str, Any], Any]
ROLES = ("system", "user", "assistant")
IGNORED = ("user", "metadata")
"""Fields of the API that change nothing here."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "suffix": ("",),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "accept_exited_prefix": (False,),
}
"""Fields that are not supported, and the values besides null that ask for nothing."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What a client asked for, before any tokenizer saw it."""

    prompts: tuple[Prompt, ...] = ()
    """Of completions; empty for a chat."""
    messages: tuple[Mapping[str, str], ...] = ()
    """Of a chat: role, content, and name where it was given."""
    model: str | None = None
    max_tokens: int | None = None
    """None: what the route takes where nothing is said."""
    sampling: SamplingParams
    """Its `max_tokens` is not the client's."""
    depth: DepthParams
    n: int = 1
    echo: bool = False
    stream: bool = False
    include_usage: bool = False
    return_depths: bool = False
    priority: int = 5
    timeout: float | None = None
    cache_salt: str = ""

    @property
    def is_chat(self) -> bool:
        """Whether messages were sent."""
        return bool(self.messages)


def completion_ask(body: Mapping[str, Any], *, max_prompts: int) -> Ask:
    """Reads the body of /v1/completions.

    Raises:
        RefusedError: A field that is unknown, missing, of another type or out of its range.
    """
    # Only a prompt that is read back can do without output.
    given = _fields(body, {**COMMON, **COMPLETION, "max_tokens": _whole(0 if body.get("echo") is True else 1)})
    prompts = prompts_of(body.get("prompt"), max_prompts)
    if (best := given.pop("best_of", None)) not in (None, given.get("n", 1)):
        raise RefusedError("unsupported_parameter", f"best_of must equal n; got {best}; remove best_of", "best_of")
    echo, logprobs = given.pop("echo", False), given.pop("logprobs", None)
    return _ask(given, logprobs, prompts=prompts, echo=echo)


def chat_ask(body: Mapping[str, Any]) -> Ask:
    """Reads the body of /v1/chat/completions.

    Raises:
        RefusedError: As above.
    """
    given = _fields(body, {**COMMON, **CHAT})
    messages = messages_of(body.get("messages"))
    wants, top = given.pop("logprobs", False), given.pop("top_logprobs", None)
    if top is not None and not wants:
        raise RefusedError("invalid_value", "top_logprobs needs logprobs; set logprobs to true", "top_logprobs")
    limits = {name: given.pop(name) for name in ("max_tokens", "max_completion_tokens") if name in given}
    if len(set(limits.values())) > 1:
        raise RefusedError(
            "invalid_value", "max_tokens and max_completion_tokens differ; leave max_tokens out", "max_tokens"
        )
    for name, value in limits.items():
        given["max_tokens"] = integer(name, value, 1)
    return _ask(given, (top or 0) if wants else None, messages=messages)


def prompts_of(value: Any, limit: int) -> tuple[Prompt, ...]:
    """One prompt or several: a string, strings, token ids, or lists of token ids."""
    if value is None:
        raise RefusedError("missing_parameter", "prompt is missing; it must be a string or token ids", "prompt")
    if isinstance(value, str):
        return (_text("prompt", value),)
    if not isinstance(value, list):
        raise RefusedError("invalid_type", f"prompt must be a string or token ids; got {json_type(value)}", "prompt")
    if not value or not isinstance(value[0], (str, list)):
        return (_ids("prompt", value),)
    if len(value) > limit:
        raise RefusedError("too_many_prompts", f"{len(value)} prompts; limit {limit}", "prompt")
    parse = _text if isinstance(value[0], str) else _ids
    return tuple(parse(f"prompt[{i}]", one) for i, one in enumerate(value))


def messages_of(value: Any) -> tuple[Mapping[str, str], ...]:
    """The messages of a chat, with text content only."""
    if value is None:
        raise RefusedError("missing_parameter", "messages is missing; it must be a list of messages", "messages")
    if not isinstance(value, list):
        raise RefusedError("invalid_type", f"messages must be a list; got {json_type(value)}", "messages")
    if not value:
        raise RefusedError("invalid_value", "messages must hold at least one message; got none", "messages")
    return tuple(_message(f"messages[{i}]", one) for i, one in enumerate(value))


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """A list of integers."""
    if value is None:
        raise RefusedError("missing_parameter", f"{name} is missing; it must be a list of token ids", name)
    if not isinstance(value, list):
        raise RefusedError("invalid_type", f"{name} must be a list of token ids; got {json_type(value)}", name)
    return _ids(name, value)


def text(name: str, value: Any) -> str:
    """A string of whole characters."""
    if value is None:
        raise RefusedError("missing_parameter", f"{name} is missing; it must be a string", name)
    return _text(name, value)


def boolean(name: str, value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise RefusedError("invalid_type", f"{name} must be true or false; got {said(value)}", name)
    return value


def known_fields(body: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Refuses every other field."""
    for name in body:
        if name not in names:
            hint = did_you_mean(name[:64], names).replace("'", "").replace(" Did", "; did")
            raise RefusedError("unknown_parameter", f"unknown field {_short(name)}{hint or '; remove it'}", name[:64])


def _ask(given: dict[str, Any], logprobs: int | None, **more: Any) -> Ask:
    options = given.pop("stream_options", None)
    if options is not None and not given.get("stream", False):
        raise RefusedError("invalid_value", "stream_options needs stream; set stream to true", "stream_options")
    depth = {name: given.pop(name) for name in DEPTH if name in given}
    sampling = {name: given.pop(name) for name in SAMPLING if name in given}
    return Ask(
        sampling=SamplingParams(logprobs=logprobs, **sampling),
        depth=DepthParams(**depth),
        include_usage=bool(options),
        **given,
        **more,
    )


def _fields(body: Mapping[str, Any], known: Mapping[str, Parser]) -> dict[str, Any]:
    """The fields that were given, parsed; what asks for nothing is left out."""
    known_fields(body, (*known, *IGNORED, *NEUTRAL))
    for name, neutral in NEUTRAL.items():
        value = body.get(name)
        if value is not None and not any(type(value) is type(one) and value == one for one in neutral):
            raise RefusedError("unsupported_parameter", _unsupported(name), name)
    given = {name: parse(name, body[name]) for name, parse in known.items() if body.get(name) is not None}
    return {name: value for name, value in given.items() if name not in ("prompt", "messages")}


def _unsupported(name: str) -> str:
    if name in ("response_format", "modalities", "audio"):
        return f"only text content is supported; remove {name}"
    verb = "are" if name.endswith("s") else "is"
    return f"{name} {verb} not supported by this server; remove {name}"


def _whole(least: int, most: int | None = None) -> Parser:
    return lambda name, value: integer(name, value, least, most)


def _real(low: float, high: float | None = None, *, open_low: bool = False) -> Parser:
    return lambda name, value: number(name, value, low, high, open_low=open_low)


def _anything(name: str, value: Any) -> Any:
    return value


def _steps(name: str, value: Any) -> int:
    """An integer; which ones are possible depends on the model."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise RefusedError("invalid_depth", f"{name} must be an integer; got {said(value)}", name)
    return value


def _threshold(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RefusedError("invalid_type", f"{name} must be a number; got {said(value)}", name)
    try:
        return float(value)
    except OverflowError:
        raise RefusedError("invalid_value", f"{name} must be a finite number; got {said(value)}", name) from None


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RefusedError("invalid_type", f"{name} must be a string; got {json_type(value)}", name)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RefusedError(
            "invalid_encoding", f"{name} has half of a surrogate pair at character {error.start}; send both", name
        ) from None
    return value


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise RefusedError("invalid_type", f"{name} must be a list of token ids; got {json_type(value)}", name)
    for i, token in enumerate(value):
        if isinstance(token, bool) or not isinstance(token, int):
            raise RefusedError("invalid_type", f"{name}[{i}] must be a token id; got {said(token)}", name)
    return tuple(value)


def _stops(name: str, value: Any) -> tuple[str, ...]:
    stops = tuple(_text(f"{name}[{i}]", one) for i, one in enumerate(value)) if isinstance(value, list) else None
    if stops is None and not isinstance(value, str):
        raise RefusedError("invalid_type", f"{name} must be a string or strings; got {json_type(value)}", name)
    found = (_text(name, value),) if stops is None else stops
    check_stops(found)
    return found


def _bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise RefusedError("invalid_type", f"{name} must map token ids to numbers; got {json_type(value)}", name)
    for token in value:
        if not (token.isascii() and token.isdecimal() and len(token) <= 18):
            raise RefusedError("invalid_value", f"{name} must have token ids as keys; got {_short(token)}", name)
    return tuple((int(token), number(name, bias, -MAX_BIAS, MAX_BIAS)) for token, bias in value.items())


def _stream_options(name: str, value: Any) -> bool:
    if not isinstance(value, dict):
        raise RefusedError("invalid_type", f"{name} must be an object; got {json_type(value)}", name)
    known_fields(value, ("include_usage",))
    wanted = value.get("include_usage")
    return wanted is not None and boolean(f"{name}.include_usage", wanted)


def _message(where: str, value: Any) -> Mapping[str, str]:
    if not isinstance(value, dict):
        raise RefusedError("invalid_type", f"{where} must be an object; got {json_type(value)}", "messages")
    # Answers of the API come back as parts of a conversation, with fields that are null or empty.
    said_fields = {name: one for name, one in value.items() if one is not None and one != []}
    known_fields(said_fields, ("role", "content", "name"))
    role = said_fields.get("role")
    if role not in ROLES:
        told = role if isinstance(role, str) else json_type(role)
        raise RefusedError(
            "invalid_value", f"{where}.role must be system, user or assistant; got {_short(told)}", "messages"
        )
    message = {"role": role, "content": _content(f"{where}.content", value.get("content"))}
    return message if "name" not in said_fields else {**message, "name": _text(f"{where}.name", value["name"])}


def _content(where: str, value: Any) -> str:
    if not isinstance(value, list):
        return _text(where, value)
    parts = []
    for i, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise RefusedError("unsupported_parameter", f"only text content is supported; see {where}[{i}]", "messages")
        known_fields(part, ("type", "text"))
        parts.append(_text(f"{where}[{i}].text", part.get("text")))
    return "\n".join(parts)


def _short(text: str) -> str:
    safe = text.encode(errors="replace").decode()
    return safe if len(safe) <= 40 else f"{safe[:37]}..."


SAMPLING: dict[str, Parser] = {
    "temperature": _real(0.0, 2.0),
    "top_p": _real(0.0, 1.0, open_low=True),
    "min_p": _real(0.0, 1.0),
    "top_k": _whole(0),
    "repetition_penalty": _real(0.0, open_low=True),
    "presence_penalty": _real(-2.0, 2.0),
    "frequency_penalty": _real(-2.0, 2.0),
    "logit_bias": _bias,
    "seed": _whole(-SEEDS, SEEDS - 1),
    "stop": _stops,
    "stop_token_ids": token_ids,
    "ignore_eos": boolean,
    "min_tokens": _whole(0),
}
DEPTH: dict[str, Parser] = {
    "num_steps": _steps,
    "min_steps": _steps,
    "max_steps": _steps,
    "exit_rule": _text,
    "exit_threshold": _threshold,
    "exit_delay": _steps,
    "draft_steps": _steps,
    "draft_tokens": _steps,
}
COMMON: dict[str, Parser] = {
    "model": _text,
    "n": _whole(1, MAX_CHOICES),
    "stream": boolean,
    "stream_options": _stream_options,
    "return_depths": boolean,
    "priority": _whole(0, 9),
    "timeout": _real(0.0, open_low=True),
    "cache_salt": _text,
    **SAMPLING,
    **DEPTH,
}
COMPLETION: dict[str, Parser] = {
    "prompt": _anything,
    "echo": boolean,
    "logprobs": _whole(0, MAX_LOGPROBS),
    "best_of": _whole(1, MAX_CHOICES),
}
CHAT: dict[str, Parser] = {
    "messages": _anything,
    "max_tokens": _whole(1),
    "max_completion_tokens": _whole(1),
    "logprobs": boolean,
    "top_logprobs": _whole(0, MAX_LOGPROBS),
}
