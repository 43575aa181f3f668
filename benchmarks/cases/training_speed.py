"""Speed of training steps, each against a rival in the same process. Counts and losses are checked before a time is
printed.

Times are processor seconds of this process, on one thread, medians of alternating pairs; `ratio` is rival / ours, so
above 1 we are faster. `overhead` compares seconds per FLOP, both from the ledger, so draws that happen to be deep count
as the work they are.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.baselines import plain_training, public_loops
from benchmarks.cases.models_memory import _peak as peak_of
from benchmarks.cases.models_speed import compared, core
from looplab.data.packing import Batch, Position
from looplab.models.base import build
from looplab.models.looped import LoopedConfig
from looplab.nn.attention import Attention
from looplab.nn.mlp import SwiGLU
from looplab.nn.rope import Rope
from looplab.objectives import NextToken
from looplab.recurrence.depth import PoissonLognormal
from looplab.recurrence.expected_cost import step_flops
from looplab.recurrence.gradient import FullBPTT, GradientStrategy, TruncatedBPTT
from looplab.recurrence.injection import Add, Concat
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.philox import stream_key
from looplab.training.compiled import GRAPHS_PER_BLOCK, CompiledParts
from looplab.training.step import At, TrainingStep

LAW, FIXED, WINDOW = PoissonLognormal(rate=3.0, max_steps=64), 4, 4
KEY = stream_key(0, "depth")


class Side:
    """A model that is trained step by step, with the clipping of the trainer."""

    def __init__(
        self,
        config: LoopedConfig,
        gradient: GradientStrategy,
        *,
        rows: int,
        seq: int,
        seed: int = 0,
        chunk: int | None = None,
    ):
        self.model = build(config, seed=seed)
        self.step = TrainingStep(self.model, NextToken(chunk=chunk), gradient)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch, self.ledger = batch_of(config.vocab, rows, seq), Ledger()
        self.seconds: list[float] = []

    def run(self, depth: int, depths: Tensor | None = None, row_bucket: int = 1) -> float:
        """One optimizer step of `depth` iterations, or of `depths` of the rows; returns its loss."""
        start = time.process_time()
        self.optimizer.zero_grad(set_to_none=True)
        plan, objective = self.model.spec.plan(depth), self.step.objective
        counts = objective.counts(self.batch.labels, len(plan))
        at = At(depths=depths, row_bucket=row_bucket)
        output = self.step(self.batch, plan, None, counts, at=at, ledger=self.ledger)
        output.share.backward()
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None]))
        if norm > 1:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(1 / norm)
        self.optimizer.step()
        self.seconds.append(time.process_time() - start)
        return output.parts.total

    def loss(self, depth: int) -> float:
        """Without gradient."""
        plan = self.model.spec.plan(depth)
        counts = self.step.objective.counts(self.batch.labels, len(plan))
        with torch.no_grad():
            return float(self.step(self.batch, plan, None, counts).share)

    @property
    def flops(self) -> int:
        """What all steps did."""
        return self.ledger.flops_forward + self.ledger.flops_backward


def batch_of(vocab: int, rows: int, seq: int) -> Batch:
    """Tokens without meaning."""
    tokens = torch.randint(0, vocab, (rows, seq + 1), generator=torch.Generator().manual_seed(2))
    places = torch.arange(seq).expand(rows, -1).contiguous()
    return Batch(
        tokens=tokens[:, :-1].contiguous(), labels=tokens[:, 1:].contiguous(), positions=places, document_ids=None,
        rows=torch.arange(rows), start=Position(0, 0, 0), data_hash="",
    )  # fmt: skip


def wide(num_steps: int, width: int, **changes: Any) -> LoopedConfig:
    """The core of the speed cases at another width, heads of 64."""
    heads = width // 64
    attention = Attention(heads=heads, kv_heads=heads, head_dim=64, position=Rope(base=10000.0))
    return dataclasses.replace(
        core(num_steps), dim=width, attention=attention, ffn=SwiGLU(hidden=8 * width // 3 // 8 * 8), **changes
    )


def against(
    case: str, options: Any, config: LoopedConfig, gradient: GradientStrategy, depth: int, loss: Callable[..., Tensor]
) -> dict[str, Any]:
    """Our step against AdamW around `loss` (model, tokens, labels) on the same weights: time, peak memory, loss."""
    ours = Side(config, gradient, rows=options.rows, seq=options.seq)
    theirs = Side(config, gradient, rows=options.rows, seq=options.seq)
    batch = ours.batch

    def rival() -> float:
        theirs.optimizer.zero_grad(set_to_none=True)
        found = loss(theirs.model, batch.tokens, batch.labels)
        found.backward()
        torch.nn.utils.clip_grad_norm_(theirs.model.parameters(), 1.0)
        theirs.optimizer.step()
        return float(found.detach())

    with torch.no_grad():
        first = float(loss(ours.model, batch.tokens, batch.labels))
    same = "equal to the bit" if first == ours.loss(depth) else "equal to rounding"
    assert abs(first / ours.loss(depth) - 1) < 1e-6, f"{case}: losses {first} and {ours.loss(depth)}"
    row = compared(case, rival, lambda: ours.run(depth), options.pairs)
    tokens = batch.tokens.numel()
    memory = peak_of(lambda: ours.run(depth)) / peak_of(rival)
    assert memory <= 1.03, f"{case}: our peak is {memory:.3f} of the rival's"
    for one, two in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-2, atol=1e-3)
    return row | {"tokens/s": tokens / row["ours s"], "peak over rival's": memory, "losses": same}


def hand_loop(options: Any) -> list[dict[str, Any]]:
    """A step of the trainer's parts against a bare loop over the same modules; targets 0.95 time, 1.03 peak."""
    rows = []
    for width in (256, 512):
        for steps in (1, 4, 8):
            rows.append(
                against(
                    f"width {width}, T {steps}",
                    options,
                    wide(steps, width),
                    FullBPTT(),
                    steps,
                    lambda model, tokens, labels, steps=steps: plain_training.loss(model, tokens, labels, steps),
                )
            )
    assert all(row["losses"] == "equal to the bit" for row in rows)
    return rows


