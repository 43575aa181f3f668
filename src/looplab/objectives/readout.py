"""Readouts in chunks: only one chunk of logits exists at a time.

    sum over tokens of score(head(hidden), label)

Each chunk is computed again in the backward pass, so the memory for logits is chunk * vocab instead of tokens * vocab,
at the price of one more product with the head.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from looplab._types import Float, Int
from looplab.recurrence.ledger import Ledger

Score = Callable[[Float[Tensor, "tokens *cells symbols"], Int[Tensor, "tokens *cells"]], tuple[Tensor, ...]]
"""(logits, labels) -> sums over the tokens (or numbers per token); logits are float32 (float64 for float64 models)."""


def summed_readout(
    model: Any,
    hidden: Float[Tensor, "batch seq dim"],
    labels: Int[Tensor, "batch seq *cells"],
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
    pieces = _read(model, hidden, labels, score, chunk=chunk, ledger=ledger)
    return tuple(torch.stack(column).sum() for column in zip(*pieces, strict=True))


def _read(
    model: Any, hidden: Tensor, labels: Tensor, score: Score, *, chunk: int | None, ledger: Ledger | None
) -> list[tuple[Tensor, ...]]:
    """What `score` says of every chunk."""
    flat, targets = hidden.flatten(0, 1), labels.flatten(0, 1)
    gradient = torch.is_grad_enabled()
    recomputed = gradient and chunk is not None and chunk < len(flat)
    if ledger is not None:
        ledger.count_head(model.spec, tokens=len(flat), gradient=gradient)
        ledger.flops_recompute += 2 * model.spec.cost.head.matmul * len(flat) * recomputed

    def read(part: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        logits = model.head(part[None])[0]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return score(logits if target.dim() == 1 else logits.unflatten(-1, (target.shape[1], -1)), target)

    pieces = zip(flat.split(chunk or len(flat)), targets.split(chunk or len(flat)), strict=True)
    if recomputed:
        return [checkpoint(read, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
    return [read(*piece) for piece in pieces]


def token_losses(
    model: Any,
    hidden: Float[Tensor, "batch seq dim"],
    labels: Int[Tensor, "batch seq *cells"],
    *,
    chunk: int | None = None,
    ledger: Ledger | None = None,
) -> Float[Tensor, "batch seq"]:
    """Cross-entropy of every position, summed over its cells; 0 where nothing has a label. `chunk` as above."""

    def score(logits: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        flat = functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-100, reduction="none")
        return (flat.view(len(targets), -1).sum(1),)

    pieces = _read(model, hidden, labels, score, chunk=chunk, ledger=ledger)
    return torch.cat([losses for (losses,) in pieces]).view(labels.shape[:2])
