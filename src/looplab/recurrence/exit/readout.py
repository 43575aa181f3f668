"""Rules that read the logits after every step: the law of the next token, or its top, no longer changes.

    kl(tau)        KL(p_{t-1} || p_t) < tau          in nats
    entropy(tau)   |H(p_t) - H(p_{t-1})| < tau       in nats
    argmax(n)      the same token is on top after n steps in a row, this one included

The first comparison is that of steps 1 and 2, so the earliest stop is t = 2. Where a position holds several cells, KL
and entropy are sums over its cells, and the top of every cell has to stay. Reference: the exit criteria of Huginn,
arXiv:2502.05171. Deviations: it compares step 1 with a uniform law (an untrained model would stop at once), and counts
the repetitions of the top token, one fewer than n.

They cost coda and head after every step.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from looplab._types import Bool, Float, Int
from looplab.recurrence.exit.base import EXIT_RULES, ExitRule, Seen, check_count, check_positive, precise
from looplab.recurrence.spec import LoopSpec


class LastLaw(NamedTuple):
    """Log probabilities one step ago; before step 1 a uniform law, with which nothing is compared."""

    law: Float[Tensor, "batch seq cells symbols"]


class LastEntropy(NamedTuple):
    """Entropy one step ago."""

    entropy: Float[Tensor, "batch seq"]


class LastTop(NamedTuple):
    """Top symbols one step ago, and for how many steps they have been that."""

    top: Int[Tensor, "batch seq cells"]
    times: Int[Tensor, "batch seq"]


@EXIT_RULES.register("kl")
@dataclass(frozen=True, kw_only=True)
class KLExit(ExitRule):
    """After the first step that moves the law of the next token by less than `threshold` nats."""

    threshold: float
    number: ClassVar[str] = "threshold"
    reads_logits: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, self.threshold)

    def start(self, spec: LoopSpec, state: Float[Tensor, "batch seq dim"]) -> LastLaw:
        symbols = spec.vocab[0] // spec.cells
        shape = (*state.shape[:2], spec.cells, symbols)
        return LastLaw(torch.zeros(shape, dtype=precise(state[:0]).dtype, device=state.device).log_softmax(dim=-1))

    def observe(self, memory: LastLaw, seen: Seen) -> tuple[Bool[Tensor, "batch seq"], LastLaw]:
        law = laws(seen)
        return (divergence(memory.law, law) < self.threshold) & _second(seen), LastLaw(law)


@EXIT_RULES.register("entropy")
@dataclass(frozen=True, kw_only=True)
class EntropyExit(ExitRule):
    """After the first step that moves the entropy of the next token by less than `threshold` nats."""

    threshold: float
    number: ClassVar[str] = "threshold"
    reads_logits: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, self.threshold)

    def start(self, spec: LoopSpec, state: Float[Tensor, "batch seq dim"]) -> LastEntropy:
        return LastEntropy(torch.zeros_like(precise(state[..., 0])))

    def observe(self, memory: LastEntropy, seen: Seen) -> tuple[Bool[Tensor, "batch seq"], LastEntropy]:
        now = entropy(laws(seen))
        return ((now - memory.entropy).abs() < self.threshold) & _second(seen), LastEntropy(now)


@EXIT_RULES.register("argmax")
@dataclass(frozen=True, kw_only=True)
class ArgmaxExit(ExitRule):
    """After `times` steps in a row with the same token on top; the lowest id wins a tie."""

    times: int
    number: ClassVar[str] = "times"
    reads_logits: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "times", 2)

    def start(self, spec: LoopSpec, state: Float[Tensor, "batch seq dim"]) -> LastTop:
        none = torch.full((*state.shape[:2], spec.cells), -1, device=state.device)
        return LastTop(none, torch.zeros_like(none[..., 0]))

    def observe(self, memory: LastTop, seen: Seen) -> tuple[Bool[Tensor, "batch seq"], LastTop]:
        assert seen.logits is not None
        top = seen.logits.argmax(dim=-1)
        times = torch.where((top == memory.top).all(dim=-1), memory.times + 1, 1)
        return times >= self.times, LastTop(top, times)


def laws(seen: Seen) -> Float[Tensor, "batch seq cells symbols"]:
    """Log probabilities of what was read."""
    assert seen.logits is not None
    return precise(seen.logits).log_softmax(dim=-1)


def divergence(
    before: Float[Tensor, "*batch cells symbols"], now: Float[Tensor, "*batch cells symbols"]
) -> Float[Tensor, "*batch"]:
    """KL(before || now) of log probabilities, summed over cells."""
    gap = torch.where(before.isneginf(), 0.0, before.exp() * (before - now))  # 0 log 0 = 0, but a NaN stays one
    return gap.sum(dim=(-2, -1))


def entropy(law: Float[Tensor, "*batch cells symbols"]) -> Float[Tensor, "*batch"]:
    """-sum p log p of log probabilities, summed over cells."""
    return torch.special.entr(law.exp()).sum(dim=(-2, -1))


def _second(seen: Seen) -> Bool[Tensor, "batch 1"]:
    return (seen.steps >= 2)[:, None]
