"""Exit rules: when a token stops. One file per rule, and the forward pass that follows them."""

from looplab.recurrence.exit.acceleration import AccelerationExit
from looplab.recurrence.exit.base import EXIT_RULES, ExitRule, Seen, exit_points, exit_rule
from looplab.recurrence.exit.full import FixedExit, FullExit
from looplab.recurrence.exit.hazard import HazardExit
from looplab.recurrence.exit.latent import LatentExit
from looplab.recurrence.exit.readout import ArgmaxExit, EntropyExit, KLExit
from looplab.recurrence.exit.replay import ReplayExit
from looplab.recurrence.exit.trained import TrainedExit
from looplab.recurrence.exit.until import ExitOutput, forward_until

__all__ = [
    "EXIT_RULES",
    "AccelerationExit",
    "ArgmaxExit",
    "EntropyExit",
    "ExitOutput",
    "ExitRule",
    "FixedExit",
    "FullExit",
    "HazardExit",
    "KLExit",
    "LatentExit",
    "ReplayExit",
    "Seen",
    "TrainedExit",
    "exit_points",
    "exit_rule",
    "forward_until",
]
