"""Affine probe: one gain and one shift per feature of the hidden state, refitted on calibration documents.

    hidden' = a * hidden + s b          s = root mean square of hidden on the fit tokens
    minimise   mean CE(head(hidden'), y) + lambda (sum (a - 1)^2 + sum b^2)

It is convex where the head is linear. The penalty falls from infinity (the identity) to 1e-5, each fit starting at the
one before, and is chosen on the fifth of the documents with the smallest SHA-256(key + "lambda"), ties to the larger;
then all documents are fitted. L-BFGS runs in coordinates in which the Fisher information at the start, estimated from
labels drawn from the model's own prediction, plus the penalty's curvature, is the identity: a few steps lead to the
minimum that plain L-BFGS needs a hundred for.

Reference: the readout calibrator of Dau, Khuat, Dung, "Beyond Depth Truncation", arXiv:2609.19934.
Deviations: the published fits split tokens instead of documents, stop after 20 iterations, know three penalties, and
use s = 1 (`scale=1.0` here). Features beyond 2,048 are fitted without the change of coordinates.
"""

import dataclasses
import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from looplab._types import Float, Int
from looplab.audit.probes.scores import token_nll
from looplab.audit.probes.stream import LOGIT_BYTES, Head, LogitChunks
from looplab.records import Finding, Level

