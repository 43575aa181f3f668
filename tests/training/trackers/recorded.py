"""A tracker that keeps what it is told, and one that breaks, registered for a test."""

from looplab.training.trackers import TRACKERS, Tracker


def register(monkeypatch, *, fails=()):
    """A tracker "kept" whose methods in `fails` raise; returns what happened, in order."""
    told = []

    class Kept(Tracker):
        package = "json"
        extra = "kept"

        def __init__(self, run):
            self._do("start", run)

        def log(self, numbers, step):
            self._do("log", (step, numbers))

        def close(self):
            self._do("close", None)

        def _do(self, name, value):
            told.append((name, value))
            if name in fails:
                raise OSError(f"no {name}")

    assert "kept" not in TRACKERS
    monkeypatch.setitem(TRACKERS._entries, "kept", Kept)
    return told


def logged(told):
    """(step, numbers) of every log."""
    return [value for name, value in told if name == "log"]
