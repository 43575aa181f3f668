"""Which part of a study one call runs: some arms, what some claims need, or as many arms as some minutes hold."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from looplab.studies.base import Arm, Study
from looplab.studies.claims import NOT_MEASURED


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which part of a study one call runs; what is finished already counts in any case."""

    arms: tuple[str, ...] | None = None
    """Names; None: all."""
    claims: tuple[str, ...] | None = None
    """Ids of claims whose arms are run; None: all."""
    minutes: float | None = None
    """No arm is begun that is predicted to end later; None: no limit."""

    def reason(self, study: Study, arm: Arm) -> str:
        """Why an arm is left out; empty where it is run."""
        if self.arms is not None and arm.name not in self.arms:
            return f"{NOT_MEASURED} (--arms)"
        if self.claims is not None:
            asked = [claim for claim in study.claims if claim.id in self.claims]
            named = {name for claim in asked for part in claim.parts for name in part.arms}
            named |= {name for claim in asked for need in claim.needs for name in need.arms}
            if arm.name not in named:
                return f"{NOT_MEASURED} (--claims)"
        return ""


ALL = Choice()


class Tasks:
    """The arms to run, handed out as workers become free, until the minutes are over."""

    def __init__(
        self,
        arms: Sequence[Arm],
        missing: Sequence[int],
        choice: Choice,
        ledger: Path,
        seconds: Callable[[Arm], float] | None,
    ):
        self.arms, self.missing, self.ledger, self.seconds = arms, missing, ledger, seconds
        self.limit = None if choice.minutes is None else 60 * choice.minutes
        self.began = time.perf_counter()
        self.order: list[int] = []
        self.postponed: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, Arm]]:
        for index in self.missing:
            arm = self.arms[index]
            if self.limit is not None:
                spent = time.perf_counter() - self.began
                if spent + predicted_seconds(self.ledger, arm, self.seconds) > self.limit:
                    self.postponed.append(index)
                    continue
            self.order.append(index)
            yield index, arm


def predicted_seconds(ledger: Path, arm: Arm, otherwise: Callable[[Arm], float] | None) -> float:
    """How long an arm will take: as its other seeds did, or what `otherwise` says."""
    known = json.loads(ledger.read_text())["arms"] if ledger.exists() else {}
    whole = [
        facts["train_seconds"] + facts.get("measure_seconds", 0.0)
        for name, facts in known.items()
        if "train_seconds" in facts and name.rpartition("-")[0] == arm.name
    ]
    if whole:
        return sum(whole) / len(whole)
    return 0.0 if otherwise is None else otherwise(arm)
