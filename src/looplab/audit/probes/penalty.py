"""Choice of a probe's penalty: fitted from strong to weak on most documents, chosen on the others, refitted on all.

    minimise   mean loss + lambda |x - identity|^2        lambda = infinity (the identity), 1, 1e-1 .. 1e-5

The fifth of the documents with the smallest SHA-256(key + "lambda") chooses; ties go to the larger lambda. Each fit
starts at the one before, with its curvature pairs.
"""

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from looplab._types import Bool, Float, Int
from looplab.audit.probes.descent import Curvature, Descent, Minimum, Point
from looplab.records import Finding, Level

STRENGTHS = (math.inf, 1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
_FRESH = 3
"""Iterations after which the curvature of the start no longer serves."""


@runtime_checkable
class Problem(Protocol):
    """The loss of one probe on some tokens."""

    passes: int
    """Times the hidden states went through the head."""

    def part(self, chosen: Bool[Tensor, " tokens"]) -> "Problem":
        """The same on some of the tokens."""
        ...

    def identity(self) -> Float[Tensor, " parameters"]:
        """Parameters that change nothing."""
        ...

    def loss(self, x: Float[Tensor, " parameters"]) -> float:
        """Mean loss."""
        ...

    def loss_and_gradient(self, x: Float[Tensor, " parameters"]) -> tuple[float, Tensor]:
        """Mean loss and its gradient, float64."""
        ...

    def curvature(self, x: Float[Tensor, " parameters"]) -> Curvature:
        """An estimate of the Hessian of the mean loss."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """The chosen lambda, and the fit of all documents with it."""

    strength: float
    heldout: tuple[tuple[float, float], ...]
    """(lambda, loss on the held-out documents) in falling order of lambda."""
    minimum: Minimum
    passes: int


def choose(problem: Problem, documents: Int[Tensor, " tokens"], keys: Sequence[str]) -> Choice:
    """The probe with the least held-out loss.

    Args:
        documents: Document of each token, ids 0..n-1.
        keys: The key of each document.
    """
    choosing = torch.isin(documents, torch.tensor(heldout_documents(keys)))
    fitting, held = problem.part(~choosing), problem.part(choosing)
    search = Descent(fitting.loss_and_gradient, fitting.identity())
    path = [(lam, held.loss(point.x), point.x, curvature) for lam, point, curvature in falling(fitting, search)]
    strength, _, x, curvature = min(path, key=lambda entry: entry[1])  # the first, so the largest, of equal losses
    search = search.on(problem.loss_and_gradient)
    point = search.at(x)
    if strength == math.inf:
        minimum = Minimum(point=point, converged=True, iterations=0)
    else:
        minimum = search.solve(strength, point, curvature)
    return Choice(
        strength=strength,
        heldout=tuple((lam, loss) for lam, loss, _, _ in path),
        minimum=minimum,
        passes=problem.passes + fitting.passes + held.passes,
    )


def falling(problem: Problem, search: Descent) -> Iterator[tuple[float, Point, Curvature]]:
    """The fit at every lambda from the identity on, with the curvature estimate that came last."""
    point = search.at(problem.identity())
    curvature = problem.curvature(point.x)
    yield math.inf, point, curvature
    for strength in STRENGTHS[1:]:
        minimum = search.solve(strength, point, curvature)
        point = minimum.point
        if minimum.iterations > _FRESH:
            curvature = problem.curvature(point.x)
        yield strength, point, curvature


def untouched(identity: Float[Tensor, " parameters"]) -> Choice:
    """The identity, where there is too little to fit anything."""
    nowhere = Point(identity, math.nan, torch.zeros_like(identity))
    minimum = Minimum(point=nowhere, converged=True, iterations=0)
    return Choice(strength=math.inf, heldout=(), minimum=minimum, passes=0)


def heldout_documents(keys: Sequence[str]) -> list[int]:
    """The fifth of the documents (at least one) that chooses lambda, by hash of their keys."""
    order = sorted(range(len(keys)), key=lambda d: hashlib.sha256(f"{keys[d]}lambda".encode()).digest())
    return sorted(order[: max(1, round(len(keys) / 5))])


def check_documents(name: str, documents: Int[Tensor, " tokens"], keys: Sequence[str]) -> None:
    """Refuses fewer than 2 documents, or not one key per document."""
    count = int(documents.max()) + 1
    if count < 2 or len(keys) != count:
        raise ValueError(
            f"{name}: keys must name at least 2 documents, one key each. Got {len(keys)} keys for {count} "
            "documents. Use more calibration text."
        )


def root_mean_square(hidden: Float[Tensor, "tokens dim"]) -> float:
    """s, the unit of shifts."""
    return float(hidden.double().square().mean().sqrt())


def edge_findings(probe: str, strength: float) -> list[Finding]:
    """`lambda_at_edge` where the smallest lambda was chosen."""
    if strength != STRENGTHS[-1]:
        return []
    return [
        Finding(
            kind="audit.lambda_at_edge",
            level=Level.WARNING,
            message=f"The {probe} probe chose the smallest penalty, {strength:g}; a smaller one might do better.",
            remedy=f"Read the {probe} share as a lower bound.",
            value=strength,
            threshold=STRENGTHS[-1],
        )
    ]