def rivals(options: Any) -> list[dict[str, Any]]:
    """Our step against the loops of two public repositories, written again over our layers at equal shape."""
    nano = wide(8, 256, injection=Concat(order="embeds_first", init="normal"))
    scheduled = wide(4, 256, injection=Add())
    return [
        against(
            "looped_nanochat, T 8, window 4", options, nano, TruncatedBPTT(window=4), 8,
            lambda *given: public_loops.window(*given, 8, 4),
        ),
        against(
            "xllm-loop, T 4", options, scheduled, FullBPTT(), 4, lambda *given: public_loops.schedule(*given, 4)
        ),
    ]  # fmt: skip


def sampled_depth(options: Any) -> list[dict[str, Any]]:
    """A draw per step (E[T] = 4) against T = 4, the same window: at most 10 % overhead, 3 graphs per block."""
    return [{**_sampled(options, FIXED), "graphs per block": graphs_per_block()}]


def naive_sampled(options: Any) -> list[dict[str, Any]]:
    """The same draws against T = 3, the number in the law's name: what the law alone adds."""
    return [_sampled(options, int(LAW.rate))]


def _sampled(options: Any, fixed: int) -> dict[str, Any]:
    drawn = [int(LAW.draw(KEY, step, np.zeros(1, np.int64))[0]) for step in range(options.draws)]
    shape, strategy = {"rows": 2, "seq": 32}, TruncatedBPTT(window=WINDOW)
    one, other = (Side(core(FIXED), strategy, **shape) for _ in range(2))
    for side, depth in ((one, fixed), (other, max(drawn))):
        side.run(depth)  # warm-up
        side.seconds, side.ledger = [], Ledger()
    for depth in drawn:
        one.run(fixed)
        other.run(depth)
    spec, size = other.model.spec, {"rows": shape["rows"], "tokens": shape["seq"]}
    assert other.flops == sum(step_flops(spec, spec.plan(depth), strategy, **size) for depth in drawn)
    assert other.ledger.row_applications == shape["rows"] * sum(drawn)
    expected = sum(p * step_flops(spec, spec.plan(t), strategy, **size) for t, p in enumerate(LAW.pmf()) if t and p)
    return {
        "case": f"{LAW} against T {fixed}",
        "draws": options.draws,
        "mean drawn": statistics.mean(drawn),
        "expected FLOPs ratio": expected / step_flops(spec, spec.plan(fixed), strategy, **size),
        "fixed s": sum(one.seconds),
        "sampled s": sum(other.seconds),
        "time ratio": sum(other.seconds) / sum(one.seconds),
        "overhead per FLOP": (sum(other.seconds) / other.flops) / (sum(one.seconds) / one.flops) - 1,
    }


def graphs_per_block() -> float:
    """Graphs that the compiler makes of the blocks of a small model over many depths and windows."""
    graphs: list[Any] = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    side = Side(wide(FIXED, 64), FullBPTT(), rows=1, seq=8)
    parts = CompiledParts(side.model, backend=counting)
    seen = []
    for depth, window in ((1, 1), (4, 4), (3, 2), (2, 1), (4, 1), (3, 3), (7, 2), (9, 4)):
        side.step.gradient = TruncatedBPTT(window=window)
        side.run(depth)
        seen.append(len(graphs))
    assert seen[-1] == seen[3], f"a later depth made new graphs: {seen}"
    # encode, coda and head are a graph each
    found = (len(graphs) - 3) / len(parts._model.spec.blocks)
    assert found <= GRAPHS_PER_BLOCK, f"{found} graphs per block"
    return found


def per_sequence(options: Any) -> list[dict[str, Any]]:
    """A draw per row, run so that all rows end together, against all rows in every launch."""
    masked, aligned = (Side(core(FIXED), TruncatedBPTT(window=WINDOW), rows=4, seq=32) for _ in range(2))
    launched = {1: 0, 4: 0}
    for step in range(options.draws // 2 + 1):
        depths = torch.from_numpy(LAW.draw(KEY, step, np.arange(4)))
        deepest = int(depths.max())
        if step == 1:  # the first was the warm-up
            for side in (masked, aligned):
                side.seconds, side.ledger = [], Ledger()
        masked.run(deepest, depths, 4)
        aligned.run(deepest, depths)
        if step:
            launched[1] += int(depths.sum())
            launched[4] += 4 * deepest
    assert aligned.ledger.row_applications == launched[1]
    assert masked.ledger.row_applications == launched[4]
    for one, two in zip(masked.model.parameters(), aligned.model.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)
    return [
        {"case": "mask", "row applications": launched[4], "seconds": sum(masked.seconds)},
        {
            "case": "end-aligned",
            "row applications": launched[1],
            "seconds": sum(aligned.seconds),
            "mask over this": sum(masked.seconds) / sum(aligned.seconds),
        },
    ]


CASES = {
    "hand_loop": hand_loop,
    "sampled_depth": sampled_depth,
    "naive_sampled": naive_sampled,
    "per_sequence": per_sequence,
    "rivals": rivals,
}
