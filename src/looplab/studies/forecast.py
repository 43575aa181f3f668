"""What is missing of a study and what it will cost: a few real steps of each recipe, times what is left.

Applications and FLOPs are means over the steps of the probe times the steps of the run; seconds are those of this
machine while it did nothing else. Audits and grids have no probe: an arm of which another seed is finished costs what
that one did, and an arm that trains nothing its share of the study's own estimate.
"""

import contextlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from looplab._config import config_hash
from looplab.studies.arms import LEDGER
from looplab.studies.base import Arm, Study
from looplab.studies.choice import predicted_seconds
from looplab.studies.run import RUNS, finished_arm
from looplab.training.config import RunConfig
from looplab.training.display import Display
from looplab.training.folder import RECORD
from looplab.training.memory import memory_line
from looplab.training.trainer import train

PROBE = 2.0
"""Seconds of a probe."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one training run."""

    applications: float
    """Rows x applications."""
    flops: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Missing:
    """An arm with all its seeds that are not finished."""

    name: str
    jobs: int
    trained: int
    """Of these, how many runs are there already."""
    applications: float
    flops: float
    memory: str
    """Of one step at its deepest draw; empty for what is not trained."""
    seconds: float


def probe(config: RunConfig, seconds: float = PROBE) -> Cost:
    """What a run will cost, from two steps of it or as many as fit into the time."""
    steps = _Steps(seconds)
    with tempfile.TemporaryDirectory(prefix="looplab-probe-") as folder, contextlib.suppress(_Enough):
        train(config, Path(folder) / "run", display=steps)
    lines = steps.lines
    timed = lines[1:] or lines
    ledgers = [line["ledger"] for line in lines]
    scale = config.steps / len(lines)
    return Cost(
        applications=scale * sum(ledger["row_applications"] for ledger in ledgers),
        flops=scale * sum(ledger["flops_forward"] + ledger["flops_backward"] for ledger in ledgers),
        seconds=config.steps * sum(line["seconds"] for line in timed) / len(timed),
    )


def forecaster(study: Study, arms: Sequence[Arm], seconds: float = PROBE) -> Callable[[Arm], float]:
    """Predicts the seconds of an arm; a recipe is probed once."""
    known: dict[str, float] = {}

    def predict(arm: Arm) -> float:
        if arm.name not in known:
            trained = isinstance(arm.source, RunConfig)
            share = 60 * study.minutes / max(1, len(arms))
            known[arm.name] = probe(arm.source, seconds).seconds if trained else share  # type: ignore[arg-type]
        return known[arm.name]

    return predict


def missing(
    study: Study, arms: Sequence[Arm], folder: Path, out: Path, predictions: str, seconds: float = PROBE
) -> tuple[Missing, ...]:
    """What is not finished, arm by arm.

    Args:
        folder: Of the study at its scale.
        out: Of all studies, where runs lie.
        predictions: SHA-256 of the predictions; rows of others do not count.
    """
    left = [arm for arm in arms if finished_arm(folder, arm, predictions) is None]
    by_name: dict[str, list[Arm]] = {}
    for arm in left:
        by_name.setdefault(arm.name, []).append(arm)
    return tuple(_missing(study, arms, own, folder, out, seconds / len(by_name)) for own in by_name.values())


def _missing(study: Study, arms: Sequence[Arm], own: Sequence[Arm], folder: Path, out: Path, seconds: float) -> Missing:
    arm = own[0]
    if not isinstance(arm.source, RunConfig):
        share = 60 * study.minutes / len(arms)
        return Missing(name=arm.name, jobs=len(own), trained=0, applications=0.0, flops=0.0, memory="", seconds=share)
    trained = sum((out / RUNS / config_hash(each.source) / RECORD).exists() for each in own)
    left = len(own) - trained
    cost = probe(arm.source, seconds)
    whole = predicted_seconds(folder / LEDGER, arm, lambda _: cost.seconds)
    return Missing(
        name=arm.name,
        jobs=len(own),
        trained=trained,
        applications=left * cost.applications,
        flops=left * cost.flops,
        memory=memory_line(arm.source, arm.source.build_model()).partition(":")[0].removeprefix("memory "),
        seconds=left * whole + trained * max(0.0, whole - cost.seconds),
    )


class _Enough(Exception):
    """The probe has what it needs."""


class _Steps(Display):
    """Keeps the lines of the steps and ends the run when the time is over."""

    def __init__(self, seconds: float):
        self.limit, self.lines = seconds, list[Mapping[str, Any]]()

    def step(self, record: Mapping[str, Any], *, steps: int, tokens_per_second: float, seconds_left: float) -> None:
        self.lines.append(record)
        if len(self.lines) > 1 and sum(line["seconds"] for line in self.lines) >= self.limit:
            raise _Enough
