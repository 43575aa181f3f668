"""Training steps whose depth is drawn, against steps of one depth. Counts are checked before a time is printed.

    sampled_depth   a draw per step (`PoissonLognormal(3)`, E[T] = 4) against fixed T = 4, the same gradient window
    naive_sampled   the same draws against T = 3, the number in the law's name: what only the law adds
    per_sequence    a draw per row, run so that all rows end together, against all rows in every launch

    python -m benchmarks.cases.training_step [--case sampled_depth] [--draws 200] [--out benchmarks/results]

Times are processor seconds of this process. `overhead` compares seconds per FLOP, both from the ledger, so draws that
happen to be deep count as the work they are.
"""

import statistics
import time
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import tyro
from torch import Tensor

from benchmarks.cases.models_speed import core
from benchmarks.timing import report
from looplab.data.packing import Batch, Position
from looplab.models.base import build
from looplab.objectives import NextToken
from looplab.recurrence.depth import PoissonLognormal
from looplab.recurrence.expected_cost import step_flops
from looplab.recurrence.gradient import TruncatedBPTT
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.philox import stream_key
from looplab.training.step import At, TrainingStep

LAW, FIXED, WINDOW = PoissonLognormal(rate=3.0, max_steps=64), 4, 4
KEY = stream_key(0, "depth")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure, and how long."""

    case: Literal["sampled_depth", "naive_sampled", "per_sequence"] = "sampled_depth"
    draws: int = 200
    """Optimizer steps of each side."""
    rows: int = 4
    seq: int = 128
    threads: int = 1
    out: str | None = None
    """Folder for the result."""


class Side:
    """A model that is trained step by step."""

    def __init__(self, options: Options):
        self.model = build(core(FIXED))
        self.step = TrainingStep(self.model, NextToken(), TruncatedBPTT(window=WINDOW))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch, self.ledger = _batch(options), Ledger()
        self.seconds: list[float] = []

    def run(self, depth: int, depths: Tensor | None = None, row_bucket: int = 1) -> None:
        """One optimizer step of `depth` iterations, or of `depths` of the rows."""
        start = time.process_time()
        self.optimizer.zero_grad(set_to_none=True)
        plan, objective = self.model.spec.plan(depth), self.step.objective
        counts = objective.counts(self.batch.labels, len(plan))
        at = At(depths=depths, row_bucket=row_bucket)
        self.step(self.batch, plan, None, counts, at=at, ledger=self.ledger).share.backward()
        self.optimizer.step()
        self.seconds.append(time.process_time() - start)

    @property
    def flops(self) -> int:
        """What all steps did."""
        return self.ledger.flops_forward + self.ledger.flops_backward


def _batch(options: Options) -> Batch:
    make = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, core(FIXED).vocab, (options.rows, options.seq + 1), generator=make)
    places = torch.arange(options.seq).expand(options.rows, -1).contiguous()
    return Batch(
        tokens=tokens[:, :-1].contiguous(), labels=tokens[:, 1:].contiguous(), positions=places, document_ids=None,
        rows=torch.arange(options.rows), start=Position(0, 0, 0), data_hash="",
    )  # fmt: skip


def sampled(options: Options, fixed_depth: int) -> dict[str, Any]:
    """Drawn depths against one."""
    drawn = [int(LAW.draw(KEY, step, np.zeros(1, np.int64))[0]) for step in range(options.draws)]
    one, other = Side(options), Side(options)
    for side, depth in ((one, fixed_depth), (other, max(drawn))):
        side.run(depth)  # warm-up
        side.seconds, side.ledger = [], Ledger()
    for depth in drawn:
        one.run(fixed_depth)
        other.run(depth)
    shape = {"rows": options.rows, "tokens": options.seq}
    spec, strategy = other.model.spec, TruncatedBPTT(window=WINDOW)
    assert other.flops == sum(step_flops(spec, spec.plan(depth), strategy, **shape) for depth in drawn)
    assert other.ledger.row_applications == options.rows * sum(drawn)
    mass = LAW.pmf()
    expected = sum(p * step_flops(spec, spec.plan(t), strategy, **shape) for t, p in enumerate(mass) if t and p)
    return {
        "draws": options.draws,
        "mean_drawn": statistics.mean(drawn),
        "fixed": fixed_depth,
        "expected_flops_ratio": expected / step_flops(spec, spec.plan(fixed_depth), strategy, **shape),
        "seconds_fixed": sum(one.seconds),
        "seconds_sampled": sum(other.seconds),
        "overhead": (sum(other.seconds) / other.flops) / (sum(one.seconds) / one.flops) - 1,
    }


def per_sequence(options: Options) -> dict[str, Any]:
    """Rows of the launches by depth, against all rows."""
    masked, aligned = Side(options), Side(options)
    launched = {1: 0, options.rows: 0}
    for step in range(options.draws + 1):
        depths = torch.from_numpy(LAW.draw(KEY, step, np.arange(options.rows)))
        deepest = int(depths.max())
        if step == 1:  # the first was the warm-up
            for side in (masked, aligned):
                side.seconds, side.ledger = [], Ledger()
        masked.run(deepest, depths, options.rows)
        aligned.run(deepest, depths)
        if step:
            launched[1] += int(depths.sum())
            launched[options.rows] += options.rows * deepest
    assert aligned.ledger.row_applications == launched[1]
    assert masked.ledger.row_applications == launched[options.rows]
    for one, two in zip(masked.model.parameters(), aligned.model.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)
    return {
        "draws": options.draws,
        "row_applications_mask": launched[options.rows],
        "row_applications_aligned": launched[1],
        "seconds_mask": sum(masked.seconds),
        "seconds_aligned": sum(aligned.seconds),
        "ratio": sum(masked.seconds) / sum(aligned.seconds),
    }


def main(options: Options) -> None:
    """Measures one case and reports."""
    torch.set_num_threads(options.threads)
    if options.case == "per_sequence":
        numbers = per_sequence(options)
    else:
        numbers = sampled(options, FIXED if options.case == "sampled_depth" else int(LAW.rate))
    report(f"training_step_{options.case}", numbers, options.out)


if __name__ == "__main__":
    main(tyro.cli(Options))
