"""Weights & Biases: a run on its server, or a folder to be sent later where WANDB_MODE=offline.

Beyond numbers and configuration it gets nothing: no source code, no git state, no output, no facts on the machine.
"""

import os
from collections.abc import Mapping

from looplab.training.trackers.base import TRACKERS, Tracked, Tracker


@TRACKERS.register("wandb")
class WeightsAndBiases(Tracker):
    """A run of the project of its recipe, in the folder of the run."""

    package = "wandb"
    extra = "wandb"

    def __init__(self, run: Tracked):
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read on import
        import wandb

        self._run = wandb.init(
            project=run.project,
            id=run.id,
            name=run.name,
            config=run.config,
            dir=str(run.folder),
            resume="allow",
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_code=True,
                disable_git=True,
                disable_job_creation=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_disable_machine_info=True,
            ),
        )

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Queues them; numbers of one step are put together."""
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        """Waits until all is written."""
        self._run.finish()
