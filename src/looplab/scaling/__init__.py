"""Scaling laws of looped models: tables of runs, costs, laws, fits with intervals, comparisons, compute matching.

Nothing here draws, parses or trains, and nothing imports PyTorch.

    runs = read_runs("runs/*.jsonl")
    result = fit(runs, ForwardBackward(gain=Decay()))
"""

from looplab.scaling.compare import compare
from looplab.scaling.cost import Device, serving_cost, training_flops
from looplab.scaling.family import read_family
from looplab.scaling.fit import Fit, FitRefused, fit
from looplab.scaling.matching import match
from looplab.scaling.runs import Runs, RunsError, read_runs

__all__ = [
    "Device",
    "Fit",
    "FitRefused",
    "Runs",
    "RunsError",
    "compare",
    "fit",
    "match",
    "read_family",
    "read_runs",
    "serving_cost",
    "training_flops",
]
