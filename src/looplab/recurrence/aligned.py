"""A depth of its own for every row, run so that all rows end together.

    M = max T_r;   launch s = 0 .. M - 1 runs the rows with T_r >= M - s, at iteration s - (M - T_r)

So the last `window` launches carry gradient, and every row has exactly min(window, T_r) iterations with it, as if it
had run alone. Rows lie by depth, deepest first: those of a launch are a prefix, whose size is rounded up to a multiple
of `row_bucket` to have few shapes. With a bucket of all rows every launch runs all of them, and what rows do before
their first iteration is thrown away. The execution is ours.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from looplab._types import Int
from looplab.recurrence import state as states
from looplab.recurrence.gathering import Gathering
from looplab.recurrence.gradient.base import GradientStrategy, Move
from looplab.recurrence.gradient.full import FullBPTT
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.plan import Application
from looplab.recurrence.trace import Recorder


def run_aligned(
    model: Any,
    depths: Int[Tensor, " batch"],
    context: Any,
    state: Any,
    *,
    gradient: GradientStrategy | None = None,
    row_bucket: int = 1,
    recorder: Recorder | None = None,
    ledger: Ledger | None = None,
) -> Any:
    """The state of every row after its own number of iterations, in the order of the rows.

    Args:
        depths: Iterations of every row, at least 1.
        row_bucket: Rows of a launch are rounded up to a multiple of this.
        recorder: Keeps the states of the rows that have begun, deepest row first.
        ledger: Counts the rows that were launched, those of the rounding too.
    Raises:
        ValueError: A model of several blocks, whose rows would be in different blocks at the same time; a strategy that
            does more than to cut the graph.
    """
    strategy = gradient or FullBPTT()
    check_aligned(model.spec, strategy)
    depths = depths.to(context.embeds.device)
    order = torch.argsort(depths, descending=True, stable=True)
    sorted_depths, context = depths[order], states.select(context, order)
    start = states.select(state, order)
    rows, tokens = context.embeds.shape[:2]
    plan = model.spec.plan(int(depths.max()))
    model.spec.check(plan)
    begins = len(plan) - sorted_depths
    # Rows that have begun by each launch, as Python numbers: they are shapes.
    begun = [0, *(int((begins <= launch).sum()) for launch in range(len(plan)))]

    done = 0

    def stretch(model: Any, state: Any, given: Any, moves: Sequence[Move]) -> Any:
        """Follows these moves; `given` is the context, and the start of every row."""
        context, start = given

        def run(state: Any, context: Any, start: Any, unit: Sequence[Application], first: int) -> list[Any]:
            """States of the rows that have begun, after each launch of a unit."""
            results = []
            for launch in range(first, first + len(unit)):
                before, active = begun[launch], begun[launch + 1]
                size = min(rows, -(-active // row_bucket) * row_bucket)
                fresh = states.select(start, slice(before, size))
                whole = fresh if before == 0 else states.stack([state, fresh])
                index = (launch - begins[:size]).clamp(min=0)
                new = model.step(whole, states.select(context, slice(0, size)), 0, index)
                state = states.select(new, slice(0, active))
                results.append(state)
            return results

        wrapped = strategy.wrap(run)

        def step(state: Any, unit: Sequence[Application]) -> Any:
            nonlocal done
            for state in wrapped(state, context, start, unit, done):  # noqa: B020
                done += 1
                if recorder is not None:
                    recorder.applied(state, None)
                if ledger is not None:
                    active = begun[done]
                    ledger.count_step(
                        model.spec,
                        0,
                        rows=min(rows, -(-active // row_bucket) * row_bucket),
                        tokens=tokens,
                        gradient=torch.is_grad_enabled(),
                        recomputed=strategy.recomputes,
                    )
            return state

        return strategy.follow(moves, step, state)

    if recorder is not None:
        recorder.start(start)
    nothing, moves = states.select(start, slice(0, 0)), strategy.moves(plan)
    if isinstance(model, Gathering):
        last = model.along(stretch, nothing, (context, start), moves)
    else:
        last = stretch(model, nothing, (context, start), moves)
    return states.select(last, torch.argsort(order))


def check_aligned(spec: Any, gradient: GradientStrategy) -> None:
    """Refuses what rows at different iterations of one launch cannot have."""
    if type(gradient).walk is not GradientStrategy.walk:
        raise ValueError(
            f"depth_per='sequence' needs a gradient strategy that cuts the graph only. Got {type(gradient).__name__}. "
            "Use TruncatedBPTT."
        )
    if len(spec.blocks) != 1 or len(spec.plan(2)) != 2:
        raise ValueError(
            f"depth_per='sequence' needs a model that repeats one block. {spec.name!r} has the plan {spec.plan()}. "
            "Use depth_per='batch'."
        )
