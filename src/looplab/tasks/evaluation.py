"""A model graded on a task: exact match and cells, at a grid of difficulty x num_steps.

One rollout to the deepest depth gives all depths whose plans are its prefixes. Items are those of seed 0 of the stream
"eval", so every model and every run answers the same problems; their split is test, or the only one there is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from looplab._types import Float, Int
from looplab.intervals import wilson
from looplab.recurrence import state as states
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.loop import run_plan
from looplab.recurrence.philox import stream_key
from looplab.recurrence.plan import Plan
from looplab.tasks.base import IGNORED, Split, Task, to_torch

EVAL_KEY = stream_key(0, "eval") >> 1
ROW_TOKENS = 16_384
"""Tokens of one launch."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One entry of the grid."""

    difficulty: int
    num_steps: int
    items: int
    exact: int
    """Items of which every answer cell is right."""
    cells_right: int
    cells_total: int
    loss: float
    """Mean over items of the summed cross-entropy of the answer's cells, in nats."""
    chance: float
    """Exact match of the best blind guess."""

    @property
    def exact_match(self) -> float:
        """Share of items that are right."""
        return self.exact / self.items

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson interval of the exact match, 95 %."""
        found = wilson(self.exact, self.items)
        return found.low, found.high


def evaluate(
    model: Any,
    task: Task,
    difficulty: int,
    depths: Sequence[int],
    *,
    items: int = 256,
    ledger: Ledger | None = None,
) -> list[Cell]:
    """Grades the answers of `items` problems after each of `depths` iterations.

    Args:
        depths: num_steps of the plans.
    """
    scores = item_scores(model, task, difficulty, depths, items=items, ledger=ledger)
    found = {depth: rows.sum(0) for depth, rows in scores.items()}
    return [
        Cell(
            difficulty=difficulty,
            num_steps=depth,
            items=items,
            exact=int(exact),
            cells_right=int(right),
            cells_total=int(total),
            loss=float(loss / items),
            chance=task.chance(difficulty),
        )
        for depth, (exact, right, total, loss) in found.items()
    ]


def item_scores(
    model: Any,
    task: Task,
    difficulty: int,
    depths: Sequence[int],
    *,
    items: int = 256,
    ledger: Ledger | None = None,
) -> dict[int, NDArray[np.float64]]:
    """[items, 4] for every depth: whether an item is right, its right cells, its cells, its loss."""
    found: dict[int, list[NDArray[np.float64]]] = {depth: [] for depth in depths}
    for tokens, labels in _batches(task, difficulty, items):
        for depth, logits in rollout_logits(model, tokens, depths, ledger=ledger):
            found[depth].append(_score(logits, labels))
    return {depth: np.concatenate(rows) for depth, rows in found.items()}


def rollout_logits(
    model: Any, tokens: Int[Tensor, "batch seq"], depths: Sequence[int], *, ledger: Ledger | None = None
) -> Iterator[tuple[int, Float[Tensor, "batch seq columns"]]]:
    """(depth, logits) for every depth, of one rollout as far as the plans are prefixes of one another."""
    device = next(model.parameters()).device
    rows, seq = tokens.shape
    places = torch.arange(seq).expand(rows, seq)
    extras = {"puzzle_ids": torch.zeros(rows, dtype=torch.long)} if "puzzle_ids" in model.spec.extras else None
    noise = None
    if model.spec.noise_width:
        noise = states.standard_noise(EVAL_KEY, range(rows), places, model.spec.noise_width).to(device)
    with torch.no_grad():
        context = model.encode(tokens.to(device), extras=extras)
        if ledger is not None:
            ledger.count_encode(model.spec, rows=rows, tokens=seq)
        start = model.init_state(context, noise)
        state, done = start, Plan(())
        for depth in sorted(set(depths)):
            plan = model.spec.plan(depth)
            if plan[: len(done)] != done:
                state, done = start, Plan(())
            state = run_plan(model, plan[len(done) :], context, state, ledger=ledger)
            done = plan
            hidden = model.coda(state, context)
            if ledger is not None:
                ledger.count_coda(model.spec, rows=rows, tokens=seq)
                ledger.count_head(model.spec, tokens=rows * seq)
            yield depth, model.head(hidden)


def split_of(task: Task, difficulty: int) -> Split:
    """The split whose problems are graded: test, or train where a difficulty is too small to have others."""
    return "test" if task.held_out(difficulty) else "train"


def answers_of(task: Task, difficulty: int) -> slice:
    """Positions of the answer, the same for all problems of a difficulty."""
    return task.example(task.sample(difficulty, EVAL_KEY, 0)).answer


def answer_labels(task: Task, difficulty: int, labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """The labels without those of intermediate values."""
    answer = answers_of(task, difficulty)
    kept = np.full_like(labels, IGNORED)
    kept[:, answer] = labels[:, answer]
    return kept


def _batches(task: Task, difficulty: int, items: int) -> Iterator[tuple[Tensor, Tensor]]:
    rows = max(1, ROW_TOKENS // task.length(difficulty))
    for begin in range(0, items, rows):
        numbers = range(begin, min(items, begin + rows))
        tokens, labels = task.batch(difficulty, EVAL_KEY, numbers, split_of(task, difficulty))
        yield to_torch(tokens), to_torch(answer_labels(task, difficulty, labels))


def _score(logits: Tensor, labels: Tensor) -> NDArray[np.float64]:
    """[rows, 4]: whether a row is right, right cells, cells, loss."""
    labels = labels.to(logits.device)
    laws = logits if labels.dim() == 2 else logits.unflatten(-1, (labels.shape[-1], -1))
    scored = labels != IGNORED
    right = (laws.argmax(-1) == labels) & scored
    loss = functional.cross_entropy(
        laws.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED, reduction="none"
    ).view(labels.shape)
    columns = [(right == scored).flatten(1).all(1), *(x.flatten(1).sum(1) for x in (right, scored, loss))]
    return torch.stack([column.double() for column in columns], dim=1).cpu().numpy()
