"""The contract of a tracker, and all trackers of a run behind one face.

metrics.jsonl is the record of a run; trackers are told some of its lines: every `log_every`-th step, the last one, and
every evaluation. They can do a run no harm: what goes wrong in one is said once, and it is told nothing more.

A resumed run goes on in the same run of the tracker, by an id that stays in the run's folder. It begins at its newest
checkpoint, so the steps since then are told twice, with the same numbers.
"""

import json
import secrets
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from looplab._config import to_dict
from looplab._registry import Registry
from looplab.records import dump_json, write_atomic

TRACKERS: Registry[type["Tracker"]] = Registry("tracker", package="looplab.training.trackers")
IDENTITY = "trackers.json"
"""In the folder of a run: the id by which trackers know it."""


class TrackerError(ValueError):
    """A tracker that cannot be had."""


class Tracked(NamedTuple):
    """A run, as a tracker sees it."""

    folder: Path
    id: str
    """The same after a resume, and different for every folder."""
    project: str
    """Its recipe."""
    config: dict[str, Any]
    step: int
    """Steps that were done before; 0 for a new run."""

    @property
    def name(self) -> str:
        """For people, and unlike that of any other run."""
        return f"{self.folder.resolve().name}-{self.id}"


class Tracker(ABC):
    """One run in one program. Any method may raise."""

    package: ClassVar[str]
    """What must be installed."""
    extra: ClassVar[str]
    """The extra of looplab that brings it."""

    @abstractmethod
    def __init__(self, run: Tracked):
        """Begins a run, or goes on with the one of this id."""

    @abstractmethod
    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Numbers of one step; some may not be finite."""

    @abstractmethod
    def close(self) -> None:
        """Hands over what is left."""


class Trackers:
    """The trackers of one run."""

    def __init__(self, names: Sequence[str] = (), folder: Path = Path(), config: Any = None, *, step: int = 0):
        """Begins, or goes on.

        Args:
            names: Of registered trackers; none: nobody is told anything.
            folder: Of the run.
            config: The RunConfig.
            step: Steps that were done before.

        Raises:
            KeyError: An unknown name.
            TrackerError: A package that is not installed.
        """
        check_trackers(names)
        self._config = config
        self._alive: dict[str, Tracker] = {}
        for name in names:
            run = Tracked(folder, _identity(folder), config.recipe, to_dict(config), step)
            started = self._try(name, TRACKERS[name], run)
            if started is not None:
                self._alive[name] = started

    def write(self, record: Mapping[str, Any]) -> None:
        """Tells a line of the metrics, if it is one that is told."""
        if not self._alive or not self._told(record):
            return
        numbers = dict(flat(record))
        for name, tracker in list(self._alive.items()):
            self._try(name, tracker.log, numbers, record["step"])

    def close(self) -> None:
        """Ends all."""
        for name, tracker in list(self._alive.items()):
            self._try(name, tracker.close)
        self._alive = {}

    def _told(self, record: Mapping[str, Any]) -> bool:
        if record["kind"] != "train":
            return record["kind"] == "eval"
        return record["step"] % self._config.log_every == 0 or record["step"] == self._config.steps

    def _try(self, name: str, act: Any, *given: Any) -> Any:
        """What `act` gives; where it fails, None, a warning, and the end of the tracker."""
        try:
            return act(*given)
        except Exception as error:
            self._alive.pop(name, None)
            what = f"{type(error).__name__}: {error}"
            warnings.warn(f"Tracker {name} failed ({what}). The run goes on without it.", stacklevel=3)
            return None


def check_trackers(names: Sequence[str]) -> None:
    """Refuses what cannot be had, before a run begins.

    Raises:
        KeyError: An unknown name.
        TrackerError: A package that is not installed, or a name twice.
    """
    for name in names:
        kind = TRACKERS[name]
        if find_spec(kind.package) is None:
            raise TrackerError(
                f"track must name trackers that are installed. Got {name!r}, whose package {kind.package} is missing. "
                f"Install it: pip install 'looplab[{kind.extra}]'."
            )
    if len(set(names)) < len(names):
        raise TrackerError(f"track must name every tracker once. Got {', '.join(names)}. Leave one out.")


def flat(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a line of the metrics: `train/loss`, `eval/losses/4`, `eval/cells/8@16/exact_match`."""
    kind = record["kind"]
    for name, value in record.items():
        if name not in ("kind", "step"):
            yield from _flat(f"{kind}/{name}", value)


def _flat(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{name}/{key}", inner)
    elif isinstance(value, list):  # cells of a grid
        for cell in value:
            place = {"difficulty", "num_steps"}
            for key in cell.keys() - place:
                yield from _flat(f"{name}/{cell['difficulty']}@{cell['num_steps']}/{key}", cell[key])
    elif isinstance(value, int | float):
        yield name, float(value)


def _identity(folder: Path) -> str:
    path = folder / IDENTITY
    if not path.exists():
        write_atomic(path, dump_json({"id": secrets.token_hex(4)}))
    return str(json.loads(path.read_bytes())["id"])
