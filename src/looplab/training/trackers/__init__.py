"""Programs that are told the numbers of a run while it goes, one file each. None is told anything unless asked for."""

from looplab.training.trackers.base import TRACKERS, Tracker, TrackerError, Trackers, check_trackers

__all__ = ["TRACKERS", "Tracker", "TrackerError", "Trackers", "check_trackers"]
