"""Messages to a prompt, by the template of the tokenizer's own folder.

A template is a program that came with a checkpoint: it runs in the sandbox of Jinja, which lets it read the messages
and nothing else. The helpers are those that templates are written against (`raise_exception`, `strftime_now`, `tojson`,
the `generation` mark, which changes nothing here).
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from looplab.engine.request import RefusedError
from looplab.engine.tokenizer import ServedTokenizer


class Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`, a mark for training, is its content."""

    tags = {"generation"}  # noqa: RUF012, Jinja's own declaration

    def parse(self, parser: Any) -> Any:
        """The nodes between the marks."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template. A source that is no template is a ValueError."""

    def __init__(self, source: str, tokenizer: ServedTokenizer):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"chat_template must be a Jinja template. Got: {error}. Repair the file.") from None
        self._special = {
            f"{name}_token": written
            for name in ("bos", "eos", "pad")
            if (written := special_text(tokenizer, name)) is not None
        }

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt that asks for the next message of the assistant.

        Raises:
            RefusedError: The template refuses the messages, for instance because roles must take turns.
        """
        asked = [dict(message) for message in messages]
        try:
            return self._template.render(messages=asked, add_generation_prompt=True, **self._special)
        except Exception as error:  # a template is a program of somebody else
            raise RefusedError(
                "invalid_value", f"the chat template refuses these messages: {error}", "messages"
            ) from None


def special_text(tokenizer: ServedTokenizer, name: str) -> str | None:
    """A special token as its vocabulary writes it; None where there is none, or it has no text."""
    token = {"bos": tokenizer.bos, "eos": tokenizer.eos, "pad": tokenizer.pad}[name]
    return None if token is None else tokenizer.written(token)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
