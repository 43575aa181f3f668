"""Progress-aligned recurrence: after k iterations a position holds the result of the last k operations.

    L = sum over scored k, j of CE(g(h_k[j]), y[j, k]) / count          j: position of operation j

    layout   target y[j, k]                                             scored
    window   product of the last min(k, j) operations ending at j       all j
    prefix   s_min(k, j), the state after that many operations          j <= k
    answer   s_min(k, n)                                                the answer's position alone

All three agree at the answer: j = n after n iterations. The last `iterations` applications of the drawn depth are
scored; those before them (burn-in) carry no gradient, whatever law the depth has. Past k = j the target stays s_j.

Replay (ours): the final states of the step before, with the labels they stand for, detached, begin the next step with
probability `replay`, shuffled over rows and over positions, under new operations: the targets follow the same rule from
the replayed labels, y[j, k] = operation j applied to y[j - 1, k - 1]. A state that does not read as its label becomes 0
with the label of the start, so the model has to start from `Zeros`. Chains of applications grow to a mean of
iterations / (1 - replay), though no word is longer than before. It needs a rule that is local in position, so layout
"window".

Anchoring is a property of the loop (`EndNorm`); `anchor` adds the soft form, mean((rms(h_k) - anchor_size)^2).

Source: progress-aligned recurrence as reported (targets per iteration, anchoring, long extrapolation); the definitions
of window targets, burn-in and replay are ours. Deviations: noise of states is drawn from a generator seeded by (seed,
step) for the whole batch, since counter-based noise of every scored state would cost as much as the step itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from looplab._types import Float, Int
from looplab.objectives.base import (
    IGNORED,
    OBJECTIVES,
    LossParts,
    Needs,
    Objective,
    Outcome,
    Part,
    Pass,
    Rollout,
)
from looplab.recurrence.loop import run_plan
from looplab.recurrence.trace import Recorder
from looplab.tasks.base import window_targets

STATES, LABELS = "states", "labels"


@OBJECTIVES.register("progress_aligned")
@dataclass(frozen=True, kw_only=True)
class ProgressAligned(Objective):
    """Cross-entropy of every scored iteration against the value that the task has reached by then."""

    needs: ClassVar[Needs] = Needs(states="every", targets=True)

    iterations: int = 4
    """Trailing applications that are scored and carry gradient."""
    layout: Literal["window", "prefix", "answer"] = "window"
    state_noise: float = 0.0
    """Standard deviation of noise on the state before each scored application, in units of the state's entries."""
    replay: float = 0.0
    """Probability of beginning at the states of the step before."""
    replay_start: float = 0.15
    """Part of the run before the first replay."""
    anchor: float = 0.0
    """Weight of the soft anchor."""
    anchor_size: float = 1.0
    """Root mean square that the soft anchor asks for."""

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise ValueError(f"ProgressAligned.iterations must be at least 1. Got {self.iterations}.")
        for name, high in (("replay", 1.0), ("replay_start", 1.0)):
            if not 0 <= getattr(self, name) <= high:
                raise ValueError(f"ProgressAligned.{name} must be from 0 to 1. Got {getattr(self, name)}.")
        for name in ("state_noise", "anchor"):
            if getattr(self, name) < 0:
                raise ValueError(f"ProgressAligned.{name} must be at least 0. Got {getattr(self, name)}.")
        if self.replay and self.layout != "window":
            raise ValueError(
                f"ProgressAligned.replay needs layout='window', whose targets are a rule of neighbours. "
                f"Got {self.layout!r}. Set replay=0"
            )

    @property
    def carries(self) -> bool:  # type: ignore[override]
        """Whether final states are kept."""
        return self.replay > 0

    def counts(self, labels: Int[Tensor, "batch seq *cells"], length: int = 1) -> dict[str, int]:
        """Scored (iteration, position) pairs."""
        scored = min(self.iterations, length)
        count = sum(int(self._scored(labels, k).sum()) for k in range(length - scored + 1, length + 1))
        if count == 0:
            raise ValueError(
                f"ProgressAligned(layout={self.layout!r}) scores nothing in {length} applications. Run more of them."
            )
        return {"progress": count} | ({"anchor": scored * labels.shape[0] * labels.shape[1]} if self.anchor else {})

    def run(self, given: Pass) -> Outcome:
        """Burn-in or replay, then the scored applications."""
        model, task, tokens = given.model, given.batch.task, given.batch.tokens
        generator = given.generator("augment")
        context = given.encode()
        replayed = bool(given.carry) and float(torch.rand((), generator=generator)) < self.replay
        replayed = replayed and given.step >= self.replay_start * given.steps
        count = min(self.iterations, len(given.plan))
        free = 0 if replayed else len(given.plan) - count
        plan = given.plan[:count] if replayed else given.plan
        first = model.init_state(context, given.noise)
        values = task.start(tokens)
        shuffled = _shuffled(given.carry, first, generator) if replayed else {}
        if shuffled:
            first, values = shuffled[STATES].to(first), shuffled[LABELS].to(values)
        targets = window_targets(task, tokens, len(plan), values)
        # One window's gradient strategy covers the scored part; burn-in is before it and carries none.
        with torch.no_grad():
            state = run_plan(model, plan[:free], context, first, ledger=given.ledger) if free else first
        recorder = given.recorder or Recorder()
        noise = self._noise(given, state, count, generator)
        last = run_plan(
            model,
            plan[free:],
            context,
            state,
            gradient=given.gradient,
            before=None if noise is None else lambda s, done: s + noise[done],
            recorder=recorder,
            ledger=given.ledger,
        )
        sums = [torch.zeros((), dtype=torch.float32, device=tokens.device) for _ in range(2)]
        logits = torch.empty(0)
        for index in range(1, count + 1):
            k = free + index
            rollout = Rollout(
                model=model, context=context, plan=plan, states={k: recorder.states[index]}, ledger=given.ledger
            )
            hidden = rollout.hidden(k)
            logits = model.head(hidden)
            labels = self._labels(given.batch.labels, targets[k], k)
            if given.ledger is not None:
                given.ledger.count_head(model.spec, tokens=tokens.numel(), gradient=torch.is_grad_enabled())
            sums[0] = sums[0] + _cross_entropy(logits, labels)
            if self.anchor:
                size = recorder.states[index].square().mean(-1).sqrt()
                sums[1] = sums[1] + (size - self.anchor_size).square().sum()
        counts = self.counts(given.batch.labels, len(plan))
        parts = {"progress": Part(sums[0], counts["progress"], 1.0)}
        if self.anchor:
            parts["anchor"] = Part(sums[1], counts["anchor"], self.anchor)
        more, marks = self._more(given, recorder.states[1:], free, shuffled)
        carry = _kept(last, targets[len(plan)], logits, task.start(tokens), marks) if self.carries else {}
        return Outcome(LossParts(parts | more), first, last, plan, carry, free)

    def _more(
        self, given: Pass, scored: Sequence[Any], free: int, replayed: Mapping[str, Tensor]
    ) -> tuple[dict[str, Part], dict[str, Tensor]]:
        """Further parts of a class that adds to this one, and marks [batch, seq] that replayed states keep with them.

        Args:
            scored: States after the scored applications.
            free: Applications before them.
            replayed: What was kept of the step before, in its new order; empty without replay.
        """
        return {}, {}

    def _scored(self, labels: Tensor, k: int) -> Tensor:
        """Positions [batch, seq] that are scored after k iterations."""
        rows, seq = labels.shape[:2]
        if self.layout == "window":
            return torch.ones(rows, seq, dtype=torch.bool, device=labels.device)
        if self.layout == "prefix":
            return (torch.arange(seq, device=labels.device) <= k).expand(rows, seq)
        last = torch.zeros(rows, seq, dtype=torch.bool, device=labels.device)
        last[:, -1] = True
        return last

    def _labels(self, full: Tensor, target: Tensor, k: int) -> Tensor:
        """Labels after k iterations; `full` are the values of the whole words, `target` the window products."""
        if self.layout == "window":
            return target
        of_answer = full[:, min(k, full.shape[1] - 1)][:, None].expand_as(full)
        wanted = full if self.layout == "prefix" else of_answer
        scored = self._scored(full, k)
        return torch.where(scored.view(*scored.shape, *[1] * (full.dim() - 2)), wanted, IGNORED)

    def _noise(self, given: Pass, state: Any, count: int, generator: torch.Generator) -> list[Tensor] | None:
        if self.state_noise == 0:
            return None
        drawn = self.state_noise * given.normal(generator, count, state.shape)
        return list(drawn.to(state))


