"""What a run says while it runs: a moving bar on a terminal, one plain line per `log_every` otherwise."""

import sys
from collections.abc import Mapping
from io import TextIOBase
from typing import Any, ClassVar


class Display:
    """Where a run reports to. This one says nothing."""

    silent: ClassVar[bool] = True
    """Whether lines are dropped, so that nobody needs to make them."""

    def step(self, record: Mapping[str, Any], *, steps: int, tokens_per_second: float, seconds_left: float) -> None:
        """One optimizer step; `record` is its line of metrics.jsonl."""

    def say(self, line: str) -> None:
        """A line that stays."""

    def close(self) -> None:
        """The run ends."""


class Lines(Display):
    """One line per `every` steps."""

    silent = False

    def __init__(self, every: int, stream: TextIOBase | None = None):
        self._every = every
        self._stream: Any = stream or sys.stderr

    def step(self, record: Mapping[str, Any], *, steps: int, tokens_per_second: float, seconds_left: float) -> None:
        """A line, if it is its turn."""
        if record["step"] % self._every == 0 or record["step"] == steps:
            self.say(line(record, steps=steps, tokens_per_second=tokens_per_second, seconds_left=seconds_left))

    def say(self, line: str) -> None:
        """A line, at once."""
        print(line, file=self._stream, flush=True)


class Bar(Display):
    """A bar that moves on a terminal; lines of `say` stay above it."""

    silent = False

    def __init__(self, stream: TextIOBase | None = None):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        file: Any = stream or sys.stderr
        self._console = Console(file=file)
        self._progress = Progress(TextColumn("{task.description}"), BarColumn(), console=self._console)
        self._task = self._progress.add_task("", total=None)
        self._progress.start()

    def step(self, record: Mapping[str, Any], *, steps: int, tokens_per_second: float, seconds_left: float) -> None:
        """Moves the bar."""
        text = line(record, steps=steps, tokens_per_second=tokens_per_second, seconds_left=seconds_left)
        self._progress.update(self._task, total=steps, completed=record["step"], description=text)

    def say(self, line: str) -> None:
        """A line above the bar."""
        self._console.print(line, markup=False, highlight=False)

    def close(self) -> None:
        """Leaves the bar as it is."""
        self._progress.stop()


def choose_display(every: int, *, quiet: bool = False, stream: TextIOBase | None = None) -> Display:
    """A bar on a terminal, lines elsewhere, nothing if quiet."""
    if quiet:
        return Display()
    return Bar(stream) if (stream or sys.stderr).isatty() else Lines(every, stream)


def line(record: Mapping[str, Any], *, steps: int, tokens_per_second: float, seconds_left: float) -> str:
    """`step 100/1500  loss 2.3104  12.3k tokens/s  T 4  left 3:21`."""
    rate = f"{tokens_per_second / 1000:.1f}k" if tokens_per_second >= 1000 else f"{tokens_per_second:.0f}"
    return (
        f"step {record['step']}/{steps}  loss {record['loss']:.4f}  {rate} tokens/s  T {record['T']}  "
        f"left {clock(seconds_left)}"
    )


def clock(seconds: float) -> str:
    """3:21, or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
