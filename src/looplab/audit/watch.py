"""What an audit tells while it runs. The audit prints nothing; a watcher may."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from looplab.audit.result import ModelCard, ScheduleEntry, SelfTest


class Watcher(ABC):
    """Receives what happens, in order."""

    @abstractmethod
    def planned(self, card: ModelCard, rows: Sequence[ScheduleEntry], minimal: int, naive: int) -> None:
        """Before anything runs: the schedule map, and applications per document of the shared walk and one by one."""

    @abstractmethod
    def tested(self, test: SelfTest) -> None:
        """A self-test passed."""

    @abstractmethod
    def advanced(self, phase: str, domain: str, done: int, total: int, schedule: str) -> None:
        """`done` of `total` applications (fits in phase "fit") of a phase are made; `schedule` was the last."""


class Silent(Watcher):
    """Says nothing."""

    def planned(self, card: ModelCard, rows: Sequence[ScheduleEntry], minimal: int, naive: int) -> None:
        pass

    def tested(self, test: SelfTest) -> None:
        pass

    def advanced(self, phase: str, domain: str, done: int, total: int, schedule: str) -> None:
        pass


PHASES = ("self-test", "calibrate", "fit", "evaluate", "statistics", "report")
"""The order of work."""
