"""What a command's exit code means: the one table, and how an error becomes a code.

A user's mistake ends as one line on stderr and its code. Anything else is a fault of ours and keeps its traceback.
"""

from collections.abc import Iterator
from contextlib import contextmanager

DONE = 0
UNEXPECTED = 1
"""An error that no command expected; the traceback is printed."""
USAGE = 2
"""The command line is wrong."""
MODEL = 3
"""The model cannot be opened, or cannot do what was asked."""
DATA = 4
"""The data or the results cannot be used."""
SELF_TEST = 5
"""A self-test failed; no result is printed."""
FINDING = 6
"""There is a finding at or above `--fail-on`."""
BUSY = 7
"""The output folder or port is busy, or belongs to another run."""
INTERRUPTED = 130

MEANINGS = {
    DONE: "done",
    UNEXPECTED: "unexpected error, with a traceback",
    USAGE: "bad command line",
    MODEL: "the model cannot be used",
    DATA: "data or results cannot be used",
    SELF_TEST: "a self-test failed",
    FINDING: "a finding at or above --fail-on",
    BUSY: "output folder or port busy, or of another run",
    INTERRUPTED: "interrupted",
}


class UserError(Exception):
    """A mistake the user can mend. `message` says which argument, what it must be, what it got and what to do."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.message = message
        self.code = code


@contextmanager
def user_error(
    code: int, kinds: tuple[type[Exception], ...] = (ValueError, TypeError, KeyError, OSError)
) -> Iterator[None]:
    """Errors of the given kinds become a `UserError` with `code`.

    Wrap only the call whose refusal is the user's to mend, such as opening a model by name: inside a larger block it
    would hide our own faults.
    """
    try:
        yield
    except kinds as error:
        # str(KeyError("x")) puts quotes around the message; an OSError keeps its file name only in str().
        message = error.args[0] if isinstance(error, KeyError) and error.args else error
        raise UserError(str(message), code) from error
