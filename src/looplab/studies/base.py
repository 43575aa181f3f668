"""What a study is: arms that are trained or opened, each audited or graded, and claims about what that measures.

A study declares; it holds no training loop, no statistics and no drawing. `looplab.studies.run` does the work.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from looplab._registry import Registry
from looplab.audit.config import AuditConfig
from looplab.audit.problems import Problems
from looplab.audit.result import AuditResult
from looplab.records import Claim, StudyPlot, StudyRow
from looplab.studies.claims import SMOKE
from looplab.studies.grid import GridResult, TaskGrid
from looplab.studies.trained import TrainedRun
from looplab.training.config import RunConfig

CPU = "cpu"
SCALES = (SMOKE, CPU)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One model of a study, with one training seed if it is trained here."""

    name: str
    title: str
    """What differs from the other arms, in one sentence."""
    source: str | RunConfig
    """Name of a built-in checkpoint or folder of a model, or the run that makes the model."""
    audit: AuditConfig | None = None
    problems: Problems | None = None
    """What the audit is about; None: the held-out side of the built-in corpus."""
    grid: TaskGrid | None = None
    """Words that it answers; an arm has an audit, a grid, both, or is measured by its run alone."""
    documents: tuple[str, str] | None = None
    """Name and file of a text of the user's that the audit reads instead."""
    theirs: bool = False
    """A model of the user's: one that cannot be opened or audited is a reason in its rows, and the others go on."""
    control: str | None = None
    """Built-in dense checkpoint that the audit compares with."""
    earlier: tuple[tuple[int, AuditConfig], ...] = ()
    """(step, audit) of checkpoints of the run before its end, which the run must keep (`RunConfig.keep_every`)."""

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
FACTS = {
    "init": "init",
    "data_order": "data_order",
    "steps": "steps",
    "tokens": "tokens",
    "parameters": "parameters",
    "applications": "mean applications",
    "gradient_applications": "gradient applications",
    "train_flops": "training FLOPs",
}
"""What may be held equal -> the fact of a run that says it."""
TOLERANCES = {"parameters": 0.01, "train_flops": 0.02}
"""How far numbers that count as equal may be apart; all others are equal to the letter."""


class Study(ABC):
    """One claim set. Everything that its words depend on is a class attribute or comes from `arms`."""

    name: ClassVar[str]
    version: ClassVar[int] = 1
    """Grows with every change of a rule, an arm or a size; another version starts a new folder."""
    question: ClassVar[str]
    references: ClassVar[tuple[str, ...]]
    claims: tuple[Claim, ...]
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
    """What the arms of a seed must share (keys of `FACTS`), unless a claim says it itself; one miss leaves every claim
    that compares such arms without an answer."""

    varies: ClassVar[tuple[str, ...] | None] = None
    """Fields of `RunConfig` in which arms of a seed may differ; None: not checked."""
    scales: ClassVar[tuple[str, ...]] = SCALES
    takes: ClassVar[tuple[str, ...]] = ()
    """Which of --model and --data the study can use; `with_given` is called with them."""
    given: Mapping[str, Mapping[str, str]] = MappingProxyType({})
    """--model, --data -> name -> path, as far as they were given."""

    def with_given(self, models: Mapping[str, str], data: Mapping[str, str]) -> "Study":
        """The study with models and texts of the user's.

        Raises:
            ValueError: It takes neither.
        """
        raise ValueError(f"{self.name} takes neither models nor data.")

    @abstractmethod
    def arms(self, scale: str, seeds: int) -> tuple[Arm, ...]:
        """All arms in the order they are run: the first seed of every arm before the second of any."""

    def further(self, scale: str, seeds: int) -> tuple[Arm, ...]:
        """What `--full` adds: arms that no claim rests on, or more seeds."""
        return ()

    def measure(self, arm: Arm, result: AuditResult) -> tuple[StudyRow, ...]:
        """What the claims need of one audit."""
        return ()

    def measure_earlier(self, arm: Arm, step: int, result: AuditResult) -> tuple[StudyRow, ...]:
        """What figures need of the audit of a checkpoint before the end."""
        return ()

    def trained(self, arm: Arm, run: TrainedRun) -> tuple[StudyRow, ...]:
        """What the claims need of a training run itself; of one that diverged too."""
        return ()

    def grade(self, arm: Arm, result: GridResult) -> tuple[StudyRow, ...]:
        """What the claims need of one grid."""
        return ()

    def combined(self, rows: Sequence[StudyRow]) -> tuple[StudyRow, ...]:
        """What claims need of several arms at once, such as the best of some: a function of their rows alone."""
        return ()


STUDIES: Registry[type[Study]] = Registry("study", package="looplab.studies")
"""Name -> study."""
