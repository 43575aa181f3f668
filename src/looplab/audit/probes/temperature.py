"""Temperature of a readout, fitted exactly over streamed logits.

    f(beta) = mean_i [ logsumexp(beta z_i) - beta z_{i, y_i} ],    beta = 1 / T >= 0
    f' = mean(E_p z - z_y),  f'' = mean Var_p z,  f''' = mean third central moment,   p = softmax(beta z)

f is strictly convex in beta unless every token's logits are all equal; in T or log T it need not be convex, so the fit
is in beta, inside a bracket that can only shrink. A step goes to the root of the Taylor polynomial of f' up to the
fourth cumulant, which leaves the fourth power of a small error where Newton's method leaves the second. Streamed hidden
states are first fitted on an eighth of their tokens, so that two passes over all of them usually suffice.

    status       when                               beta
    converged    a minimum inside (0, 1000)         it
    flat         all logits of every token equal    1
    uniform      f'(0) >= 0                         0       (T infinite, loss ln V)
    separable    every target has the largest logit 1000
    sharp        f' < 0 still at 1000               1000

Reference: Guo, Pleiss, Sun, Weinberger, "On Calibration of Modern Neural Networks", arXiv:1706.04599.
Deviations: they minimise over T with L-BFGS; targets may also be rows of probabilities (soft labels).
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from looplab._types import Float, Int
from looplab.audit.bootstrap import DocumentSums, ExactRefit
from looplab.audit.probes.stream import VOCAB_BLOCK, LogitChunks, rows_at_once, tilted_moments

MAX_BETA = 1000.0
MAX_PASSES = 100
NUMBERS = 20
"""Numbers per token and beta that are alive at once: five moments, five derivatives, and what lies between."""
_BRACKET = 1e-12
_OPEN = np.empty((5, 0))
_THIN = 8
_SAMPLE = 500
_SAMPLE_TOLERANCE = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Temperature:
    """A fitted temperature. `loss` is the mean nats per token at the fit, on the tokens it was fitted on."""

    beta: float
    status: str
    """converged, flat, uniform, separable or sharp."""
    passes: int
    """Times the logits of all tokens were read."""
    loss: float
    sums: DocumentSums
    """Per-document loss and derivatives at `beta`."""

    @property
    def temperature(self) -> float | None:
        """1 / beta; None where beta is 0."""
        return None if self.beta == 0 else 1 / self.beta

    @property
    def boundary(self) -> bool:
        """No interior minimum was found: beta stays fixed when documents are resampled."""
        return self.status != "converged"


def fit_temperature(
    logit_chunks: Iterable[Tensor],
    targets: Int[Tensor, " tokens"] | Float[Tensor, "tokens vocab"],
    documents: Int[Tensor, " tokens"] | None = None,
    *,
    vocab_block: int = VOCAB_BLOCK,
) -> Temperature:
    """The temperature with the least mean loss.

    Args:
        logit_chunks: Logits Float "chunk vocab" in order, read once per pass: a list or `LogitChunks`, no generator.
        targets: Token ids, or one row of probabilities per token.
        documents: Document of each token, ids 0..n-1; all tokens are one document if left out.
        vocab_block: Columns worked on at once.

    Raises:
        ValueError: A one-shot iterator, targets that do not fit the logits, or logits that are not finite.
    """
    documents = torch.zeros(len(targets), dtype=torch.long) if documents is None else documents
    stream = _Stream(logit_chunks, targets, documents, vocab_block)
    start = _sampled_start(logit_chunks, targets, vocab_block) if isinstance(logit_chunks, LogitChunks) else 1.0
    (search,) = _solve(stream, np.ones((1, stream.num_documents)), np.array([start]))
    loss, first, second, third, _ = search.sums
    tokens = stream.tokens
    return Temperature(
        beta=search.beta,
        status=search.status,
        passes=stream.passes,
        loss=float(loss.sum() / tokens.sum()),
        sums=DocumentSums(loss=loss, first=first, second=second, third=third, tokens=tokens),
    )


def _sampled_start(chunks: LogitChunks, targets: Tensor, vocab_block: int) -> float:
    """The fit on every eighth token, to about its own standard error; 1 where that is at a boundary."""
    thin = slice(None, None, _THIN)
    laws = len(targets) // len(chunks.hidden)  # of a token: its cells
    sample = targets.unflatten(0, (-1, laws))[thin].flatten(0, 1)
    if len(sample) < _SAMPLE:
        return 1.0
    stream = _Stream(
        dataclasses.replace(chunks, hidden=chunks.hidden[thin]),
        sample,
        torch.zeros(len(sample), dtype=torch.long),
        vocab_block,
        least_tolerance=_SAMPLE_TOLERANCE,
    )
    (search,) = _solve(stream, np.ones((1, 1)), np.ones(1))
    return search.beta if search.status == "converged" else 1.0


def exact_refit(
    logit_chunks: Iterable[Tensor],
    targets: Int[Tensor, " tokens"] | Float[Tensor, "tokens vocab"],
    documents: Int[Tensor, " tokens"],
) -> ExactRefit:
    """Refits for `bootstrap.refit_replicates`: all replicates asked for advance together, one pass for all of them."""

    def refit(
        weights: Float[np.ndarray, "refits documents"], start: Float[np.ndarray, " refits"]
    ) -> tuple[Float[np.ndarray, " refits"], Float[np.ndarray, "documents refits"]]:
        stream = _Stream(logit_chunks, targets, documents, VOCAB_BLOCK)
        searches = _solve(stream, weights, start)
        losses = np.stack([search.sums[0] for search in searches], axis=1)
        return np.array([search.beta for search in searches]), losses

    return refit


def _solve(
    stream: "_Stream", weights: Float[np.ndarray, "fits documents"], start: Float[np.ndarray, " fits"]
) -> list["_Search"]:
    """One search per row of weights; each pass over the logits serves all that are still under way."""
    searches = [_Search(float(beta)) for beta in start]
    *at_start, at_zero = stream.sums([*(search.beta for search in searches), 0.0])
    means = weights / (weights @ stream.tokens)[:, None]
    for i, search in enumerate(searches):
        known = {search.beta: at_start[i], 0.0: at_zero}
        search.check_boundaries(at_zero @ means[i], weights[i] @ stream.gap)
        if search.beta in known:
            search.advance(known[search.beta], means[i], stream.tolerance)
    while running := [i for i, search in enumerate(searches) if search.sums is _OPEN]:
        if stream.passes == MAX_PASSES:
            raise RuntimeError(f"fit_temperature: no end after {MAX_PASSES} passes. This is a bug; report the logits.")
        for i, sums in zip(running, stream.sums([searches[i].beta for i in running]), strict=True):
            searches[i].advance(sums, means[i], stream.tolerance)
    return searches


class _Search:
    """Newton's method for f' = 0 inside a bracket, for one set of document weights."""

    def __init__(self, beta: float):
        self.beta = beta
        self.status = ""
        self.sums: np.ndarray = _OPEN  # Float "5 documents" at beta, once the search has ended
        self._low, self._high, self._size = 0.0, math.inf, math.inf

    def check_boundaries(self, at_zero: Float[np.ndarray, "5"], gap: float) -> None:
        """Ends the search, but for the sums at its beta, where there is no minimum inside."""
        _, first, second, _, _ = at_zero
        if second == 0:
            self.beta, self.status = 1.0, "flat"
        elif first >= 0:
            self.beta, self.status = 0.0, "uniform"
        elif gap == 0:
            self.beta, self.status = MAX_BETA, "separable"

    def advance(
        self, sums: Float[np.ndarray, "5 documents"], mean: Float[np.ndarray, " documents"], tol: float
    ) -> None:
        """Takes the sums at `beta`; either keeps them and ends, or moves `beta`. `sums @ mean` are means per token."""
        if not self.status:
            _, first, second, third, fourth = (float(x) for x in sums @ mean)
            self._narrow(first, second, third, fourth, tol)
        if self.status:
            self.sums = sums

    def _narrow(self, first: float, second: float, third: float, fourth: float, tol: float) -> None:
        size = abs(self.beta * first)
        halved, self._size = size <= self._size / 2, size
        if first < 0:
            self._low = self.beta
        else:
            self._high = self.beta
        if first < 0 and self.beta >= MAX_BETA:
            self.status = "sharp"
        elif size <= tol or self._high - self._low <= _BRACKET * self._high < math.inf:
            self.status = "converged"
        else:
            step = _taylor_root(first, second, third, fourth, limit=self.beta / 4) if second > 0 else math.inf
            self.beta = self._next(self.beta + step, halved)

    def _next(self, candidate: float, halved: bool) -> float:
        if self._high == math.inf:
            return min(candidate, 4 * self.beta, MAX_BETA)
        if halved and self._low < candidate < self._high:
            return candidate
        return math.sqrt(self._low * self._high) if self._low > 0 else self._high / 4


def _taylor_root(first: float, second: float, third: float, fourth: float, *, limit: float) -> float:
    """Root of first + second s + third s^2 / 2 + fourth s^3 / 6 near 0; Newton's step if it is not within `limit`."""
    newton = step = -first / second
    for _ in range(20):
        slope = second + step * (third + step * fourth / 2)
        if abs(step) > limit or slope < second / 4:
            return newton
        step -= (first + step * (second + step * (third / 2 + step * fourth / 6))) / slope
    return step


