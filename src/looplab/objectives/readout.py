"""Readouts in chunks: only one chunk of logits exists at a time.

    sum over tokens of score(head(hidden), label)

Each chunk is computed again in the backward pass, so the memory for logits is chunk * vocab instead of tokens * vocab,
at the price of one more product with the head.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from looplab._types import Float, Int
from looplab.recurrence.ledger import Ledger

Score = Callable[[Float[Tensor, "tokens vocab"], Int[Tensor, " tokens"]], tuple[Tensor, ...]]
"""(logits, labels) -> sums over the tokens; logits are float32 (float64 for float64 models)."""


def summed_readout(
    model: Any,
    hidden: Float[Tensor, "batch seq dim"],
    labels: Int[Tensor, "batch seq"],
    score: Score,
    *,
    chunk: int | None,
    ledger: Ledger | None = None,
) -> tuple[Tensor, ...]:
    """The sums of `score` over all tokens.

    Args:
        chunk: Tokens per chunk; None: all at once, nothing computed twice.
        ledger: Receives the head's counts, the second product included.
    """
    flat, targets = hidden.flatten(0, 1), labels.flatten()
    gradient = torch.is_grad_enabled()
    recomputed = gradient and chunk is not None and chunk < len(flat)
    if ledger is not None:
        ledger.count_head(model.spec, tokens=len(flat), gradient=gradient)
        ledger.flops_recompute += 2 * model.spec.cost.head.matmul * len(flat) * recomputed

    def read(part: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        logits = model.head(part[None])[0]
        return score(logits.to(torch.promote_types(logits.dtype, torch.float32)), target)

    pieces = zip(flat.split(chunk or len(flat)), targets.split(chunk or len(flat)), strict=True)
    if recomputed:
        sums = [checkpoint(read, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
    else:
        sums = [read(*piece) for piece in pieces]
    return tuple(torch.stack(column).sum() for column in zip(*sums, strict=True))
