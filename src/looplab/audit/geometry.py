"""How the vectors of one schedule lie against those of the full plan, on the same scored tokens.

    norm ratio      mean |x| / mean |r|
    cosine          mean cos(x_i, r_i)
    linear CKA      |Xc^T Rc|_F^2 / (|Xc^T Xc|_F |Rc^T Rc|_F)
    effective rank  tr(C)^2 / |C|_F^2,  C the covariance of X
    anisotropy      mean cos(x_i, x_j) over all pairs i != j  =  (|sum u|^2 - n) / (n (n - 1)),  u = x / |x|
    Frechet         [|mx - mr|^2 + tr(Cx + Cr - 2 (Cr^1/2 Cx Cr^1/2)^1/2)] / tr(Cr)
                    in the q = min(64, dim, n - 1) leading principal directions of R

X holds one schedule, R the full plan, both "tokens dim"; Xc and Rc are centred. All of it in float64.
In the principal directions Cr is diagonal, and the trace of the square root of Cr^1/2 Cx Cr^1/2 = B^T B is the sum of
the singular values of B = Xc Cr^1/2 / sqrt(n - 1): no eigenvalue is squared, so none has to be clamped before its root.

Reference: linear CKA, Kornblith et al., arXiv:1905.00414; Frechet distance of Gaussians, Dowson and Landau 1982;
    the use of both, arXiv:2609.19934.
Deviations: anisotropy over all pairs instead of sampled ones. If R spans fewer than q < dim directions, the ones beyond
    its span are left out: which of them would come next is not defined.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from looplab._types import Bool, Float
from looplab.audit.documents import Split
from looplab.audit.result import Geometry
from looplab.records import Finding, Level
from looplab.recurrence.spec import StateField
from looplab.recurrence.state import component

LIMIT = 4096
"""Tokens that geometry is measured on."""
DIRECTIONS = 64
ZERO = 1e-12
"""A vector of smaller norm has no direction."""
CLAMP = 1e-6
"""A distance this far below 0 is rounding."""


def chosen_tokens(split: Split, limit: int = LIMIT) -> Bool[Tensor, " tokens"]:
    """Which rows of the split's token table are measured: those with the smallest hash of (document, position).

    The choice depends on no order, and a smaller `limit` takes a subset.
    """
    if split.tokens <= limit:
        return torch.ones(split.tokens, dtype=torch.bool)
    digests = [
        hashlib.sha256(f"{row.name}:{position}".encode()).digest() for row in split.rows for position in row.positions
    ]
    chosen = torch.zeros(split.tokens, dtype=torch.bool)
    chosen[sorted(range(split.tokens), key=digests.__getitem__)[:limit]] = True
    return chosen


def read_state(state: Any, fields: Mapping[str, StateField]) -> Float[Tensor, "batch seq dim"]:
    """The state components that `coda` reads, side by side, at the positions of the tokens.

    Values per row instead of per token are left out.

    `fields`: the state of the LoopSpec.
    """
    read = {name: field.prefix for name, field in fields.items() if field.read_by_coda and field.per == "token"}
    return torch.cat([component(state, name)[:, prefix:].flatten(2) for name, prefix in read.items()], dim=-1)


class Reference:
    """The vectors of the full plan, with everything that comparisons with them share.

    With fewer tokens than about twice the dimension, the products "tokens tokens" are the smaller ones: those of the
    reference are then kept, and each comparison makes one product instead of two.
    """

    def __init__(self, vectors: Float[Tensor, "tokens dim"]):
        """`vectors` in any float dtype, on any device: comparisons run there, in float64.

        Raises:
            ValueError: No tokens.
        """
        if len(vectors) == 0:
            raise ValueError("Reference: vectors must hold at least one token. Got 0. Score some tokens.")
        tokens, dim = vectors.shape
        self.vectors = vectors.double()
        self.norms = self.vectors.norm(dim=1)
        self.centred = _centred(self.vectors)
        self._gram = self.centred @ self.centred.T if tokens < 2 * dim else None
        _, self.product = self.products(self.centred)
        self.effective_rank = _effective_rank(self.centred, self.product)
        _, spread, directions = torch.linalg.svd(self.centred, full_matrices=False)
        q = min(DIRECTIONS, dim, tokens - 1)
        if q < dim:
            q = min(q, int((spread > ZERO * spread[0]).sum()))
        self.directions = directions[:q].T
        self.spread = spread[:q] / max(1, tokens - 1) ** 0.5
        self.mean = self.vectors.mean(dim=0) @ self.directions

    def products(self, centred: Float[Tensor, "tokens dim"]) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """|Xc^T Rc|_F^2 and |Xc^T Xc|_F."""
        if self._gram is None:
            return (centred.T @ self.centred).square().sum(), (centred.T @ centred).norm()
        gram = centred @ centred.T
        return (gram * self._gram).sum(), gram.norm()


def geometry(vectors: Float[Tensor, "tokens dim"], reference: Reference, *, site: str) -> Geometry:
    """Compares the vectors of one schedule with the full plan's on the same tokens.

    Args:
        vectors: Finite, in any float dtype.
        site: "hidden" or "state", as it is stored.
    Raises:
        ValueError: Another number of tokens or another width than the reference.
    """
    if vectors.shape != reference.vectors.shape:
        raise ValueError(
            f"geometry: vectors must be of the tokens of the reference, {tuple(reference.vectors.shape)}. "
            f"Got {tuple(vectors.shape)}. Choose the same tokens for all schedules."
        )
    x = vectors.double()
    norms, centred = x.norm(dim=1), _centred(x)
    kept = (norms >= ZERO) & (reference.norms >= ZERO)
    cosines = (x * reference.vectors)[kept].sum(dim=1) / (norms * reference.norms)[kept]
    cross, product = reference.products(centred)
    rank = _effective_rank(centred, product)
    return Geometry(
        site=site,
        tokens=len(x),
        zero_rows=int((~kept).sum()),
        norm=float(norms.mean()),
        norm_ratio=_ratio(norms.mean(), reference.norms.mean()),
        cosine=_ratio(cosines.sum(), kept.sum()),
        cka=_ratio(cross, product * reference.product),
        effective_rank=rank,
        rank_ratio=None if rank is None or reference.effective_rank is None else rank / reference.effective_rank,
        anisotropy=_anisotropy(x, norms),
        frechet=_frechet(x, reference),
    )


def _centred(x: Tensor) -> Tensor:
    """Without the mean. Off the first row before, so that a constant feature becomes exactly 0."""
    moved = x - x[0]
    return moved - moved.mean(dim=0)


def _ratio(numerator: Tensor, denominator: Tensor) -> float | None:
    return float(numerator / denominator) if denominator > 0 else None


def _effective_rank(centred: Tensor, product: Tensor) -> float | None:
    """tr(C)^2 / |C|_F^2 from the centred vectors and |Xc^T Xc|_F: n - 1 cancels."""
    return _ratio(centred.square().sum().square(), product.square())


def _anisotropy(x: Tensor, norms: Tensor) -> float | None:
    kept = norms >= ZERO
    n = int(kept.sum())
    if n < 2:
        return None
    total = (x[kept] / norms[kept, None]).sum(dim=0)
    return float((total.square().sum() - n) / (n * (n - 1)))


def _frechet(x: Tensor, reference: Reference) -> float | None:
    whole = reference.spread.square().sum()
    if not whole > 0:
        return None
    projected = x @ reference.directions
    mean = projected.mean(dim=0)
    centred = (projected - mean) / (len(x) - 1) ** 0.5
    overlap = torch.linalg.svdvals(centred * reference.spread).sum()
    apart = (mean - reference.mean).square().sum() + centred.square().sum() + whole - 2 * overlap
    distance = float(apart / whole)
    assert distance > -CLAMP * max(1.0, float(centred.square().sum() / whole)), distance
    return max(0.0, distance)


def bias_findings(tokens: int, dim: int, *, domain: str, site: str) -> tuple[Finding, ...]:
    """`audit.cka_biased` where CKA comes from fewer than 4 tokens per dimension, else nothing."""
    if tokens >= 4 * dim:
        return ()
    return (
        Finding(
            kind="audit.cka_biased",
            level=Level.INFO,
            message=f"CKA of the {site} on {domain} comes from {tokens} tokens in {dim} dimensions and is too high.",
            remedy=f"Score at least {4 * dim} tokens." if 4 * dim <= LIMIT else "Compare schedules, not models.",
            value=float(tokens),
            threshold=4.0 * dim,
            reference="arXiv:1905.00414",
            where={"domain": domain, "site": site},
        ),
    )