class _Stream:
    """Per-document sums of f and its derivatives, one pass over the logits at a time."""

    def __init__(
        self,
        chunks: Iterable[Tensor],
        targets: Tensor,
        documents: Tensor,
        vocab_block: int,
        *,
        least_tolerance: float = 0.0,
    ):
        if isinstance(chunks, Iterator):
            raise ValueError(
                f"fit_temperature: logit_chunks must be readable more than once. Got {type(chunks).__name__}. "
                "Pass a list of tensors or LogitChunks."
            )
        self.chunks, self.targets, self.documents, self.vocab_block = chunks, targets, documents, vocab_block
        self.num_documents = int(documents.max()) + 1
        self.tokens = torch.bincount(documents, minlength=self.num_documents).double().numpy()
        self.gap = np.zeros(self.num_documents)
        self.passes = 0
        self.tolerance, self._least_tolerance = 0.0, least_tolerance

    @torch.no_grad()
    def sums(self, betas: Sequence[float]) -> Float[np.ndarray, "betas 5 documents"]:
        """Sums at every beta. Also measures `gap`, per document the sum of max z - z_y, which no beta changes."""
        total = torch.zeros(len(betas), 5, self.num_documents, dtype=torch.float64)
        gap = torch.zeros(self.num_documents, dtype=torch.float64)
        start = 0
        for logits in self.chunks:
            if self.passes == 0:
                _check(logits, self.targets[start : start + len(logits)])
            for piece in logits.split(rows_at_once(len(betas), NUMBERS)):
                part = slice(start, start + len(piece))
                start = part.stop
                maxima, moments = tilted_moments(piece, betas, order=4, vocab_block=self.vocab_block)
                chosen = chosen_logit(piece, maxima, self.targets[part])
                total.index_add_(2, self.documents[part], token_derivatives(moments, chosen, betas).cpu())
                gap.index_add_(0, self.documents[part], -chosen.cpu())
            self.tolerance = max(self._least_tolerance, 1e-10 if logits.dtype == torch.float64 else 1e-6)
        if not torch.isfinite(total).all():
            raise ValueError(
                "fit_temperature: logits must be finite. Got a loss that is not. Cut padding columns, or use float32."
            )
        self.passes += 1
        self.gap = gap.numpy()
        return total.numpy()


