"""What a training step costs on average over the law of its depth.

    E[FLOPs] = sum over T of pmf[T] F(T)
    F(T) = 3 F_once + F_app (T + 2 g + c g)      F_once: prelude, coda, head;  g: applications with gradient;
                                                 c = 1 if they are recomputed, else 0

F is what the ledger counts for one step, so sums over the drawn depths agree with it exactly.
"""

from looplab.recurrence.gradient.base import GradientStrategy
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.plan import Plan
from looplab.recurrence.spec import LoopSpec


def step_flops(spec: LoopSpec, plan: Plan, gradient: GradientStrategy, *, rows: int, tokens: int) -> int:
    """FLOPs of one training step along `plan`: forward, backward and recomputation, with one readout at the end.

    Args:
        tokens: Per row; all are scored.
    """
    ledger = Ledger()
    ledger.count_encode(spec, rows=rows, tokens=tokens, gradient=True)
    for segment in gradient.segments(len(plan)):
        for block, _ in plan[segment.start : segment.stop]:
            ledger.count_step(
                spec, block, rows=rows, tokens=tokens, gradient=segment.gradient, recomputed=gradient.recomputes
            )
    ledger.count_coda(spec, rows=rows, tokens=tokens, gradient=True)
    ledger.count_head(spec, tokens=rows * tokens, gradient=True)
    return ledger.flops_forward + ledger.flops_backward + ledger.flops_recompute


def expected_flops(
    spec: LoopSpec, gradient: GradientStrategy, *, rows: int, tokens: int, step: int | None = None
) -> float:
    """Mean FLOPs of optimizer step `step` (None: after all ramps) under the model's trained depth."""
    law = spec.trained_depth
    mass = law.pmf(step)  # type: ignore[attr-defined]
    strategy = gradient if step is None else gradient.at(step)
    total = 0.0
    for depth in law.support(step):  # type: ignore[attr-defined]
        plan = spec.plan()[:depth] if law.of_prefix else spec.plan(depth)  # type: ignore[attr-defined]
        total += mass[depth] * step_flops(spec, plan, strategy, rows=rows, tokens=tokens)
    return total
