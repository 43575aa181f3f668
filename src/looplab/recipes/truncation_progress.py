"""Objective x gradient on one recurrence: swaps of five items in words of 8 operations, always 8 iterations.

    window w      gradient through the last w applications                 steps = S 8 / w
    segments w    all applications carry gradient, cut after every w       steps = S
    implicit      the gradient of a fixed point, by at most 8 products     steps = S

so that every cell of the first table runs as many applications with gradient as `full` does in S steps. A window also
runs 8 applications forward per step: the second table gives it as many training FLOPs,

    steps = S F(8) / F(w)            F(w): of a step, 8 applications forward, w backward, and all readouts

Model, task and optimizer are those of `looplab.recipes.par`. Labels stand at every position in all cells: with the
answer alone, no gradient learns anything in this time, and nothing could be told apart.

Deviations from that recipe: half the rows, 8 scored iterations instead of 4, no burn-in but in cells named so.
"""

import dataclasses
from typing import NamedTuple

from looplab.models.base import build
from looplab.models.looped import LoopedConfig
from looplab.objectives.base import Objective
from looplab.objectives.every_iteration import EveryIteration
from looplab.objectives.expected_exit import ExpectedExit
from looplab.objectives.next_token import NextToken
from looplab.objectives.progress_aligned import ProgressAligned
from looplab.objectives.terminal_fixed_point import TerminalFixedPoint
from looplab.recipes import par as base
from looplab.recurrence.depth import FixedDepth, UniformDepth
from looplab.recurrence.depth.base import DepthSampler
from looplab.recurrence.expected_cost import step_flops
from looplab.recurrence.gradient.base import GradientStrategy
from looplab.recurrence.gradient.full import FullBPTT
from looplab.recurrence.gradient.implicit import Implicit
from looplab.recurrence.gradient.segmented import SegmentedDetach
from looplab.recurrence.gradient.truncated import TruncatedBPTT
from looplab.recurrence.halting import HazardGate, NoHalt
from looplab.recurrence.ledger import Ledger
from looplab.tasks.rows import TaskRows
from looplab.training.config import RunConfig, TaskEvaluation

LENGTH = base.LENGTH
ROWS, STEPS, WARMUP = 64, 900, 50
"""Steps of full back-propagation."""
BURN_IN = 4

NOISE, REPLAY = base.PROGRESS.state_noise, base.PROGRESS.replay
PROGRESS = ProgressAligned(iterations=LENGTH, state_noise=NOISE)
OBJECTIVES: dict[str, tuple[str, Objective]] = {
    "final": ("the value of every prefix, after the last iteration", NextToken()),
    "every": ("the value of every prefix, after every iteration", EveryIteration()),
    "exit": ("the value of every prefix, after every iteration, weighed by a trained gate", ExpectedExit()),
    "progress": ("after k iterations the value of the last k operations", PROGRESS),
    "replay": ("progress, beginning at late states of the step before", dataclasses.replace(PROGRESS, replay=REPLAY)),
    "settled": ("the value of every prefix, after the last iteration, which should change nothing",
                TerminalFixedPoint()),
}  # fmt: skip
"""Objective -> what is scored."""
GRADIENTS: dict[str, tuple[str, GradientStrategy]] = {
    "full": ("gradient through all 8 applications", FullBPTT()),
    "window4": ("gradient through the last 4 applications", TruncatedBPTT(window=4)),
    "window2": ("gradient through the last 2 applications", TruncatedBPTT(window=2)),
    "window1": ("gradient through the last application", TruncatedBPTT(window=1)),
    "segments3": ("gradient through all applications, cut after every 3", SegmentedDetach(every=3)),
    "segments1": ("gradient through all applications, cut after every one", SegmentedDetach(every=1)),
    "implicit": ("the gradient of a fixed point",
                 Implicit(solver="iteration", max_iter=LENGTH - 1, otherwise="last_step")),
}  # fmt: skip
"""Gradient -> how far it reaches."""
FORWARDS: dict[str, DepthSampler] = {
    "": FixedDepth(num_steps=LENGTH),
    "burnin": UniformDepth(low=LENGTH, high=LENGTH + BURN_IN),
}
"""Forward passes: always 8, or up to 4 more before the 8 that are scored."""


class Cell(NamedTuple):
    """One entry of the grid."""

    objective: str
    gradient: str
    forward: str = ""
    flops: bool = False
    """Of the second table."""

    @property
    def name(self) -> str:
        """Of the arm."""
        return "-".join(filter(None, (self.objective, self.gradient, self.forward, "flops" if self.flops else "")))

    @property
    def title(self) -> str:
        """What is scored, how far the gradient reaches, and the number of steps."""
        matched = "training FLOPs" if self.flops else "applications with gradient"
        burnt = f"; up to {BURN_IN} iterations before the scored ones" if self.forward else ""
        return f"{OBJECTIVES[self.objective][0]}; {GRADIENTS[self.gradient][0]}; {matched} as in full{burnt}"


def steps(cell: Cell) -> int:
    """Optimizer steps of a cell."""
    strategy = GRADIENTS[cell.gradient][1]
    if cell.flops:
        return round(STEPS * _step_flops(cell, FullBPTT()) / _step_flops(cell, strategy))
    carried = LENGTH if isinstance(strategy, Implicit) else strategy.gradient_count(LENGTH)
    return STEPS * LENGTH // carried


def _step_flops(cell: Cell, gradient: GradientStrategy) -> int:
    """Training FLOPs of a step of 8 applications; objectives that score all of them read as often."""
    spec = build(_model(cell), device="meta").spec
    found = step_flops(spec, spec.plan(LENGTH), gradient, rows=ROWS, tokens=LENGTH + 1)
    further = Ledger()
    if OBJECTIVES[cell.objective][1].needs.states == "every":
        for _ in range(LENGTH - 1):
            further.count_coda(spec, rows=ROWS, tokens=LENGTH + 1, gradient=True)
            further.count_head(spec, tokens=ROWS * (LENGTH + 1), gradient=True)
    return found + further.flops_forward + further.flops_backward


def truncation_progress(cell: Cell, seed: int = 0) -> RunConfig:
    """The run of a cell.

    Raises:
        ValueError: The objective cannot be trained under this gradient.
    """
    name, objective = f"truncation-progress-{cell.name}", OBJECTIVES[cell.objective][1]
    run = dataclasses.replace(base.par(name), objective=objective, model=_model(cell))
    assert isinstance(run.data, TaskRows)
    number = steps(cell)
    return dataclasses.replace(
        run,
        data=dataclasses.replace(run.data, rows=ROWS),
        gradient=GRADIENTS[cell.gradient][1],
        steps=number,
        save_every=number,
        log_every=300,
        seed=seed,
        evaluation=TaskEvaluation(every=number, items=64, difficulties=(LENGTH,), depths=(1.0,)),
    )


def _model(cell: Cell) -> LoopedConfig:
    gate = HazardGate() if cell.objective == "exit" else NoHalt()
    return dataclasses.replace(base.par("").model, trained_depth=FORWARDS[cell.forward], halt=gate)


def refusal(cell: Cell) -> str | None:
    """Why a cell does not exist, in the words of the run's configuration; None: it does."""
    try:
        truncation_progress(cell)
    except ValueError as error:
        return str(error)
    return None
