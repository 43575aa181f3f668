"""Synthetic runs with a known truth, for tests, figures and first tries: nobody trained them.

The grid: 12 pairs of num_steps and window up to 8, six budgets from 4.64e17 to 2.15e19 FLOPs, eight widths per cell
over a factor 4 around the best one, in the Iso-Depth family of 20 executed layers: 576 runs in 72 cells.
"""

from typing import Any

import numpy as np

from looplab.scaling.cost import mean_flops, training_flops
from looplab.scaling.family import Family, IsoDepth, Shape
from looplab.scaling.laws.base import Law
from looplab.scaling.laws.chinchilla import REPLICATION
from looplab.scaling.laws.forward_backward import ForwardBackward
from looplab.scaling.laws.gains.decay import Decay
from looplab.scaling.laws.points import Array, Points

PAIRS = ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 3), (4, 4), (8, 1), (8, 2), (8, 4), (8, 6), (8, 8))
BUDGETS = (4.64e17, 1e18, 2.15e18, 4.64e18, 1e19, 2.15e19)
SEQ_LEN = 2048
TRUNCATION = ForwardBackward(gain=Decay())
TRUNCATION_TRUTH = {**REPLICATION, "phi": 0.46, "kappa": 1.2}
"""The truth of `synthetic_truncation`: its best windows and parameter ratios are those claimed for real runs."""


def synthetic_truncation() -> list[dict[str, Any]]:
    """The 576 runs as records, noise 0.005 nats."""
    return synthetic_runs(TRUNCATION, TRUNCATION.values(**TRUNCATION_TRUTH), noise=0.005, seed=0)


EXAMPLES = {"synthetic_truncation": synthetic_truncation}
"""Names that `read_runs` takes beside files."""


def synthetic_runs(
    law: Law,
    theta: Array,
    *,
    noise: float,
    seed: int,
    cell_noise: float = 0.0,
    pairs: tuple[tuple[int, int], ...] = PAIRS,
    budgets: tuple[float, ...] = BUDGETS,
    widths: int = 8,
    family: Family | None = None,
) -> list[dict[str, Any]]:
    """Records of a grid whose losses follow `law` at `theta`, with normal noise in nats.

    Args:
        cell_noise: Deviation that all runs of a cell share.
        widths: Per cell, geometric over a factor 4; 1: the best alone.
    """
    family = family or IsoDepth()
    draws = np.random.Generator(np.random.PCG64(seed))
    rows: list[dict[str, Any]] = []
    for budget in budgets:
        for steps, window in pairs:
            centre = best_width(law, theta, family, budget, steps, window)
            spread = np.geomspace(0.5, 2.0, widths) if widths > 1 else np.ones(1)
            for width in (max(64, 8 * round(centre * factor / 8)) for factor in spread):
                rows.append(_row(family.shape(width, steps), family, budget, steps, window))
    points = Points.make(
        loss=np.ones(len(rows)),
        **{name: [row[name] for row in rows] for name in ("n_once", "n_rec", "tokens", "num_steps", "window")},
    )
    losses = np.exp(law.on(points).log_loss(theta, points))
    losses += noise * draws.standard_normal(len(rows))
    cells = {key: draws.standard_normal() for key in dict.fromkeys(_cell(row) for row in rows)}
    for index, (row, loss) in enumerate(zip(rows, losses, strict=True)):
        row |= {"run_id": f"synthetic-{index:03d}", "loss": float(loss + cell_noise * cells[_cell(row)])}
    return rows


def _cell(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["budget"], row["num_steps"], row["window"]


def best_width(law: Law, theta: Array, family: Family, budget: float, num_steps: int, window: int) -> float:
    """Width at which `law` has the least loss for `budget` FLOPs, of 400 over 64 to 16,384."""
    widths = np.geomspace(64, 16_384, 400)
    small = family.shape(64, num_steps)
    # Matrices grow as the square of the width, attention and head with the width itself.
    one, two = (
        mean_flops(family.shape(d, num_steps), num_steps, window, seq_len=SEQ_LEN, tokens=1, pairs="square")
        for d in (64, 128)
    )
    square = (two - 2 * one) / 2
    grown = widths / 64
    points = Points.make(
        n_once=small.n_once * grown**2,
        n_rec=small.n_rec * grown**2,
        tokens=budget / (square * grown**2 + (one - square) * grown),
        loss=np.ones(len(widths)),
        num_steps=np.full(len(widths), num_steps),
        window=np.full(len(widths), window),
    )
    return float(widths[np.argmin(law.log_loss(theta, points))])


def _row(shape: Shape, family: Family, budget: float, num_steps: int, window: int) -> dict[str, Any]:
    per_row = training_flops(shape, num_steps, window, seq_len=SEQ_LEN, tokens=SEQ_LEN, pairs="square")
    tokens = round(budget / per_row) * SEQ_LEN
    return {
        "family": family.name,
        "num_steps": num_steps,
        "window": window,
        "depth_law": "fixed",
        "n_once": shape.n_once,
        "n_rec": shape.n_rec,
        "width": shape.width,
        "layers_once": shape.layers_once,
        "layers_core": shape.layers_core,
        "seq_len": SEQ_LEN,
        "vocab_size": shape.vocab_size,
        "tokens": tokens,
        "unique_tokens": tokens,
        "train_flops": per_row * tokens // SEQ_LEN,
        "flops_pairs": "square",
        "budget": f"{budget:.3g}",
        "loss_split": "synthetic",
        "tokenizer": "synthetic",
        "eval_steps": num_steps,
        "seed": 0,
        "status": "finished",
    }