def _check(logits: Tensor, targets: Tensor) -> None:
    tokens, vocab = logits.shape
    if len(targets) != tokens:
        raise ValueError(
            f"fit_temperature: targets must have one entry per row of logits. Got {len(targets)} for {tokens} rows. "
            "Pass the targets of exactly these logits."
        )
    if targets.ndim == 2 and (targets.shape[1] != vocab or (targets < 0).any()):
        raise ValueError(
            f"fit_temperature: rows of target probabilities must be {vocab} numbers from 0 up. Got width "
            f"{targets.shape[1]}, minimum {float(targets.min())}. Normalise them over the vocabulary."
        )
    if targets.ndim == 1 and not 0 <= int(targets.min()) <= int(targets.max()) < vocab:
        raise ValueError(
            f"fit_temperature: targets must be token ids from 0 to {vocab - 1}. Got {int(targets.min())} to "
            f"{int(targets.max())}. Drop unscored tokens first."
        )


def chosen_logit(
    logits: Float[Tensor, "tokens vocab"],
    maxima: Float[Tensor, " tokens"],
    targets: Int[Tensor, " tokens"] | Float[Tensor, "tokens vocab"],
) -> Float[Tensor, " tokens"]:
    """The target's logit minus the row's maximum, float64; its expectation where targets are probability rows."""
    targets = targets.to(logits.device)
    if targets.ndim == 1:
        return (logits.gather(1, targets[:, None].long())[:, 0] - maxima).double()
    below = logits - maxima[:, None]
    return (below * targets).sum(dim=1, dtype=torch.float64) / targets.sum(dim=1, dtype=torch.float64)


def token_derivatives(
    moments: Float[Tensor, "betas orders tokens"], chosen: Float[Tensor, " tokens"], betas: Sequence[float]
) -> Float[Tensor, "betas orders tokens"]:
    """Loss and its derivatives, per token and beta, from moments up to the third or fourth about the row's maximum."""
    beta = torch.tensor(betas, dtype=torch.float64, device=moments.device)[:, None]
    mean, square, cube, *more = (moments[:, r] / moments[:, 0] for r in range(1, moments.shape[1]))
    loss = torch.log(moments[:, 0]) - beta * chosen
    variance = (square - mean * mean).clamp_min(0.0)
    third = cube - 3 * square * mean + 2 * mean**3
    fourth = [m - 4 * cube * mean + 6 * square * mean**2 - 3 * mean**4 - 3 * variance**2 for m in more]
    return torch.stack([loss, mean - chosen, variance, third, *fourth], dim=1)
