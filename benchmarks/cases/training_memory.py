"""Memory of training steps against what is said beforehand. Bytes are asserted; only `readout_chunk` is timed.

The peak is what torch's allocator gave out at once, with weights and optimizer state, as the profiler tells it.
"""

import dataclasses
import time
from typing import Any

from benchmarks.cases.models_memory import _peak as peak_of
from benchmarks.cases.models_memory import held, shape
from benchmarks.cases.training_speed import Side
from looplab.models.base import build
from looplab.models.looped import Envelope, LoopedConfig
from looplab.recurrence.expected_cost import step_flops
from looplab.recurrence.gradient import (
    CheckpointApplication,
    CheckpointUnit,
    FullBPTT,
    GradientStrategy,
    TruncatedBPTT,
)
from looplab.recurrence.injection import Add
from looplab.recurrence.plan import LayerLoop, ModelLoop
from looplab.training.memory import estimate, size

ROWS, SEQ = 4, 128
SAVED, PEAK = 0.02, 0.05
"""Relative errors that the specification allows."""
GRID = [(steps, window) for steps in (4, 8, 16) for window in sorted({1, 2, 4, steps})]


def looped() -> LoopedConfig:
    """One layer before, one in and one after the loop."""
    return shape(ModelLoop(num_steps=4), 1, injection=Add(), envelope=Envelope(prelude=1, coda=1))


def peak(side: Side, depth: int) -> int:
    """Bytes of one optimizer step at their most."""
    side.run(depth)  # makes the optimizer's state
    state = [v for entry in side.optimizer.state.values() for v in entry.values()]
    return sum(t.nbytes for t in (*side.model.parameters(), *state)) + peak_of(lambda: side.run(depth))


def _row(config: LoopedConfig, gradient: GradientStrategy, depth: int, name: str) -> dict[str, Any]:
    expected = estimate(config, rows=ROWS, tokens=SEQ, num_steps=depth, gradient=gradient)
    found = peak(Side(config, gradient, rows=ROWS, seq=SEQ), depth)
    ratio = found / expected.peak
    assert abs(ratio - 1) <= PEAK, f"{name}: {found} bytes, {expected.peak} said"
    return {"case": name, "peak": found, "said": expected.peak, "ratio": ratio, "activations": expected.saved}


def memory_window(options: Any) -> list[dict[str, Any]]:
    """Peak of a step at every window, within 5 % of what is said, whatever the iterations without gradient."""
    return [_row(looped(), TruncatedBPTT(window=w), steps, f"T {steps}, window {w}") for steps, w in GRID]


def memory_checkpoint(options: Any) -> list[dict[str, Any]]:
    """The same with recomputation of every application, and of all that follow each other."""
    return [
        _row(looped(), kind(inner=TruncatedBPTT(window=w)), steps, f"T {steps}, window {w}, {kind.__name__}")
        for kind in (CheckpointApplication, CheckpointUnit)
        for steps, w in GRID
    ]


def layer_unit(options: Any) -> list[dict[str, Any]]:
    """Layer loop, 3 layers x 4: saved bytes and recomputed FLOPs of no checkpoint, per application, per unit."""
    config, rows = shape(LayerLoop(num_steps=4), 3), []
    model = build(config)
    plan = model.spec.plan()
    for gradient in (FullBPTT(), CheckpointApplication(), CheckpointUnit()):
        said = estimate(model, rows=4, tokens=256, plan=plan, gradient=gradient)
        saved = held(model, 4, gradient)
        expected = said.boundaries if gradient.recomputes else said.core
        assert abs(saved / expected - 1) <= SAVED, f"{gradient}: {saved} bytes saved, {expected} said"
        side = Side(config, gradient, rows=ROWS, seq=SEQ)
        side.run(4)
        again = side.ledger.flops_recompute
        total = step_flops(model.spec, plan, gradient, rows=ROWS, tokens=SEQ)
        assert side.flops + again == total, f"{gradient}: {side.flops + again} FLOPs, {total} said"
        peaked = _row(config, gradient, 4, type(gradient).__name__)
        rows.append({**peaked, "saved in the loop": saved, "recomputed FLOPs": again, "of all": again / total})
    return rows


def readout_chunk(options: Any) -> list[dict[str, Any]]:
    """Cross-entropy in chunks against all at once at a vocabulary of 50,000: peak, time, the same loss."""
    config, rows = dataclasses.replace(looped(), vocab=50_000), []
    losses = []
    for chunk in (None, 256, 64):
        side = Side(config, FullBPTT(), rows=ROWS, seq=SEQ, chunk=chunk)
        found, said = peak(side, 4), estimate(config, rows=ROWS, tokens=SEQ, num_steps=4, chunk=chunk).peak
        assert abs(found / said - 1) <= PEAK, f"chunk {chunk}: {found} bytes, {said} said"
        again = Side(config, FullBPTT(), rows=ROWS, seq=SEQ, chunk=chunk)
        losses.append(again.run(4))
        start = time.process_time()
        for _ in range(3):
            again.run(4)
        seconds = (time.process_time() - start) / 3
        rows.append(
            {"case": f"chunk {chunk}", "peak": found, "readable": size(found), "said": said, "seconds": seconds}
        )
    assert max(losses) - min(losses) <= 1e-5 * losses[0], f"losses differ: {losses}"
    return rows


CASES = {
    "memory_window": memory_window,
    "memory_checkpoint": memory_checkpoint,
    "layer_unit": layer_unit,
    "readout_chunk": readout_chunk,
}
