"""Affine probe: one gain and one shift per feature of the hidden state, refitted on calibration documents.

    hidden' = a * hidden + s b          s = root mean square of hidden on the fit tokens
    minimise   mean CE(head(hidden'), y) + lambda (sum (a - 1)^2 + sum b^2)

It is convex where the head is linear. The penalty falls from infinity (the identity) to 1e-5, each fit starting at the
one before, and is chosen on the fifth of the documents with the smallest SHA-256(key + "lambda"), ties to the larger;
then all documents are fitted. The search (`descent`) is preconditioned with the Fisher information, estimated from
labels drawn from the model's own prediction: a few steps lead to the minimum that plain L-BFGS needs a hundred for.

Reference: the readout calibrator of Dau, Khuat, Dung, "Beyond Depth Truncation", arXiv:2609.19934.
Deviations: the published fits split tokens instead of documents, stop after 20 iterations, know three penalties, and
use s = 1 (`scale=1.0` here). Features beyond 2,048 are preconditioned by the diagonal alone.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from looplab._types import Float, Int
from looplab.audit.probes.descent import Curvature
from looplab.audit.probes.gradient import Objective, TokenIds, drawn_slopes, mean_loss, slopes
from looplab.audit.probes.penalty import check_documents, choose, edge_findings, root_mean_square
from looplab.audit.probes.stream import LOGIT_BYTES, Head
from looplab.records import Finding, Level

TOKENS_PER_FEATURE = 4
_WIDEST = 2048
_SAMPLE, _DRAWS = 4096, 32


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Affine:
    """A fitted affine probe; call `apply` before the head."""

    gain: Float[np.ndarray, " dim"]
    shift: Float[np.ndarray, " dim"]
    """b, in units of `scale`."""
    scale: float
    strength: float
    """The chosen lambda; infinity is the identity."""
    heldout: tuple[tuple[float, float], ...]
    """(lambda, loss on the held-out documents) in falling order of lambda."""
    converged: bool
    """No gradient entry above 1e-5 at the end, in the last fit."""
    iterations: int
    passes: int
    """Times the hidden states went through the head, over all fits."""
    tokens: int
    convex: bool
    findings: tuple[Finding, ...]

    def apply(self, hidden: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens dim"]:
        """`a * hidden + s b`, float32 (float64 if hidden is)."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        gain, shift = (torch.from_numpy(p).to(dtype) for p in (self.gain, self.scale * self.shift))
        return hidden.to(dtype) * gain + shift


def fit_affine(
    hidden: Float[Tensor, "tokens dim"],
    head: Head,
    targets: Int[Tensor, "tokens *cells"],
    documents: Int[Tensor, " tokens"],
    keys: Sequence[str],
    *,
    scale: float | None = None,
    convex: bool = True,
    logit_bytes: int = LOGIT_BYTES,
) -> Affine:
    """The affine probe with the least held-out loss.

    Args:
        hidden: Spooled hidden states of whole calibration documents; 12,000 tokens are enough (`leading_tokens`).
        head: Differentiable in its input.
        targets: Token ids.
        documents: Document of each token, ids 0..n-1.
        keys: The key of each document.
        scale: s; the RMS of `hidden` if left out.
        convex: The head is linear up to constants (no soft cap); only recorded.

    Raises:
        ValueError: Fewer than 2 documents, or not one key per document.
    """
    check_documents("fit_affine", documents, keys)
    scale = root_mean_square(hidden) if scale is None else scale
    choice = choose(AffineProblem(hidden, head, TokenIds(targets), scale, logit_bytes), documents, keys)
    gain, shift = choice.minimum.point.x.view(2, -1).numpy()
    return Affine(
        gain=gain,
        shift=shift,
        scale=scale,
        strength=choice.strength,
        heldout=choice.heldout,
        converged=choice.minimum.converged,
        iterations=choice.minimum.iterations,
        passes=choice.passes,
        tokens=len(targets),
        convex=convex,
        findings=(*edge_findings("affine", choice.strength), *_underdetermined(*hidden.shape)),
    )


