"""Deep supervision with a carry: one optimizer update after every supervision step of a puzzle solver.

    carry     state without graph, supervision steps done, whether the row halted, and the row itself
    before    a halted row is replaced in place by the next row of the stream and starts over; at first all are halted
    lm        sum over rows of the mean over its labels of -log p(y),     p = s(a) / sum of s(a)
              stablemax: s(a) = a + 1 for a >= 0, 1 / (1 - a) for a < 0, in float64
    halt      sum over rows of BCE(q_halt, 1[every label right])                                        weight 1/2
    continue  sum over rows of BCE(q_continue, sigmoid(max(q_halt', q_continue')))                      weight 1/2
              ' after one more supervision step without graph; at the last step of a row, q_halt' alone
    after     halted = last step, or the model's rule (q_halt > 0, or q_halt > q_continue), where with probability
              `exploration` a row must first have done a number of steps drawn from U{2 .. steps}

All parts are divided by the rows of the batch. The gradient's window is that of the gradient strategy: TRM has all of
the last high cycle, `TruncatedBPTT(l_cycles + 1)`; HRM the last low and the last high application, window 2.

References: TRM, arXiv:2510.04871; HRM, arXiv:2506.21734; code SamsungSAILMontreal/TinyRecursiveModels and
sapientinc/HRM. Deviations: a slot takes the next row that nobody has had, where the originals offer every slot a row of
its own at each step and drop those that are not taken; so no row is skipped and the order of the stream is kept.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from looplab._types import Bool, Float, Int
from looplab.objectives.base import (
    IGNORED,
    OBJECTIVES,
    LossParts,
    Objective,
    Outcome,
    Part,
    Pass,
    encode,
    labelled,
)
from looplab.recurrence import state as states
from looplab.recurrence.loop import run_plan
from looplab.recurrence.philox import stream_key, uniforms

TOKENS, LABELS, ROWS, NEXT, STEPS, HALTED, STATE = "tokens", "labels", "rows", "next", "steps", "halted", "state"
"""Names in the carry: a row's tokens and labels, its number in the stream, the number that comes next, its supervision
steps, whether it halted, and (`state.0`, `state.1`, ..) the tensors of its state."""


@OBJECTIVES.register("deep_supervision")
@dataclass(frozen=True, kw_only=True)
class DeepSupervision(Objective):
    """The answer after one more supervision step, and whether to stop there."""

    carries: ClassVar[bool] = True

    loss_of_answer: Literal["stablemax", "softmax"] = "stablemax"
    """How logits become probabilities."""
    continue_loss: bool = False
    """Train the continue logit too, as HRM does; TRM does not."""
    exploration: float = 0.1
    """Probability that a row may not stop before a random number of steps."""

    def __post_init__(self) -> None:
        if not 0 <= self.exploration <= 1:
            raise ValueError(f"DeepSupervision.exploration must be from 0 to 1. Got {self.exploration}.")

    def check(self, model: Any) -> None:
        """Refuses models without the two stopping logits per row that TRM and HRM have."""
        halt = model.spec.halt
        if halt is None or (halt.layout, halt.per) != ("q_halt_continue", "row"):
            got = "no halt()" if halt is None else f"{halt.layout} per {halt.per}"
            raise ValueError(
                f"DeepSupervision needs a model with a halt and a continue logit per row. {model.spec.name!r} has "
                f"{got}. Models with them: trm, hrm."
            )

    def counts(self, labels: Int[Tensor, "batch seq"], length: int = 1) -> dict[str, int]:
        """Rows of the batch, for every part."""
        labelled(self, labels)
        return dict.fromkeys(self._weights, labels.shape[0])

    @property
    def _weights(self) -> dict[str, float]:
        return {"lm": 1.0, "halt": 0.5} | ({"continue": 0.5} if self.continue_loss else {})

    def run(self, given: Pass) -> Outcome:
        """One supervision step of every row."""
        model, spec = given.model, given.model.spec
        self.check(model)
        plan, held = spec.plan(1), _held(given)
        labels = held[LABELS]
        context = encode(model, replace(given.batch, tokens=held[TOKENS], labels=labels), ledger=given.ledger)
        first = _started(model.init_state(context, given.noise), held)
        last = run_plan(
            model, plan, context, first, gradient=given.gradient, ledger=given.ledger, recorder=given.recorder
        )
        hidden = model.coda(last, context)
        given.count_readout(hidden)
        logits, q = model.head(hidden), model.halt(last)
        done = torch.where(held[HALTED], 0, held[STEPS]) + 1
        at_end = done >= spec.default_steps
        sums = {
            "lm": row_losses(logits, labels, self.loss_of_answer).sum(),
            "halt": _bce(q[:, 0], solved(logits, labels).to(q.dtype)),
        }
        kept = states.detach(last)
        if self.continue_loss:
            with torch.no_grad():
                more = model.halt(run_plan(model, plan, context, kept, ledger=given.ledger))
            sums["continue"] = _bce(q[:, 1], continue_target(more, at_end))
        parts = {name: Part(sums[name], len(labels), weight) for name, weight in self._weights.items()}
        rule = q[:, 0] > (q[:, 1] if spec.halt.rule == "q_halt > q_continue" else 0)
        halted = at_end | (rule & (done >= self._least(given, len(labels), spec.default_steps)))
        leaves = {f"{STATE}.{i}": leaf for i, leaf in enumerate(states.leaves(kept))}
        return Outcome(LossParts(parts), first, last, plan, {**held, STEPS: done, HALTED: halted, **leaves})

    def _least(self, given: Pass, rows: int, steps: int) -> Int[Tensor, " batch"]:
        """Supervision steps before which a row may not stop by itself; drawn anew at every step."""
        key, numbers = stream_key(given.seed, "augment"), np.arange(rows)
        explores, which = (uniforms(key, given.step, numbers, draw) for draw in (0, 1))
        least = np.where(explores < self.exploration, 2 + np.floor(which * max(1, steps - 1)), 0)
        return torch.from_numpy(least.astype(np.int64)).to(given.batch.tokens.device)


def row_losses(
    logits: Float[Tensor, "batch seq symbols"],
    labels: Int[Tensor, "batch seq"],
    loss_of_answer: Literal["stablemax", "softmax"] = "stablemax",
) -> Float[Tensor, " batch"]:
    """Per row, the mean over its labels of -log p, in float64; 0 where a row has none."""
    laws = log_stablemax(logits) if loss_of_answer == "stablemax" else logits.double().log_softmax(-1)
    scored = labels != IGNORED
    picked = laws.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return -(picked * scored).sum(1) / scored.sum(1).clamp(min=1)


def log_stablemax(logits: Float[Tensor, "*any symbols"]) -> Float[Tensor, "*any symbols"]:
    """log of s(a) / sum of s(a), in float64."""
    a = logits.double()
    s = torch.where(a >= 0, a + 1, 1 / (1 - a.clamp(max=0)))
    return s.log() - s.sum(-1, keepdim=True).log()


def solved(logits: Float[Tensor, "batch seq symbols"], labels: Int[Tensor, "batch seq"]) -> Bool[Tensor, " batch"]:
    """Rows of which every label is the best guess; a row without labels is right."""
    return ((logits.argmax(-1) == labels) | (labels == IGNORED)).all(1)


def continue_target(more: Float[Tensor, "batch 2"], at_end: Bool[Tensor, " batch"]) -> Float[Tensor, " batch"]:
    """What going on is worth: sigmoid of the better of both logits one step later, of q_halt alone at the last step."""
    return torch.where(at_end, more[:, 0], more.amax(1)).sigmoid()


def _bce(logits: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits.double(), target.double(), reduction="sum")


def _held(given: Pass) -> dict[str, Tensor]:
    """The carry with every halted row replaced by the next ones of the stream, in the order of the slots."""
    if given.fetch is None:
        raise ValueError(
            "DeepSupervision needs rows with numbers, to replace those that halted. Got text. Train on a task "
            "(TaskRows)."
        )
    batch, device = given.batch, given.batch.tokens.device
    rows = len(batch.tokens)
    held = {name: tensor.to(device) for name, tensor in given.carry.items()} or {
        TOKENS: torch.zeros_like(batch.tokens),
        LABELS: torch.zeros_like(batch.labels),
        ROWS: torch.zeros(rows, dtype=torch.long, device=device),
        NEXT: torch.zeros((), dtype=torch.long, device=device),
        STEPS: torch.zeros(rows, dtype=torch.long, device=device),
        HALTED: torch.ones(rows, dtype=torch.bool, device=device),
    }
    slots = held[HALTED].nonzero()[:, 0]
    if not len(slots):
        return held
    begin = int(held[NEXT])
    numbers = range(begin, begin + len(slots))
    new = given.fetch(batch.difficulty, numbers)
    if new.tokens.shape[1] != held[TOKENS].shape[1]:
        raise ValueError(
            f"DeepSupervision keeps rows of one length. Got {new.tokens.shape[1]} tokens beside "
            f"{held[TOKENS].shape[1]}. Train at difficulties of equal length."
        )
    fresh = {TOKENS: new.tokens, LABELS: new.labels, ROWS: torch.tensor(numbers)}
    replaced = {name: held[name].index_copy(0, slots, tensor.to(device)) for name, tensor in fresh.items()}
    return {**held, **replaced, NEXT: held[NEXT] + len(slots)}


def _started(fresh: Any, held: dict[str, Tensor]) -> Any:
    """The carried state, and the first one for rows that are new."""
    if f"{STATE}.0" not in held:
        return fresh
    kept: Iterator[Tensor] = (held[f"{STATE}.{i}"] for i in range(len(states.leaves(fresh))))
    return states.where(held[HALTED], fresh, states.map(lambda leaf: next(kept).to(leaf), fresh))
