"""Token statistics of a readout, raw and at a temperature, in one pass over the logits.

With x = z - max z and the moments of `stream.tilted_moments` at a tilt beta:

    nll = ln S0 - beta x_y      confidence = 1 / S0      entropy = ln S0 - beta S1 / S0
    brier = 1 - 2 p_y + sum p^2 = 1 - 2 e^{beta x_y} / S0 + P / S0^2

Top-1 is the lowest index among the largest raw logits, at every temperature; at beta = 0 its confidence is 1 / V.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from looplab._types import Bool, Float, Int
from looplab.audit.bootstrap import DocumentSums
from looplab.audit.probes.stream import LOGIT_BYTES, Head, LogitChunks, tilted_moments
from looplab.audit.probes.temperature import chosen_logit, token_derivatives


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
    targets: Int[Tensor, " tokens"],
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
    start = 0
    for logits in LogitChunks(hidden, head, logit_bytes):
        part = slice(start, start + len(logits))
        start = part.stop
        maxima, moments = tilted_moments(logits, [1.0, beta], power=True)
        chosen = chosen_logit(logits, maxima, targets[part])
        correct = logits.argmax(dim=1) == targets[part].to(logits.device)
        raw, tempered = (_scores(m, chosen, tilt) for m, tilt in zip(moments, (1.0, beta), strict=True))
        rows.append(tuple(row.cpu() for row in (*raw, *tempered, correct, *_norms(logits))))
        sums.index_add_(1, documents[part], token_derivatives(moments[1:, :4], chosen, [beta])[0].cpu())
        if len(extra_betas):
            _, scale = tilted_moments(logits, list(extra_betas), order=0)
            losses = torch.log(scale[:, 0]) - torch.tensor(list(extra_betas)).double()[:, None].to(chosen) * chosen
            extra.index_add_(1, documents[part], losses.cpu())
    columns = [torch.cat(column).numpy() for column in zip(*rows, strict=True)]
    loss, first, second, third = sums.numpy()
    tokens = torch.bincount(documents, minlength=num_documents).double().numpy()
    return TokenScores(
        raw=ReadoutScores(nll=columns[0], confidence=columns[1], entropy=columns[2], brier=columns[3]),
        temperature=ReadoutScores(nll=columns[4], confidence=columns[5], entropy=columns[6], brier=columns[7]),
        correct=columns[8],
        logit_norm=columns[9],
        centred_norm=columns[10],
        sums=DocumentSums(loss=loss, first=first, second=second, third=third, tokens=tokens),
        extra=extra.numpy().T,
    )


def _scores(moments: Float[Tensor, "5 tokens"], chosen: Float[Tensor, " tokens"], beta: float) -> tuple[Tensor, ...]:
    """nll, confidence, entropy, Brier."""
    s0, s1, power = moments[0], moments[1], moments[4]
    log = torch.log(s0)
    brier = 1 - 2 * torch.exp(beta * chosen) / s0 + power / s0**2
    return log - beta * chosen, 1 / s0, log - beta * s1 / s0, brier


def _norms(logits: Float[Tensor, "tokens vocab"]) -> tuple[Tensor, Tensor]:
    square = logits.square().sum(dim=1, dtype=torch.float64)
    mean = logits.mean(dim=1, dtype=torch.float64)
    centred = (logits - mean[:, None].to(logits.dtype)).square().sum(dim=1, dtype=torch.float64)
    return square.sqrt(), centred.sqrt()


@torch.no_grad()
def token_nll(
    hidden: Float[Tensor, "tokens dim"], head: Head, targets: Int[Tensor, " tokens"], *, logit_bytes: int = LOGIT_BYTES
) -> Float[np.ndarray, " tokens"]:
    """Loss of each token in nats, for a probe that has changed the hidden states."""
    parts, start = [], 0
    for logits in LogitChunks(hidden, head, logit_bytes):
        maxima, moments = tilted_moments(logits, [1.0], order=0)
        chosen = chosen_logit(logits, maxima, targets[start : start + len(logits)])
        parts.append((torch.log(moments[0, 0]) - chosen).cpu())
        start += len(logits)
    return torch.cat(parts).numpy()


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
    return torch.cat(divergences).numpy(), torch.cat(agreements).numpy()
