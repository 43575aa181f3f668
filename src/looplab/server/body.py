"""The body of a request: bytes to a JSON object, refused where it is too large, too deep or no JSON."""

import json
import re
from typing import Any

from looplab.server.errors import ApiError

MAX_DEPTH = 64
_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_BRACKETS = re.compile(r"[\[\]{}]")


def check_media_type(header: str | None) -> None:
    """Refuses everything but JSON."""
    if (header or "").partition(";")[0].strip().lower() != "application/json":
        said = f"content-type must be application/json; got {header or 'none'}; send application/json"
        raise ApiError("unsupported_media_type", said)


def check_size(size: int, limit: int) -> None:
    """Refuses a body, or the part that has been read, above the limit."""
    if size > limit:
        raise ApiError("body_too_large", f"body is {size / 2**20:.1f} MiB; limit {limit / 2**20:g} MiB")


def parse_object(data: bytes) -> dict[str, Any]:
    """The object that a body holds.

    Raises:
        ApiError: invalid_encoding with the offset of the byte, invalid_json with line and column, invalid_type.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError("invalid_encoding", f"body must be UTF-8; bad byte at offset {error.start}") from None
    _check_depth(text)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ApiError(
            "invalid_json", f"body is not valid JSON at line {error.lineno} column {error.colno}: {error.msg}"
        ) from None
    except ValueError as error:  # a number of thousands of digits
        raise ApiError("invalid_json", f"body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError("invalid_type", f"body must be a JSON object; got {json_type(value)}")
    return value


def json_type(value: Any) -> str:
    """The JSON word for the type of a value."""
    words = {bool: "boolean", dict: "object", list: "array", str: "string", int: "number", float: "number"}
    return words.get(type(value), "null")


def _check_depth(text: str) -> None:
    """Refuses deep nesting before the parser meets it, whose recursion has no such limit."""
    depth = 0
    for bracket in _BRACKETS.finditer(_STRINGS.sub(_blank, text)):
        depth += 1 if bracket[0] in "[{" else -1
        if depth > MAX_DEPTH:
            raise ApiError("invalid_json", f"body is not valid JSON here: nested deeper than {MAX_DEPTH}")


def _blank(string: re.Match[str]) -> str:
    return '""'
