"""Trackio: a local database of runs, which `trackio show` draws.

It stays on this machine unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL name a place to send runs to. What it prints goes
to stderr.
"""

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout

from looplab.training.trackers.base import TRACKERS, Tracked, Tracker


@TRACKERS.register("trackio")
class Trackio(Tracker):
    """A run of the project of its recipe."""

    package = "trackio"
    extra = "track"

    def __init__(self, run: Tracked):
        import trackio

        with redirect_stdout(sys.stderr):
            self._run = trackio.init(
                project=run.project,
                name=run.name,
                config=run.config,
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Queues them; a thread of trackio writes."""
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        """Waits for that thread."""
        with redirect_stdout(sys.stderr):
            self._run.finish()
