"""The self-check of the audit: every positive control, run and told."""

from collections.abc import Callable
from dataclasses import dataclass

from looplab.audit.positive_controls.base import Control, ControlOutcome
from looplab.audit.positive_controls.composition_only import CompositionOnly
from looplab.audit.positive_controls.count_only import CountOnly
from looplab.audit.positive_controls.identity import Identity
from looplab.audit.positive_controls.planted_affine import PlantedAffine
from looplab.audit.positive_controls.planted_temperature import PlantedTemperature
from looplab.audit.positive_controls.progress import ProgressTracker
from looplab.audit.positive_controls.tracker import ConstructedTracker
from looplab.audit.positive_controls.trivial_repeat import TrivialRepeat, Writer


@dataclass(frozen=True)
class SelfCheck:
    """All outcomes, in order; `print(check)` is the table."""

    outcomes: tuple[ControlOutcome, ...]

    @property
    def passed(self) -> bool:
        """Every control found what was planted, and nothing where nothing was."""
        return all(outcome.passed for outcome in self.outcomes)

    def __str__(self) -> str:
        failed = [outcome.name for outcome in self.outcomes if not outcome.passed]
        last = f"Failed: {', '.join(failed)}. Trust no audit made here." if failed else "All controls passed."
        return "\n".join([*map(str, self.outcomes), last])


def controls(write_report: Writer | None = None) -> tuple[Control, ...]:
    """P1 to P7, P3b after P3."""
    return (
        PlantedTemperature(),
        PlantedAffine(),
        ConstructedTracker(),
        ProgressTracker(),
        Identity(),
        TrivialRepeat(write_report),
        CountOnly(),
        CompositionOnly(),
    )


def run_self_check(
    *,
    write_report: Writer | None = None,
    watcher: Callable[[ControlOutcome], object] = lambda outcome: None,
    seed: int = 0,
) -> SelfCheck:
    """Runs the positive controls through the real audit.

    Args:
        write_report: Writes pages and tables of a result into a folder (`looplab.report.write_report`); P5 searches
            them for numbers that must not be there. Without it P5 searches results.json alone.
        watcher: Receives every outcome as soon as it is there.
        seed: Decides models, documents, splits and draws.
    """
    outcomes = []
    for control in controls(write_report):
        outcomes.append(control.run(seed))
        watcher(outcomes[-1])
    return SelfCheck(tuple(outcomes))