class AffineProblem:
    """Mean loss over streamed hidden states; parameters are all gains, then all shifts."""

    def __init__(self, hidden: Tensor, head: Head, objective: Objective, scale: float, logit_bytes: int):
        self.hidden, self.head, self.objective, self.scale = hidden, head, objective, scale
        self.logit_bytes, self.passes = logit_bytes, 0

    def part(self, chosen: Tensor) -> "AffineProblem":
        """The same on some of the tokens."""
        objective = self.objective.part(chosen)
        return AffineProblem(self.hidden[chosen], self.head, objective, self.scale, self.logit_bytes)

    def identity(self) -> Float[Tensor, " parameters"]:
        """Gains 1, shifts 0."""
        dim = self.hidden.shape[1]
        return torch.cat([torch.ones(dim, dtype=torch.float64), torch.zeros(dim, dtype=torch.float64)])

    def _change(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        gain, shift = x.view(2, -1)
        return lambda hidden: hidden * gain.to(hidden.dtype) + (self.scale * shift).to(hidden.dtype)

    def loss(self, x: Float[Tensor, " parameters"]) -> float:
        """Mean loss without the penalty."""
        self.passes += 1
        return mean_loss(self.hidden, self._change(x), self.head, self.objective, logit_bytes=self.logit_bytes)

    def loss_and_gradient(self, x: Float[Tensor, " parameters"]) -> tuple[float, Tensor]:
        """Mean loss and its gradient."""
        self.passes += 1
        total, gradient = 0.0, torch.zeros(2, self.hidden.shape[1], dtype=torch.float64)
        stream = slopes(self.hidden, self._change(x), self.head, self.objective, logit_bytes=self.logit_bytes)
        for hidden, losses, slope in stream:
            total += float(losses.sum())
            gradient[0] += (slope * hidden).sum(dim=0)
            gradient[1] += self.scale * slope.sum(dim=0)
        return total / len(self.hidden), gradient.flatten() / len(self.hidden)

    def curvature(self, x: Float[Tensor, " parameters"]) -> Curvature:
        """Fisher information, of a sample with 32 tokens per parameter; its diagonal beyond 2,048 features."""
        self.passes += 1
        sample = self.hidden[:: max(1, len(self.hidden) // max(_SAMPLE, _DRAWS * x.numel()))]
        columns = (
            torch.cat([slope * hidden, self.scale * slope], dim=1)
            for hidden, slope in drawn_slopes(sample, self._change(x), self.head, logit_bytes=self.logit_bytes)
        )
        if self.hidden.shape[1] > _WIDEST:
            return Diagonal(sum((c.double().square().sum(dim=0) for c in columns), torch.zeros(1)) / len(sample))
        return Dense(sum(((c.mT @ c).double() for c in columns), torch.zeros(1)) / len(sample))


@dataclasses.dataclass(frozen=True, eq=False)
class Dense:
    """A whole matrix."""

    matrix: Float[Tensor, "parameters parameters"]

    def inverse(self, strength: float) -> Callable[[Tensor], Tensor]:
        """Applies (matrix + 2 strength)^-1."""
        root = torch.linalg.cholesky(self.matrix + 2 * strength * torch.eye(len(self.matrix), dtype=torch.float64))
        return lambda v: torch.cholesky_solve(v[:, None], root)[:, 0]


@dataclasses.dataclass(frozen=True, eq=False)
class Diagonal:
    """A diagonal."""

    entries: Float[Tensor, " parameters"]

    def inverse(self, strength: float) -> Callable[[Tensor], Tensor]:
        """Applies (diagonal + 2 strength)^-1."""
        return lambda v: v / (self.entries + 2 * strength)


def _underdetermined(tokens: int, dim: int) -> list[Finding]:
    if tokens >= TOKENS_PER_FEATURE * dim:
        return []
    return [
        Finding(
            kind="audit.affine_underdetermined",
            level=Level.WARNING,
            message=f"The affine probe has {tokens} tokens for {dim} features.",
            remedy=f"Use at least {TOKENS_PER_FEATURE * dim} calibration tokens.",
            value=float(tokens),
            threshold=float(TOKENS_PER_FEATURE * dim),
        )
    ]
