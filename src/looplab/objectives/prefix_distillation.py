"""Progress-aligned recurrence without labels of the steps: the model's answer to a prefix is the target on the way.

    L = weight * mean KL(sg p_teacher | p_student) + mean CE of the answer

    after k iterations the teacher answers the word of its first k operations; position k of a causal model reads it

    layout   student, after k iterations                          teacher
    answer   the answer's position n, for k < n                   position k of the same run
    window   position a + k of the whole word, a >= 1             position k of the word that begins after operation a
    prefix   position k, for k <= n                               position k, with the averaged weights

Position 0 begins a word, position j holds operation j; the answer stands at the last position with a label, and no
other label is read. It is due from iteration n on, and is scored after each of them. Only answers to whole words teach
the teacher, so a run should have words of every length up to its longest.

`teacher="ema"` reads the teacher with exponentially averaged weights. With the weights of the student, layout "prefix"
would compare a state with itself, and is refused.

Source: prefix self-distillation as reported for progress-aligned recurrence; definitions ours. Layout "window" is ours
throughout: it is the one for cores that see few positions, whose state at n cannot know the first operations before
iteration n. Its words begin at 1 + (row mod (n - 1)), so that a batch covers all beginnings evenly.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from looplab._types import Bool, Float, Int
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
    labelled,
    roll,
    scored_mask,
)
from looplab.recurrence import state as states
from looplab.recurrence.gradient.full import FullBPTT

AVERAGE = "average."
"""Start of the names of averaged weights in the carry."""


@OBJECTIVES.register("prefix_distillation")
@dataclass(frozen=True, kw_only=True)
class PrefixDistillation(Objective):
    """Cross-entropy of the final answer, and the distance from the model's own answers to parts of the word."""

    needs: ClassVar[Needs] = Needs(states="every")

    layout: Literal["answer", "window", "prefix"] = "answer"
    teacher: Literal["self", "ema"] = "self"
    decay: float = 0.999
    """Of the averaged weights, per step."""
    weight: float = 1.0
    """Of the distance."""
    state_noise: float = 0.0
    """Standard deviation of noise on the student's state before each application."""

    def __post_init__(self) -> None:
        if self.layout == "prefix" and self.teacher == "self":
            raise ValueError(
                "PrefixDistillation: layout 'prefix' in a causal model reads teacher and student from the same state; "
                "the loss is zero. Use layout 'answer'."
            )
        if not 0 <= self.decay < 1:
            raise ValueError(f"PrefixDistillation.decay must be in [0, 1). Got {self.decay}.")
        for name in ("weight", "state_noise"):
            if getattr(self, name) < 0:
                raise ValueError(f"PrefixDistillation.{name} must be at least 0. Got {getattr(self, name)}.")

    @property
    def carries(self) -> bool:  # type: ignore[override]
        """Whether averaged weights are kept."""
        return self.teacher == "ema"

    def check(self, model: Any) -> None:
        """Causal models: there a position of the whole word answers its prefix."""
        if not model.spec.causal:
            raise ValueError(
                f"PrefixDistillation needs a causal model, whose position k answers the first k operations. "
                f"{model.spec.name!r} is not causal. Use EveryIteration."
            )

    def counts(self, labels: Int[Tensor, "batch seq *cells"], length: int = 1) -> dict[str, int]:
        """Answers scored, and (row, iteration) pairs of student and teacher.

        Raises:
            ValueError: No label; no word is short enough to be answered within the plan.
        """
        labelled(self, labels)
        ends = answer_positions(labels)
        answers = int((length - ends[ends >= 0] + 1).clamp(min=0).sum())
        if answers == 0:
            raise ValueError(
                f"PrefixDistillation: the plan must have at least as many applications as the word has operations "
                f"({int(ends.max())}). Got {length}. Raise the model's trained_depth."
            )
        rows = torch.arange(len(labels), device=labels.device)
        taught = sum(int(self._places(ends, rows, k)[2].sum()) for k in range(1, length + 1))
        return {"answer": answers} | ({"distillation": taught} if taught else {})

    def run(self, given: Pass) -> Outcome:
        """The student's pass, and the teacher's where it is another one."""
        labels, length = given.batch.labels, len(given.plan)
        rows, ends = torch.arange(len(labels), device=labels.device), answer_positions(labels)
        average = self._averaged(given)
        teacher = self._teacher(given, average, ends)
        rollout, first, last = roll(given, range(1, length + 1), before=self._noise(given))
        sums: dict[str, list[Tensor]] = {"answer": [], "distillation": []}
        counts = dict.fromkeys(sums, 0)
        wanted = labels[rows, ends.clamp(min=0)]
        for k in range(1, length + 1):
            student, taught, active = self._places(ends, given.batch.rows.to(labels.device), k)
            hidden = rollout.hidden(k)
            due = (ends >= 0) & (ends <= k)
            if due.any():
                laws = _laws(given, hidden[due, ends[due]], wanted[due])
                targets = wanted[due].flatten()
                ce = functional.cross_entropy(laws.flatten(0, -2), targets, ignore_index=IGNORED, reduction="sum")
                sums["answer"].append(ce)
                counts["answer"] += int(due.sum())
            if active.any():
                laws = _laws(given, hidden[active, student[active]], wanted[active])
                with torch.no_grad(), _weights(given.model, average):
                    read = (rollout if teacher is None else teacher).hidden(k)[active, taught[active]]
                    goal = _laws(given, read, wanted[active]).log_softmax(-1)
                sums["distillation"].append((goal.exp() * (goal - laws.log_softmax(-1))).sum())
                counts["distillation"] += int(active.sum())
        weights = {"answer": 1.0, "distillation": self.weight}
        parts = {
            name: Part(torch.stack(terms).sum(), counts[name], weights[name]) for name, terms in sums.items() if terms
        }
        carry = {AVERAGE + name: tensor for name, tensor in average.items()}
        return Outcome(LossParts(parts), first, last, given.plan, carry)

    def _places(self, ends: Tensor, rows: Tensor, k: int) -> tuple[Tensor, Tensor, Bool[Tensor, " batch"]]:
        """Position of the student, position of the teacher, and whether the row has a pair after k iterations."""
        at_k = torch.full_like(ends, k)
        if self.layout == "answer":
            return ends, at_k, at_k < ends
        if self.layout == "prefix":
            return at_k, at_k, at_k <= ends
        place = _beginnings(ends, rows) + k
        return place, at_k, place <= ends

    def _teacher(self, given: Pass, average: Mapping[str, Tensor], ends: Tensor) -> Rollout | None:
        """The teacher's own pass; None: it is read in the student's."""
        batch = given.batch
        if self.layout == "window":
            starts = _beginnings(ends, batch.rows.to(ends.device))
            index = starts[:, None] + torch.arange(batch.tokens.shape[1], device=ends.device)
            index[:, 0] = 0  # what begins a word; tokens beyond its end are seen by nobody who is read
            index = index.clamp(max=batch.tokens.shape[1] - 1)
            batch = replace(batch, tokens=batch.tokens.gather(1, index))
        elif self.teacher == "self":
            return None
        own = replace(given, batch=batch, gradient=FullBPTT(), recorder=None)
        with torch.no_grad(), _weights(given.model, average):
            return roll(own, range(1, len(given.plan) + 1))[0]

    def _averaged(self, given: Pass) -> dict[str, Tensor]:
        """The averaged weights of this step; nothing without them."""
        if self.teacher == "self":
            return {}
        found = {}
        for name, parameter in given.model.named_parameters():
            now = parameter.detach()
            before = given.carry.get(AVERAGE + name)
            found[name] = now.clone() if before is None else torch.lerp(now, before.to(now), self.decay)
        return found

    def _noise(self, given: Pass) -> Any:
        if self.state_noise == 0:
            return None

        def noisy(state: Any, done: int) -> Any:
            generator = given.generator(f"augment:{done}")  # the same when an application is computed again

            def moved(leaf: Tensor) -> Tensor:
                return leaf + self.state_noise * given.normal(generator, 1, leaf.shape)[0].to(leaf)

            return states.map(moved, state)

        return noisy