def _shuffled(carry: Mapping[str, Tensor], start: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """What was kept of the step before, shuffled over rows and over the positions after the first; nothing where the
    words have another length now."""
    rows, seq = start.shape[:2]
    if carry[STATES].shape[:2] != (rows, seq):
        return {}
    order = torch.randperm(rows * (seq - 1), generator=generator)
    found = {}
    for name, kept in carry.items():
        tensor = kept.to(start.device, copy=True)
        tensor[:, 1:] = tensor[:, 1:].flatten(0, 1)[order].view_as(tensor[:, 1:])
        found[name] = tensor
    return found


def _kept(
    last: Tensor, labels: Tensor, logits: Tensor, start: Tensor, marks: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Final states with their labels and marks; a state that does not read as its label becomes 0, which stands for
    the start and has no marks."""
    laws = logits if labels.dim() == 2 else logits.unflatten(-1, (labels.shape[-1], -1))
    right = laws.argmax(-1) == labels
    right = right if labels.dim() == 2 else right.all(-1)
    kept = right.view(*right.shape, *[1] * (labels.dim() - 2))
    return {
        STATES: torch.where(right[..., None], last.detach(), torch.zeros_like(last)),
        LABELS: torch.where(kept, labels, start),
    } | {name: torch.where(right, mark, torch.zeros_like(mark)) for name, mark in marks.items()}


def _cross_entropy(logits: Float[Tensor, "batch seq columns"], labels: Int[Tensor, "batch seq *cells"]) -> Tensor:
    """Summed over positions and cells."""
    laws = logits if labels.dim() == 2 else logits.unflatten(-1, (labels.shape[-1], -1))
    return functional.cross_entropy(laws.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")
