"""What goes wrong, as clients of the OpenAI API read it.

    {"error": {"message": "...", "type": "invalid_request_error", "param": "temperature", "code": "invalid_value"}}

A client of that API retries 408, 409, 429 and 5xx by itself: errors that no retry cures say `x-should-retry: false`.
"""

from typing import Any

from looplab.engine.request import BusyError, RefusedError, RequestFailed

STATUS = {
    "body_too_large": 413,
    "unsupported_media_type": 415,
    "model_not_found": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "invalid_api_key": 401,
    "bad_host": 421,
    "duplicate_request": 409,
    "queue_full": 429,
    "not_ready": 503,
    "kv_exhausted": 503,
    "deadline_exceeded": 504,
    "cancelled": 499,
    "non_finite": 500,
    "internal": 500,
}
"""Status of a code; of all others 400."""
CURABLE = ("queue_full", "not_ready", "kv_exhausted", "internal")
"""Codes after which the same request may succeed."""
RETRY_AFTER = 1
"""Seconds to wait where nothing better is known."""
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        code: str,
        message: str,
        param: str | None = None,
        *,
        retry_after: int | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.code, self.message, self.param = code, message, param
        self.status = STATUS.get(code, 400)
        self.headers = dict(headers or {})
        if code not in CURABLE:
            self.headers["x-should-retry"] = "false"
        elif retry_after is not None:
            self.headers["retry-after"] = str(min(max(retry_after, 1), 60))

    def body(self) -> dict[str, Any]:
        """The JSON of the answer, also of an event in a stream."""
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def api_error(error: RefusedError | BusyError | RequestFailed) -> ApiError:
    """What the engine said, as an answer."""
    if isinstance(error, RefusedError):
        return ApiError(error.code, str(error), error.param)
    if isinstance(error, BusyError):
        return ApiError(error.code, str(error), retry_after=error.retry_after)
    return ApiError(error.code, error.message, retry_after=RETRY_AFTER)
