"""Held-out loss along a run, as points (budget, loss) with straight lines between them."""

from collections.abc import Sequence

from looplab.studies.trained import TrainedRun

Curve = Sequence[tuple[float, float]]


def by_steps(run: TrainedRun) -> list[tuple[float, float]]:
    """Steps and loss at the end of the plan, at every evaluation."""
    return [(float(line["step"]), run.held_out(line["step"])[_deepest(run)]) for line in run.evaluations]


def by_flops(run: TrainedRun) -> list[tuple[float, float]]:
    """Training FLOPs spent and loss, at every evaluation."""
    spent, total = {}, 0
    for line in run.steps:
        total += line["ledger"]["flops_forward"] + line["ledger"]["flops_backward"]
        spent[line["step"]] = total
    return [(float(spent[int(step)]), loss) for step, loss in by_steps(run)]


def at(curve: Curve, budget: float) -> float | None:
    """Loss at a budget; None outside the curve."""
    for (x, loss), (further, later) in zip(curve, curve[1:], strict=False):
        if x <= budget <= further:
            return loss + (later - loss) * (budget - x) / (further - x)
    return None


def reached(curve: Curve, loss: float) -> float | None:
    """The first budget at which a loss is reached; None where it never is, or was before the first point."""
    for (x, before), (further, after) in zip(curve, curve[1:], strict=False):
        if before > loss >= after:
            return x + (further - x) * (before - loss) / (before - after)
    return None


def _deepest(run: TrainedRun) -> int:
    """Applications of the full plan, at which a run is said to have its loss."""
    return len(run.config.model.order.plan(run.config.model.order.default_steps, len(run.config.model.blocks)))