STRENGTHS = (math.inf, 1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
MAX_ITERATIONS = 200
MAX_GRADIENT = 1e-5
TOKENS_PER_FEATURE = 4
_POLISH = 20
_WIDEST = 2048
_SAMPLE = 4096


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


@dataclasses.dataclass(kw_only=True)
class _Solution:
    parameters: Tensor  # float64 "2 dim": gain, shift
    converged: bool = True
    iterations: int = 0


class _Best:
    """The flattest point seen: where no gradient entry is larger than `slope`."""

    def __init__(self, start: Tensor):
        self.parameters, self.gradient, self.slope = start, torch.zeros_like(start), math.inf

    def see(self, parameters: Tensor, gradient: Tensor) -> bool:
        """Whether this point is flatter than all before."""
        slope = float(gradient.abs().max())
        if slope >= self.slope:
            return False
        self.parameters, self.gradient, self.slope = parameters, gradient, slope
        return True


def fit_affine(
    hidden: Float[Tensor, "tokens dim"],
    head: Head,
    targets: Int[Tensor, " tokens"],
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
    num_documents = int(documents.max()) + 1
    if num_documents < 2 or len(keys) != num_documents:
        raise ValueError(
            f"fit_affine: keys must name at least 2 documents, one key each. Got {len(keys)} keys for {num_documents} "
            "documents. Use more calibration text."
        )
    scale = float(hidden.double().square().mean().sqrt()) if scale is None else scale
    problem = _Problem(hidden, head, targets, scale, logit_bytes)
    choosing = torch.isin(documents, torch.tensor(heldout_documents(keys)))
    fitting, held = problem.part(~choosing), problem.part(choosing)

    solution = _Solution(parameters=problem.identity())
    path = []
    for strength in STRENGTHS:
        solution = fitting.solve(strength, solution.parameters)
        path.append((strength, held.loss(solution.parameters), solution))
    strength, _, chosen = min(path, key=lambda entry: entry[1])  # the first, so the largest, of equal losses
    solution = problem.solve(strength, chosen.parameters)
    gain, shift = solution.parameters.numpy()
    return Affine(
        gain=gain,
        shift=shift,
        scale=scale,
        strength=strength,
        heldout=tuple((s, loss) for s, loss, _ in path),
        converged=solution.converged,
        iterations=solution.iterations,
        passes=problem.passes + fitting.passes + held.passes,
        tokens=len(targets),
        convex=convex,
        findings=tuple(_findings(strength, *hidden.shape)),
    )


def heldout_documents(keys: Sequence[str]) -> list[int]:
    """The fifth of the documents (at least one) that chooses lambda, by hash of their keys."""
    order = sorted(range(len(keys)), key=lambda d: hashlib.sha256(f"{keys[d]}lambda".encode()).digest())
    return sorted(order[: max(1, round(len(keys) / 5))])


class _Problem:
    """Loss and gradient over streamed hidden states, and its minimiser for one penalty."""

    def __init__(self, hidden: Tensor, head: Head, targets: Tensor, scale: float, logit_bytes: int):
        self.hidden, self.head, self.targets, self.scale, self.logit_bytes = hidden, head, targets, scale, logit_bytes
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        self.passes = 0

    def part(self, chosen: Tensor) -> "_Problem":
        return _Problem(self.hidden[chosen], self.head, self.targets[chosen], self.scale, self.logit_bytes)

    def identity(self) -> Tensor:
        dim = self.hidden.shape[1]
        return torch.stack([torch.ones(dim, dtype=torch.float64), torch.zeros(dim, dtype=torch.float64)])

    def _logits(self, parameters: Tensor) -> LogitChunks:
        gain, shift = parameters

        def probed(hidden: Tensor) -> Tensor:
            return self.head(hidden.to(self.dtype) * gain.to(self.dtype) + (self.scale * shift).to(self.dtype))

        return LogitChunks(self.hidden, probed, self.logit_bytes)

    def loss(self, parameters: Tensor) -> float:
        """Mean cross entropy without the penalty."""
        self.passes += 1
        logits = self._logits(parameters)
        return float(token_nll(self.hidden, logits.head, self.targets, logit_bytes=self.logit_bytes).mean())

    def solve(self, strength: float, start: Tensor) -> _Solution:
        if strength == math.inf:
            return _Solution(parameters=self.identity())
        root = self._root(start, strength) if start.numel() <= 2 * _WIDEST else None
        best = _Best(start)

        def place(u: Tensor) -> Tensor:
            if root is None:
                return start + u.view_as(start)
            return start + torch.linalg.solve_triangular(root.mT, u[:, None], upper=True).view_as(start)

        def loss_and_gradient(u: np.ndarray) -> tuple[float, np.ndarray]:
            parameters = place(torch.from_numpy(u))
            loss, gradient = self._penalised(parameters, strength)
            best.see(parameters, gradient)
            if root is None:
                return loss, gradient.flatten().numpy()
            return loss, torch.linalg.solve_triangular(root, gradient.reshape(-1, 1), upper=False)[:, 0].numpy()

        def until_flat(_: np.ndarray) -> None:
            if best.slope <= MAX_GRADIENT:
                raise StopIteration

        found = minimize(
            loss_and_gradient,
            np.zeros(start.numel()),
            jac=True,
            method="L-BFGS-B",
            callback=until_flat,
            options={"maxcor": 20, "ftol": 0.0, "gtol": 0.0, "maxiter": MAX_ITERATIONS, "maxfun": 2 * MAX_ITERATIONS},
        )
        if best.slope > MAX_GRADIENT and root is not None:
            self._polish(best, strength)
        return _Solution(parameters=best.parameters, converged=best.slope <= MAX_GRADIENT, iterations=int(found.nit))

    def _polish(self, best: "_Best", strength: float) -> None:
        """Newton steps: near the minimum losses differ by less than float32 can tell, gradients still tell the way."""
        root, length = self._root(best.parameters, strength), 1.0
        for _ in range(_POLISH):
            if best.slope <= MAX_GRADIENT:
                return
            step = torch.cholesky_solve(best.gradient.reshape(-1, 1), root).view_as(best.parameters)
            parameters = best.parameters - length * step
            if not best.see(parameters, self._penalised(parameters, strength)[1]):
                length /= 2

    def _penalised(self, parameters: Tensor, strength: float) -> tuple[float, Tensor]:
        """The penalised loss and its gradient."""
        parameters = parameters.clone().requires_grad_()
        penalty = strength * (parameters - self.identity()).square().sum()
        penalty.backward()
        loss = float(penalty.detach() + self._backward(parameters))
        assert parameters.grad is not None
        return loss, parameters.grad

    def _root(self, parameters: Tensor, strength: float) -> Tensor:
        """Cholesky factor of the curvature, the penalty's included."""
        curvature = self._curvature(parameters)
        curvature.diagonal().add_(2 * strength)
        return torch.linalg.cholesky(curvature)

    def _curvature(self, parameters: Tensor) -> Tensor:
        """Fisher information of the mean cross entropy, from one label per token drawn from the model's own prediction.

        It only shapes the search, so a sample of the tokens is enough.
        """
        size = parameters.numel()
        total = torch.zeros(size, size, dtype=torch.float64)
        self.passes += 1
        draws = torch.Generator().manual_seed(0)
        gain, shift = parameters.to(self.dtype)
        sample = self.hidden[:: max(1, len(self.hidden) // max(_SAMPLE, 8 * size))].to(self.dtype)
        logits = self.head(sample[:1])
        rows = max(1, self.logit_bytes // (logits.element_size() * logits.shape[1]))
        for start in range(0, len(sample), rows):
            hidden = sample[start : start + rows]
            probed = (hidden * gain + self.scale * shift).requires_grad_()
            logits = self.head(probed)
            rising = torch.softmax(logits.detach(), dim=1).cumsum(dim=1)
            level = torch.rand(len(hidden), 1, generator=draws).to(rising) * rising[:, -1:]
            labels = torch.searchsorted(rising, level, right=True)[:, 0].clamp(max=rising.shape[1] - 1)
            loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            (slope,) = torch.autograd.grad(loss, probed)
            columns = torch.cat([slope * hidden, self.scale * slope], dim=1).double().cpu()
            total += columns.mT @ columns / len(sample)
        return total

    def _backward(self, parameters: Tensor) -> Tensor:
        """Adds the gradient of the mean cross entropy to `parameters.grad`, one chunk at a time; returns the mean."""
        self.passes += 1
        total, start = torch.zeros((), dtype=torch.float64), 0
        for logits in self._logits(parameters):
            targets = self.targets[start : start + len(logits)].long().to(logits.device)
            losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
            mean = losses.double().sum() / len(self.hidden)
            mean.backward()
            total += mean.detach().cpu()
            start += len(logits)
        return total


def _findings(strength: float, tokens: int, dim: int) -> list[Finding]:
    findings = []
    if strength == STRENGTHS[-1]:
        findings.append(
            Finding(
                kind="audit.lambda_at_edge",
                level=Level.WARNING,
                message=f"The affine probe chose the smallest penalty, {strength:g}; a smaller one might do better.",
                remedy="Read the affine share as a lower bound.",
                value=strength,
                threshold=STRENGTHS[-1],
            )
        )
    if tokens < TOKENS_PER_FEATURE * dim:
        findings.append(
            Finding(
                kind="audit.affine_underdetermined",
                level=Level.WARNING,
                message=f"The affine probe has {tokens} tokens for {dim} features.",
                remedy=f"Use at least {TOKENS_PER_FEATURE * dim} calibration tokens.",
                value=float(tokens),
                threshold=float(TOKENS_PER_FEATURE * dim),
            )
        )
    return findings
