"""What a study is: arms that are trained or opened, each audited or graded, and claims about what that measures.

A study declares; it holds no training loop, no statistics and no drawing. `looplab.studies.run` does the work.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from looplab._registry import Registry
from looplab.audit.config import AuditConfig
from looplab.audit.problems import Problems
from looplab.audit.result import AuditResult
from looplab.records import Claim, StudyPlot, StudyRow
from looplab.studies.grid import GridResult, TaskGrid
from looplab.training.config import RunConfig

SMOKE, CPU = "smoke", "cpu"
SCALES = (SMOKE, CPU)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One model of a study, with one training seed if it is trained here."""

    name: str
    title: str
    """What differs from the other arms, in one sentence."""
    source: str | RunConfig
    """Name of a built-in checkpoint, or the run that makes the model."""
    audit: AuditConfig | None = None
    problems: Problems | None = None
    """What the audit is about; None: the held-out side of the built-in corpus."""
    grid: TaskGrid | None = None
    """Words that it answers; an arm has an audit, a grid, or both."""
    control: str | None = None
    """Built-in dense checkpoint that the audit compares with."""

    @property
    def seed(self) -> int | None:
        """Seed of the training run; None where nothing is trained."""
        return self.source.seed if isinstance(self.source, RunConfig) else None

    @property
    def folder(self) -> str:
        """Name of the arm's folder."""
        return self.name if self.seed is None else f"{self.name}-{self.seed}"


EQUAL = ("init", "data_order", "steps", "tokens", "parameters")
"""Facts that trained arms of a seed share where one thing alone is varied."""


class Study(ABC):
    """One claim set. Everything that its words depend on is a class attribute or comes from `arms`."""

    name: ClassVar[str]
    version: ClassVar[int] = 1
    """Grows with every change of a rule, an arm or a size; another version starts a new folder."""
    question: ClassVar[str]
    references: ClassVar[tuple[str, ...]]
    claims: ClassVar[tuple[Claim, ...]]
    columns: ClassVar[tuple[str, ...]]
    """Quantities of the table of arms."""
    plots: ClassVar[tuple[StudyPlot, ...]]
    notes: ClassVar[tuple[str, ...]]
    """Limits that the page must state."""
    minutes: ClassVar[int]
    """Estimate at scale cpu, on two cores."""
    seeds: ClassVar[dict[str, int]] = {}
    """Scale -> number of training seeds; empty for a study that trains nothing."""
    equal: ClassVar[tuple[str, ...]] = EQUAL
    """Facts that the arms of a seed must share; one miss leaves every claim about several arms without an answer."""

    @abstractmethod
    def arms(self, scale: str, seeds: int) -> tuple[Arm, ...]:
        """All arms in the order they are run: the first seed of every arm before the second of any."""

    def further(self, scale: str, seeds: int) -> tuple[Arm, ...]:
        """What `--full` adds: arms that no claim rests on, or more seeds."""
        return ()

    def measure(self, arm: Arm, result: AuditResult) -> tuple[StudyRow, ...]:
        """What the claims need of one audit."""
        return ()

    def grade(self, arm: Arm, result: GridResult) -> tuple[StudyRow, ...]:
        """What the claims need of one grid."""
        return ()


STUDIES: Registry[type[Study]] = Registry("study", package="looplab.studies")
"""Name -> study."""
