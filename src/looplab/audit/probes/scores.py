"""Token statistics of a readout, raw and at a temperature, in one pass over the logits.

With x = z - max z and the moments of `stream.tilted_moments` at a tilt beta:

    nll = ln S0 - beta x_y      confidence = 1 / S0      entropy = ln S0 - beta S1 / S0
    brier = 1 - 2 p_y + sum p^2 = 1 - 2 e^{beta x_y} / S0 + P / S0^2

Top-1 is the lowest index among the largest raw logits, at every temperature; at beta = 0 its confidence is 1 / V.

The law of a token that answers with several cells is the product of theirs: losses, entropies, divergences and squares
of norms add up, probabilities multiply, and the token is right if every cell is.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from looplab._types import Bool, Float, Int, Integer
from looplab.audit.bootstrap import DocumentSums
from looplab.audit.probes.stream import LOGIT_BYTES, Head, LogitChunks, rows_at_once, tilted_moments
from looplab.audit.probes.temperature import chosen_logit, token_derivatives

_NUMBERS = 4
"""Numbers per token and further beta that are alive at once."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ReadoutScores:
    """Per token: loss in nats, top-1 confidence, entropy in nats, Brier score in [0, 2]."""

    nll: Float[np.ndarray, " tokens"]
    confidence: Float[np.ndarray, " tokens"]
    entropy: Float[np.ndarray, " tokens"]
    brier: Float[np.ndarray, " tokens"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenScores:
    """Scores of one schedule on the evaluation tokens."""

    raw: ReadoutScores
    temperature: ReadoutScores
    correct: Bool[np.ndarray, " tokens"]
    """Top-1 is the target; no temperature changes it."""
    cells_right: Integer[np.ndarray, " tokens"]
    """How many of the token's cells are right; 0 or 1 where it has one."""
    logit_norm: Float[np.ndarray, " tokens"]
    centred_norm: Float[np.ndarray, " tokens"]
    """Norm of z - mean z, which adding a constant to the logits leaves alone."""
    sums: DocumentSums
    """Loss and derivatives at `beta`, per document."""
    extra: Float[np.ndarray, "documents betas"]
    """Loss sums at each of `extra_betas`."""


@torch.no_grad()
def token_scores(
    hidden: Float[Tensor, "tokens dim"],
    head: Head,
    targets: Int[Tensor, "tokens *cells"],
    documents: Int[Tensor, " tokens"],
    *,
    beta: float,
    extra_betas: Sequence[float] | Float[np.ndarray, " betas"] = (),
    logit_bytes: int = LOGIT_BYTES,
) -> TokenScores:
    """Everything the audit keeps of a schedule's logits, from one head pass.

    Args:
        hidden: Spooled hidden states on the CPU.
        targets: Token ids.
        documents: Document of each token, ids 0..n-1.
        beta: The temperature's beta, fitted on calibration documents.
        extra_betas: Further betas whose document losses are wanted: exact refits, other domains' temperatures.
    """
    rows: list[tuple[Tensor, ...]] = []
    num_documents = int(documents.max()) + 1
    sums = torch.zeros(4, num_documents, dtype=torch.float64)
    extra = torch.zeros(len(extra_betas), num_documents, dtype=torch.float64)
    ids, cells = targets.flatten(), targets.numel() // len(targets)
    owners = documents if cells == 1 else documents.repeat_interleave(cells)
    start = 0
    for logits in LogitChunks(hidden, head, logit_bytes):
        part = slice(start, start + len(logits))
        start = part.stop
        maxima, moments = tilted_moments(logits, [1.0, beta], power=True)
        chosen = chosen_logit(logits, maxima, ids[part])
        right = logits.argmax(dim=1) == ids[part].to(logits.device)
        raw, tempered = (_scores(m, chosen, tilt) for m, tilt in zip(moments, (1.0, beta), strict=True))
        rows.append(tuple(row.cpu() for row in (*raw, *tempered, right, *_squares(logits))))
        sums.index_add_(1, owners[part], token_derivatives(moments[1:, :4], chosen, [beta])[0].cpu())
        if len(extra_betas):
            tilts = torch.tensor(list(extra_betas)).double()[:, None].to(chosen)
            at_once = rows_at_once(len(extra_betas), _NUMBERS)
            for own, piece, owner in zip(*(t.split(at_once) for t in (chosen, logits, owners[part])), strict=True):
                _, scale = tilted_moments(piece, list(extra_betas), order=0)
                extra.index_add_(1, owner, (torch.log(scale[:, 0]) - tilts * own).cpu())
    columns = [torch.cat(column).view(-1, cells) for column in zip(*rows, strict=True)]
    cells_right = columns[10].sum(dim=1).numpy()
    loss, first, second, third = sums.numpy()
    tokens = torch.bincount(documents, minlength=num_documents).double().numpy()
    return TokenScores(
        raw=_joint(columns[:5]),
        temperature=_joint(columns[5:10]),
        correct=cells_right == cells,
        cells_right=cells_right,
        logit_norm=columns[11].sum(dim=1).sqrt().numpy(),
        centred_norm=columns[12].sum(dim=1).sqrt().numpy(),
        sums=DocumentSums(loss=loss, first=first, second=second, third=third, tokens=tokens),
        extra=extra.numpy().T,
    )


def _scores(moments: Float[Tensor, "5 tokens"], chosen: Float[Tensor, " tokens"], beta: float) -> tuple[Tensor, ...]:
    """nll, confidence, entropy, probability of the target, sum of squared probabilities."""
    s0, s1, power = moments[0], moments[1], moments[4]
    log = torch.log(s0)
    return log - beta * chosen, 1 / s0, log - beta * s1 / s0, torch.exp(beta * chosen) / s0, power / s0**2


def _joint(columns: Sequence[Float[Tensor, "tokens cells"]]) -> ReadoutScores:
    """The scores of the product of a token's cells."""
    nll, confidence, entropy, chosen, square = columns
    brier = 1 - 2 * chosen.prod(dim=1) + square.prod(dim=1)
    nll, entropy = nll.sum(dim=1), entropy.sum(dim=1)
    return ReadoutScores(
        nll=nll.numpy(), confidence=confidence.prod(dim=1).numpy(), entropy=entropy.numpy(), brier=brier.numpy()
    )


def _squares(logits: Float[Tensor, "tokens vocab"]) -> tuple[Tensor, Tensor]:
    square = logits.square().sum(dim=1, dtype=torch.float64)
    mean = logits.mean(dim=1, dtype=torch.float64)
    centred = (logits - mean[:, None].to(logits.dtype)).square().sum(dim=1, dtype=torch.float64)
    return square, centred


@torch.no_grad()
def token_nll(
    hidden: Float[Tensor, "tokens dim"],
    head: Head,
    targets: Int[Tensor, "tokens *cells"],
    *,
    logit_bytes: int = LOGIT_BYTES,
) -> Float[np.ndarray, " tokens"]:
    """Loss of each token in nats, for a probe that has changed the hidden states."""
    parts, start, ids = [], 0, targets.flatten()
    for logits in LogitChunks(hidden, head, logit_bytes):
        maxima, moments = tilted_moments(logits, [1.0], order=0)
        chosen = chosen_logit(logits, maxima, ids[start : start + len(logits)])
        parts.append((torch.log(moments[0, 0]) - chosen).cpu())
        start += len(logits)
    return torch.cat(parts).view(len(hidden), -1).sum(dim=1).numpy()


@torch.no_grad()
def cells_right(
    hidden: Float[Tensor, "tokens dim"],
    head: Head,
    targets: Int[Tensor, "tokens *cells"],
    *,
    logit_bytes: int = LOGIT_BYTES,
) -> Integer[np.ndarray, " tokens"]:
    """How many of each token's cells are right, for a probe that has changed the hidden states."""
    found = torch.cat([logits.argmax(dim=1).cpu() for logits in LogitChunks(hidden, head, logit_bytes)])
    return (found == targets.flatten()).view(len(hidden), -1).sum(dim=1).numpy()


@torch.no_grad()
def divergence(
    hidden: Float[Tensor, "tokens dim"],
    full_hidden: Float[Tensor, "tokens dim"],
    head: Head,
    *,
    logit_bytes: int = LOGIT_BYTES,
) -> tuple[Float[np.ndarray, " tokens"], Bool[np.ndarray, " tokens"]]:
    """KL(p_full || p_schedule) in nats on raw logits, and whether both have the same top-1, per token."""
    divergences, agreements = [], []
    # Half the chunk for each of the two; the same sizes, so the chunks fall together.
    pairs = zip(*(LogitChunks(h, head, logit_bytes // 2) for h in (hidden, full_hidden)), strict=True)
    for logits, full in pairs:
        agreements.append((logits.argmax(dim=1) == full.argmax(dim=1)).cpu())
        log_full = torch.log_softmax(full, dim=1)
        gap = log_full - torch.log_softmax(logits, dim=1)
        divergences.append((log_full.exp_() * gap).sum(dim=1, dtype=torch.float64).clamp_min(0.0).cpu())
    apart, same = (torch.cat(found).view(len(hidden), -1) for found in (divergences, agreements))
    return apart.sum(dim=1).numpy(), same.all(dim=1).numpy()
