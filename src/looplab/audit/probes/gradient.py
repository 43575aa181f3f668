"""Loss of a changed readout input and its slope there, streamed: one chunk of logits at a time, forward and backward.

    nll    loss = logsumexp(z) - z_y                       slope of the logits   p - [y]
    kl     loss = sum_v q_v (ln q_v - ln p_v)              slope of the logits   p - q

p = softmax(z), q the model's own output at full depth, z = head(changed hidden). The slope at the readout input is the
head's own vector-Jacobian product; what it means for a probe's parameters is for the probe to say.
"""

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from looplab._types import Float, Int
from looplab.audit.probes.stream import LOGIT_BYTES, Head, chunk_rows


@dataclasses.dataclass(frozen=True, eq=False)
class TokenIds:
    """Objective nll."""

    ids: Int[Tensor, "tokens *cells"]
    copies = 2

    def part(self, chosen: Tensor | slice) -> "TokenIds":
        """The same for some of the tokens."""
        return TokenIds(self.ids[chosen])

    def losses(self, logits: Tensor, part: slice, head: Head) -> tuple[Tensor, Tensor]:
        """Per-token loss (per cell, where a token has several), float64, and its slope at the logits."""
        p, log_sum = _softmax(logits)
        ids = self.ids[part].long().to(logits.device).reshape(-1, 1)
        losses = log_sum - logits.gather(1, ids)[:, 0].double()
        return losses, _less_one(p, ids)


@dataclasses.dataclass(frozen=True, eq=False)
class FullDepth:
    """Objective kl: the hidden states of the full plan at the same tokens."""

    hidden: Float[Tensor, "tokens dim"]
    copies = 5

    def part(self, chosen: Tensor | slice) -> "FullDepth":
        """The same for some of the tokens."""
        return FullDepth(self.hidden[chosen])

    def losses(self, logits: Tensor, part: slice, head: Head) -> tuple[Tensor, Tensor]:
        """Per-token divergence, float64, and its slope at the logits."""
        full = head(self.hidden[part]).detach()
        p, log_sum = _softmax(logits)
        q, full_sum = _softmax(full)
        losses = (q * full.sub_(logits)).sum(dim=1).double() - full_sum + log_sum
        return losses, p.sub_(q)


Objective = TokenIds | FullDepth


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """softmax, and logsumexp in float64: at the maximum, z - ln p."""
    p = torch.softmax(logits, dim=1)
    return p, logits.amax(dim=1).double() - p.amax(dim=1).double().log()


def _less_one(p: Tensor, ids: Tensor) -> Tensor:
    """p - [y], in place."""
    return p.scatter_add_(1, ids, p.new_full((1, 1), -1.0).expand_as(ids))


def slopes(
    hidden: Float[Tensor, "tokens dim"],
    change: Callable[[Tensor], Tensor],
    head: Head,
    objective: Objective,
    *,
    logit_bytes: int = LOGIT_BYTES,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Chunk by chunk: hidden, per-token loss (float64), slope of the loss at `change(hidden)`."""
    for part, piece, changed, logits in _chunks(hidden, change, head, logit_bytes, objective.copies, gradient=True):
        losses, slope = objective.losses(logits.detach(), part, head)
        yield piece, losses, torch.autograd.grad(logits, changed, slope)[0]


def drawn_slopes(
    hidden: Float[Tensor, "tokens dim"],
    change: Callable[[Tensor], Tensor],
    head: Head,
    *,
    logit_bytes: int = LOGIT_BYTES,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Chunk by chunk: hidden, and the slope of nll with labels drawn from the prediction itself.

    The second moments of such slopes are the Fisher information, under both objectives the curvature of a linear head.
    """
    draws = torch.Generator().manual_seed(0)
    for _, piece, changed, logits in _chunks(hidden, change, head, logit_bytes, 3, gradient=True):
        p = torch.softmax(logits.detach(), dim=1)
        rising = p.cumsum(dim=1)
        level = torch.rand(len(p), 1, generator=draws).to(rising) * rising[:, -1:]
        labels = torch.searchsorted(rising, level, right=True).clamp_(max=p.shape[1] - 1)
        del rising
        yield piece, torch.autograd.grad(logits, changed, _less_one(p, labels))[0]


@torch.no_grad()
def mean_loss(
    hidden: Float[Tensor, "tokens dim"],
    change: Callable[[Tensor], Tensor],
    head: Head,
    objective: Objective,
    *,
    logit_bytes: int = LOGIT_BYTES,
) -> float:
    """Mean loss in nats."""
    total = 0.0
    for part, _, _, logits in _chunks(hidden, change, head, logit_bytes, objective.copies, gradient=False):
        total += float(objective.losses(logits, part, head)[0].sum())
    return total / len(hidden)


def _chunks(
    hidden: Tensor, change: Callable[[Tensor], Tensor], head: Head, logit_bytes: int, copies: int, *, gradient: bool
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Place, hidden, changed hidden and logits; the first chunk is one token, which tells the width of the rest."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    start, rows = 0, 1
    while start < len(hidden):
        part = slice(start, start + rows)
        piece = hidden[part].to(dtype)
        changed = change(piece).requires_grad_(gradient)
        logits = head(changed)
        yield part, piece, changed, logits
        start += rows
        rows = max(1, chunk_rows(logits.detach(), logit_bytes, copies=copies) * len(piece) // len(logits))
        del logits
