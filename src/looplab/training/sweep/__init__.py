"""Sweeps: many configurations of one recipe, each run once, and one table of what came out."""

from looplab.training.sweep.points import Axis, SweepError, configurations, grid_points, random_points, read_points
from looplab.training.sweep.run import SweptRun, Watcher, run_all, sweep_pool
from looplab.training.sweep.table import SweepTable, sweep_table

__all__ = [
    "Axis",
    "SweepError",
    "SweepTable",
    "SweptRun",
    "Watcher",
    "configurations",
    "grid_points",
    "random_points",
    "read_points",
    "run_all",
    "sweep_pool",
    "sweep_table",
]
