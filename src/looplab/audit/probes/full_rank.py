"""Full-rank probe: a linear map of the hidden state before the head, fitted on documents that neither calibrate nor
evaluate.

    hidden' = hidden + A hidden + s b          s = root mean square of hidden on the fit tokens
    minimise   mean loss + lambda (sum A^2 + sum b^2)

    objective   loss per token
    nll         CE(head(hidden'), y)
    kl          KL(p_full || softmax(head(hidden')))      p_full: the model's own output at full depth

A is a pure number, as the gains of the affine probe are: 1 + A_jj is the gain of feature j, so at one lambda the affine
probe is the case of a diagonal A. Convex under both objectives where the head is linear. Penalties, their choice and
the search are those of the affine probe; the preconditioner is the Kronecker product of the second moments of (hidden,
s) and of slopes with drawn labels, which is inverted together with the penalty in its eigenvectors.

Reference: the tuned lens of Belrose et al., arXiv:2303.08112 (objective kl); Martens, Grosse, "Optimizing Neural
Networks with Kronecker-factored Approximate Curvature", arXiv:1503.05671 (preconditioner).
Deviations: the lens sits before the final norm and is trained by stochastic gradient; this one sits after `coda` and is
fitted to its minimum.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from looplab._types import Float, Int
from looplab.audit.probes.descent import Curvature
from looplab.audit.probes.gradient import FullDepth, Objective, TokenIds, drawn_slopes, mean_loss, slopes
from looplab.audit.probes.penalty import check_documents, choose, edge_findings, root_mean_square, untouched
from looplab.audit.probes.stream import LOGIT_BYTES, Head
from looplab.records import Finding, Level

OBJECTIVES = ("nll", "kl")
TOKENS_PER_FEATURE = 4
_SAMPLE = 4096


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FullRank:
    """A fitted full-rank probe; call `apply` before the head."""

    matrix: Float[np.ndarray, "dim dim"]
    """A: row = feature written, column = feature read."""
    shift: Float[np.ndarray, " dim"]
    """b, in units of `scale`."""
    scale: float
    objective: str
    strength: float
    """The chosen lambda; infinity is the identity."""
    heldout: tuple[tuple[float, float], ...]
    """(lambda, loss on the held-out documents) in falling order of lambda; empty where nothing was fitted."""
    converged: bool
    """No gradient entry above 1e-5 at the end, in the last fit."""
    iterations: int
    passes: int
    """Times the hidden states went through the head, over all fits."""
    tokens: int
    convex: bool
    findings: tuple[Finding, ...]

    def apply(self, hidden: Float[Tensor, "tokens dim"]) -> Float[Tensor, "tokens dim"]:
        """`hidden + A hidden + s b`, float32 (float64 if hidden is)."""
        hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        x = torch.from_numpy(np.concatenate([self.matrix, self.shift[:, None]], axis=1))
        return _changed(hidden, x, self.scale)


def fit_full_rank(
    hidden: Float[Tensor, "tokens dim"],
    head: Head,
    targets: Int[Tensor, "tokens *cells"],
    documents: Int[Tensor, " tokens"],
    keys: Sequence[str],
    *,
    objective: str = "nll",
    full_hidden: Float[Tensor, "tokens dim"] | None = None,
    scale: float | None = None,
    convex: bool = True,
    logit_bytes: int = LOGIT_BYTES,
) -> FullRank:
    """The full-rank probe with the least held-out loss.

    With fewer than 4 tokens per feature nothing is fitted: the probe is the identity, with a finding.

    Args:
        hidden: Spooled hidden states of whole training documents.
        head: Differentiable in its input.
        targets: Token ids.
        documents: Document of each token, ids 0..n-1.
        keys: The key of each document.
        objective: "nll", or "kl" to the output of `full_hidden`.
        full_hidden: Hidden states of the full plan at the same tokens; required by kl, which keeps the identity where
            they are `hidden` itself.
        scale: s; the RMS of `hidden` if left out.
        convex: The head is linear up to constants (no soft cap); only recorded.

    Raises:
        ValueError: An unknown objective, kl without `full_hidden`, fewer than 2 documents, or not one key per document.
    """
    check_documents("fit_full_rank", documents, keys)
    asked = _objective(objective, targets, full_hidden)
    scale = root_mean_square(hidden) if scale is None else scale
    problem = FullRankProblem(hidden, head, asked, scale, logit_bytes)
    tokens, dim = hidden.shape
    if tokens < TOKENS_PER_FEATURE * dim:
        choice, findings = untouched(problem.identity()), [_underdetermined(tokens, dim)]
    else:
        choice = choose(problem, documents, keys)
        findings = edge_findings("full-rank", choice.strength)
    table = choice.minimum.point.x.view(dim, dim + 1).numpy()
    return FullRank(
        matrix=table[:, :-1],
        shift=table[:, -1],
        scale=scale,
        objective=objective,
        strength=choice.strength,
        heldout=choice.heldout,
        converged=choice.minimum.converged,
        iterations=choice.minimum.iterations,
        passes=choice.passes,
        tokens=tokens,
        convex=convex,
        findings=tuple(findings),
    )


def _objective(name: str, targets: Tensor, full_hidden: Tensor | None) -> Objective:
    if name not in OBJECTIVES:
        raise ValueError(
            f"fit_full_rank: objective must be nll or kl. Got {name!r}. nll fits the next token, kl the full depth."
        )
    if name == "nll":
        return TokenIds(targets)
    if full_hidden is None or len(full_hidden) != len(targets):
        got = "none" if full_hidden is None else f"{len(full_hidden)} rows"
        raise ValueError(
            f"fit_full_rank: full_hidden must be the full plan's hidden states of the same {len(targets)} tokens for "
            f"objective kl. Got {got}. Pass them, or use objective nll."
        )
    return FullDepth(full_hidden)


def _changed(hidden: Tensor, x: Tensor, scale: float) -> Tensor:
    """`hidden + A hidden + s b` with x = [A b]."""
    x = x.to(hidden.dtype)
    return torch.addmm(hidden + scale * x[:, -1], hidden, x[:, :-1].mT)


class FullRankProblem:
    """Mean loss over streamed hidden states; parameters are the rows of [A b]."""

    def __init__(self, hidden: Tensor, head: Head, objective: Objective, scale: float, logit_bytes: int):
        self.hidden, self.head, self.objective, self.scale = hidden, head, objective, scale
        self.logit_bytes, self.passes = logit_bytes, 0

    def part(self, chosen: Tensor) -> "FullRankProblem":
        """The same on some of the tokens."""
        objective = self.objective.part(chosen)
        return FullRankProblem(self.hidden[chosen], self.head, objective, self.scale, self.logit_bytes)

    def identity(self) -> Float[Tensor, " parameters"]:
        """Zeros."""
        dim = self.hidden.shape[1]
        return torch.zeros(dim * (dim + 1), dtype=torch.float64)

    def _change(self, x: Tensor) -> Callable[[Tensor], Tensor]:
        table = x.view(-1, self.hidden.shape[1] + 1)
        return lambda hidden: _changed(hidden, table, self.scale)

    def loss(self, x: Float[Tensor, " parameters"]) -> float:
        """Mean loss without the penalty."""
        self.passes += 1
        return mean_loss(self.hidden, self._change(x), self.head, self.objective, logit_bytes=self.logit_bytes)

    def loss_and_gradient(self, x: Float[Tensor, " parameters"]) -> tuple[float, Tensor]:
        """Mean loss and its gradient."""
        self.passes += 1
        total, gradient = 0.0, torch.zeros_like(x).view(-1, self.hidden.shape[1] + 1)
        stream = slopes(self.hidden, self._change(x), self.head, self.objective, logit_bytes=self.logit_bytes)
        for hidden, losses, slope in stream:
            total += float(losses.sum())
            gradient[:, :-1] += slope.mT @ hidden
            gradient[:, -1] += self.scale * slope.sum(dim=0)
        return total / len(self.hidden), gradient.flatten() / len(self.hidden)

    def curvature(self, x: Float[Tensor, " parameters"]) -> Curvature:
        """Kronecker factors of the Fisher information, of a sample of about 4,096 tokens or 8 per feature."""
        self.passes += 1
        dim = self.hidden.shape[1]
        sample = self.hidden[:: max(1, len(self.hidden) // max(_SAMPLE, 8 * dim))]
        read = torch.zeros(dim + 1, dim + 1, dtype=torch.float64)
        written = torch.zeros(dim, dim, dtype=torch.float64)
        for hidden, slope in drawn_slopes(sample, self._change(x), self.head, logit_bytes=self.logit_bytes):
            row = torch.cat([hidden, hidden.new_full((len(hidden), 1), self.scale)], dim=1)
            read += row.mT @ row
            written += slope.mT @ slope
        return Kronecker(*torch.linalg.eigh(written / len(sample)), *torch.linalg.eigh(read / len(sample)))


@dataclasses.dataclass(frozen=True, eq=False)
class Kronecker:
    """A Kronecker product in its eigenvectors: `written` of the features that A writes, `read` of those it reads."""

    written: Float[Tensor, " rows"]
    written_vectors: Float[Tensor, "rows rows"]
    read: Float[Tensor, " columns"]
    read_vectors: Float[Tensor, "columns columns"]

    def inverse(self, strength: float) -> Callable[[Tensor], Tensor]:
        """Applies (product + 2 strength)^-1."""
        eigenvalues = self.written.clamp_min(0.0)[:, None] * self.read.clamp_min(0.0) + 2 * strength
        p, q = self.written_vectors, self.read_vectors
        return lambda v: (p @ ((p.mT @ v.view_as(eigenvalues) @ q) / eigenvalues) @ q.mT).flatten()


def _underdetermined(tokens: int, dim: int) -> Finding:
    return Finding(
        kind="audit.full_rank_underdetermined",
        level=Level.WARNING,
        message=f"The full-rank probe has {tokens} tokens for {dim} features; it was left at the identity.",
        remedy=f"Use at least {TOKENS_PER_FEATURE * dim} training tokens.",
        value=float(tokens),
        threshold=float(TOKENS_PER_FEATURE * dim),
    )
