"""A finished or diverged training run as a study reads it: its record, its metrics line by line, its model."""

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import looplab
from looplab.records import RunRecord
from looplab.training.config import RunConfig
from looplab.training.folder import METRICS, MODEL
from looplab.training.spikes import Spikes


@dataclass(frozen=True)
class TrainedRun:
    """One training run."""

    config: RunConfig
    folder: Path
    record: RunRecord | None
    """None where the run diverged."""
    diverged: str = ""
    """Where the loss or gradient stopped being finite; empty for a run that came to its end."""

    @cached_property
    def steps(self) -> tuple[dict[str, Any], ...]:
        """The line of every step: step, loss, parts, lr, grad_norm, rms_first, rms_last, skipped, T, g, ledger, ..."""
        return tuple(line for line in self._lines if line["kind"] == "train")

    @cached_property
    def evaluations(self) -> tuple[dict[str, Any], ...]:
        """The line of every evaluation: step, and losses by applications or cells of a task."""
        return tuple(line for line in self._lines if line["kind"] == "eval")

    def loss(self, step: int, *, over: int = 1) -> float:
        """Mean training loss of the `over` steps up to this one."""
        return math.fsum(line["loss"] for line in self.steps[step - over : step]) / over

    def held_out(self, step: int | None = None) -> dict[int, float]:
        """Applications -> held-out loss in nats per token, at the end or at an evaluated step; of text runs."""
        lines = [line for line in self.evaluations if step in (None, line["step"])]
        return {int(depth): float(loss) for depth, loss in lines[-1]["losses"].items()}

    def spikes(self) -> tuple[int, ...]:
        """Steps at which the loss or the gradient jumped (`looplab.training.spikes`), and those that were skipped."""
        known = Spikes()
        return tuple(
            line["step"] for line in self.steps if line["skipped"] or known.add(line["loss"], line["grad_norm"])
        )

    def model(self) -> Any:
        """The trained model."""
        return looplab.load(self.folder / MODEL).model

    @cached_property
    def _lines(self) -> tuple[dict[str, Any], ...]:
        lines = (self.folder / METRICS).read_text().splitlines()
        return tuple(json.loads(line, object_hook=_finite) for line in lines)


def _finite(line: dict[str, Any]) -> dict[str, Any]:
    """Numbers that are not finite are words in JSON."""
    return {key: float(value) if value in ("nan", "inf", "-inf") else value for key, value in line.items()}
