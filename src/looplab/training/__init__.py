"""Training: one configuration, one step, one folder that survives being killed."""

from looplab.training.config import Evaluation, RunConfig
from looplab.training.divergence import DivergedError
from looplab.training.folder import FolderError
from looplab.training.muon import Muon
from looplab.training.optimizer import AdamW, Optimizer
from looplab.training.schedule import WSD, Constant, Cosine, Linear, Schedule
from looplab.training.trainer import Trainer, train

__all__ = [
    "WSD",
    "AdamW",
    "Constant",
    "Cosine",
    "DivergedError",
    "Evaluation",
    "FolderError",
    "Linear",
    "Muon",
    "Optimizer",
    "RunConfig",
    "Schedule",
    "Trainer",
    "train",
]