def answer_positions(labels: Int[Tensor, "batch seq *cells"]) -> Int[Tensor, " batch"]:
    """Last position with a label of every row; -1 where a row has none."""
    scored = scored_mask(labels)
    places = torch.arange(labels.shape[1], device=labels.device)
    return torch.where(scored, places, -1).amax(1)


def _beginnings(ends: Tensor, rows: Tensor) -> Tensor:
    """Operations left out at the start of each row's shorter word, from 1 to n - 1."""
    return 1 + rows % (ends - 1).clamp(min=1)


def _laws(
    given: Pass, hidden: Float[Tensor, "rows dim"], labels: Int[Tensor, "rows *cells"]
) -> Float[Tensor, "rows *cells symbols"]:
    """Logits of single positions, one law per cell."""
    logits = given.model.head(hidden[None])[0]
    if given.ledger is not None:
        given.ledger.count_head(given.model.spec, tokens=len(hidden), gradient=torch.is_grad_enabled())
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if labels.dim() == 1 else logits.unflatten(-1, (labels.shape[-1], -1))


@contextmanager
def _weights(model: Any, others: Mapping[str, Tensor]) -> Iterator[None]:
    """The model with these weights in place of its own; nothing that carries gradient may run inside."""
    named = dict(model.named_parameters())
    kept = {name: named[name].data for name in others}
    for name, tensor in others.items():
        named[name].data = tensor
    try:
        yield
    finally:
        for name, tensor in kept.items():
            named[name].data = tensor
