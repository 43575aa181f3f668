"""Rivals of the probe fits: torch.optim.LBFGS with strong-Wolfe line search, as published fits use it.

Temperature: over log T from 0, step 0.5, at most 100 iterations, on logits that were stored once. Affine: one penalty
after another, each from the solution before, until no gradient entry exceeds 1e-5. `rows`: tokens per piece of a
closure; all of them at once is what the published fits do, pieces near the size of a cache are the strongest form.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


def temperature(logits: Tensor, targets: Tensor, rows: int) -> float:
    """The fitted beta = 1 / T."""
    log_t = torch.zeros(1, requires_grad=True)
    search = torch.optim.LBFGS([log_t], lr=0.5, max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        search.zero_grad()
        total = torch.zeros(())
        for part, ids in zip(logits.split(rows), targets.split(rows), strict=True):
            loss = cross_entropy(part / log_t.exp(), ids, reduction="sum") / len(targets)
            loss.backward()
            total += loss.detach()
        return total

    search.step(closure)
    return float(torch.exp(-log_t.detach()))


def affine(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    targets: Tensor,
    scale: float,
    strengths: Sequence[float],
    rows: int,
) -> list[Tensor]:
    """Parameters (gains, then shifts) at each strength."""
    dim = hidden.shape[1]
    origin = torch.cat([torch.ones(dim), torch.zeros(dim)])
    x = origin.clone().requires_grad_()
    found = []
    for strength in strengths:
        search = torch.optim.LBFGS(
            [x], max_iter=200, max_eval=500, history_size=20, tolerance_grad=1e-5, tolerance_change=0.0,
            line_search_fn="strong_wolfe",
        )  # fmt: skip

        def closure(search: torch.optim.LBFGS = search, strength: float = strength) -> Tensor:
            search.zero_grad()
            penalty = strength * (x - origin).square().sum()
            penalty.backward()
            total = penalty.detach()
            for part, ids in zip(hidden.split(rows), targets.split(rows), strict=True):
                logits = head(part * x[:dim] + scale * x[dim:])
                loss = cross_entropy(logits, ids, reduction="sum") / len(targets)
                loss.backward()
                total += loss.detach()
            return total

        search.step(closure)
        found.append(x.detach().clone())
    return found
