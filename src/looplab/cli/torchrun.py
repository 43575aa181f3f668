"""What torchrun changes for a command: who speaks, and how the processes come together."""

import contextlib
import io
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from looplab.cli import exit_codes
from looplab.training.distributed import Alone, Replicated, Sharded
from looplab.training.ranks import LeaderFailed, Ranks, joined, of_torchrun

Parallel = Literal["ddp", "fsdp"]
PATIENCE = 5.0
"""Seconds that a silent process outlives a failure: torchrun ends all others as soon as one has ended, and the one that
says what is wrong must come first."""


def silent() -> bool:
    """Whether another process of this run does the talking."""
    return of_torchrun(os.environ) and os.environ["RANK"] != "0"


def once(command: Callable[[], int]) -> int:
    """The exit code of a command that all processes run, whose messages to the user come from the first one alone."""
    if not silent():
        return command()
    try:
        return command()
    except exit_codes.UserError as error:
        code = error.code
    except LeaderFailed:
        code = exit_codes.UNEXPECTED
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else exit_codes.UNEXPECTED
    if code != exit_codes.DONE:
        time.sleep(PATIENCE)
    return code


@contextmanager
def hushed() -> Iterator[None]:
    """Drops what silent processes would print."""
    if not silent():
        yield
        return
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


@contextmanager
def processes(kind: Parallel | None, device: str) -> Iterator[Alone]:
    """The processes of this run, come together; one alone outside torchrun.

    Args:
        kind: Under torchrun, where the parameters are; None: ddp.
    """
    if of_torchrun(os.environ):
        with joined(device) as ranks:
            yield (Sharded if kind == "fsdp" else Replicated)(ranks=ranks)
        return
    if kind is not None:
        raise exit_codes.UserError(
            f"--parallel is for runs under torchrun. Got {kind!r} in one process. Start them with "
            "torchrun --nproc-per-node 2 -m looplab.cli train ...",
            exit_codes.USAGE,
        )
    yield Alone(ranks=Ranks(device=device))
