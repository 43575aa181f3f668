"""An arm graded on its task: exact match at lengths x iterations, and what its states do over a long word.

EM(n, k)      share of items answered right after k iterations, Wilson interval
              (a task answered in writing: after the model wrote everything before it itself)
change        EM(n, k') - EM(n, k), paired by item, Newcombe's interval
rms(k)        root mean square of the state after k iterations, over positions and entries
margin(k)     1 % quantile over positions of the smallest, over cells, of (largest logit - second)
halting       first k at which the stopping score is above 0, at the answer; error: that k - n
first wrong   position of the first wrong value after n iterations, n + 1 where there is none; median over items
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from looplab._config import config_hash, from_dict
from looplab._types import Float, Int
from looplab.audit.result import RESULTS
from looplab.audit.runner import weight_hash
from looplab.intervals import Interval, paired_difference, wilson
from looplab.records import StudyRow, dump_json, write_atomic
from looplab.recurrence import state as states
from looplab.recurrence.ledger import Ledger
from looplab.recurrence.loop import run_plan
from looplab.tasks.base import Task, to_torch
from looplab.tasks.evaluation import EVAL_KEY, item_scores, split_of
from looplab.tasks.written_states import WrittenStates

LEVELS = (0.95, 0.90)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One length of the grid."""

    length: int
    items: int
    depths: tuple[float, ...] = (1.0, 1.25, 2.0)
    """Iterations, as multiples of the length."""

    def num_steps(self, task: Task) -> tuple[int, ...]:
        """Iterations of every depth."""
        return tuple(round(depth * task.num_steps(self.length)) for depth in self.depths)


@dataclass(frozen=True, kw_only=True)
class TaskGrid:
    """What an arm is graded on. Items are those of `looplab.tasks.evaluation`: the same for all arms and seeds."""

    task: Task
    lines: tuple[Line, ...]
    halting: tuple[Line, ...] = ()
    """Where an arm has a stopping score: words and items; it runs to the largest of the depths at most."""
    traced: Line | None = None
    """The word length and items whose states are followed, up to the largest of the depths."""


@dataclass(frozen=True, kw_only=True)
class Ends:
    """A value with its intervals at 95 % and 90 %."""

    value: float
    low: float
    high: float
    low90: float
    high90: float

    def row(self, arm: str, seed: int | None, quantity: str, **more: Any) -> StudyRow:
        """The row of a study that says it of an arm; `more` are further fields."""
        return StudyRow(arm=arm, seed=seed, quantity=quantity, unit="exact match", **vars(self), **more)


@dataclass(frozen=True, kw_only=True)
class GridCell:
    """Answers to words of one length after some iterations."""

    length: int
    depth: float
    num_steps: int
    items: int
    exact: int
    cells_right: int
    cells_total: int
    exact_match: Ends
    change: Ends
    """Against the first depth of the line, on the same items."""


@dataclass(frozen=True, kw_only=True)
class GridHalting:
    """When a model stops at words of one length."""

    length: int
    items: int
    on_time: Ends
    """Share of items that stop after exactly as many iterations as the word takes."""
    error: float
    """Mean distance from that number; an item that never stops counts the iterations that were run."""
    exact_match: Ends
    """Of the answers at the stop."""


@dataclass(frozen=True, kw_only=True)
class GridPoint:
    """The states of the traced words after k iterations."""

    k: int
    rms: float
    margin: float


@dataclass(frozen=True, kw_only=True)
class GridResult:
    """What came of a grid. Equal weights and settings give equal bytes."""

    weight_hash: str
    config_hash: str
    chance: float
    """Exact match of the best blind guess at the longest length."""
    cells: tuple[GridCell, ...]
    halting: tuple[GridHalting, ...]
    trace: tuple[GridPoint, ...]
    first_wrong: float | None
    """Median over the traced items."""
    counts: dict[str, Any]
    """Exact, of the ledger."""

    def cell(self, length: int, depth: float) -> GridCell | None:
        """One entry, or None where it was not asked for."""
        return next((c for c in self.cells if (c.length, c.depth) == (length, depth)), None)

    def save(self, folder: Path) -> None:
        """Writes results.json."""
        write_atomic(folder / RESULTS, dump_json(self))

    @classmethod
    def load(cls, folder: Path) -> "GridResult":
        """What `save` wrote."""
        return from_dict(cls, json.loads((folder / RESULTS).read_text()))


def measure_grid(model: Any, grid: TaskGrid, *, ledger: Ledger | None = None) -> GridResult:
    """Grades a model."""
    ledger = ledger or Ledger()
    cells = [cell for line in grid.lines for cell in _line(model, grid.task, line, ledger)]
    points, first_wrong = ([], None) if grid.traced is None else _trace(model, grid.task, grid.traced, ledger)
    return GridResult(
        weight_hash=weight_hash(model),
        config_hash=config_hash(grid),
        chance=grid.task.chance(max(line.length for line in grid.lines)),
        cells=tuple(cells),
        halting=tuple(_halting(model, grid.task, line, ledger) for line in grid.halting),
        trace=tuple(points),
        first_wrong=first_wrong,
        counts=ledger.to_dict(times=False),
    )


def _written(model: Any, task: WrittenStates, line: Line, ledger: Ledger) -> GridCell:
    """Answers after a model wrote all states before them itself, at temperature 0."""
    tokens, labels = _words(task, line)
    text = task.prompt(tokens)
    plan, symbol = model.spec.plan(), labels[:, 0]
    with torch.no_grad():
        for _ in range(line.length):
            context = model.encode(text)
            state = run_plan(model, plan, context, model.init_state(context, None), ledger=ledger)
            symbol = model.head(model.coda(state, context)[:, -1:])[:, 0].argmax(-1)
            text = torch.cat([text, task.written(symbol)[:, None]], dim=1)
    right = (symbol == labels[:, -1]).numpy()
    exact = int(right.sum())
    return GridCell(
        length=line.length,
        depth=1.0,
        num_steps=model.spec.default_steps,
        items=line.items,
        exact=exact,
        cells_right=exact,
        cells_total=line.items,
        exact_match=_share(exact, line.items),
        change=_ends([paired_difference(right, right, level=level) for level in LEVELS]),
    )


def _line(model: Any, task: Task, line: Line, ledger: Ledger) -> Iterator[GridCell]:
    if isinstance(task, WrittenStates):
        yield _written(model, task, line, ledger)
        return
    depths = line.num_steps(task)
    scores = item_scores(model, task, line.length, depths, items=line.items, ledger=ledger)
    first = scores[depths[0]][:, 0] > 0
    for depth, num_steps in zip(line.depths, depths, strict=True):
        rows = scores[num_steps]
        right = rows[:, 0] > 0
        exact = int(right.sum())
        changes = [paired_difference(right, first, level=level) for level in LEVELS]
        yield GridCell(
            length=line.length,
            depth=depth,
            num_steps=num_steps,
            items=line.items,
            exact=exact,
            cells_right=int(rows[:, 1].sum()),
            cells_total=int(rows[:, 2].sum()),
            exact_match=_share(exact, line.items),
            change=_ends(changes),
        )


def _share(right: int, items: int) -> Ends:
    return _ends([wilson(right, items, level=level) for level in LEVELS])


def _ends(found: list[Interval]) -> Ends:
    wide, narrow = found
    return Ends(value=wide.estimate, low=wide.low, high=wide.high, low90=narrow.low, high90=narrow.high)


def traced_depths(line: Line, task: Task) -> tuple[int, ...]:
    """Iterations at which states are looked at: powers of two, and those of the line."""
    last = max(line.num_steps(task))
    powers = [2**power for power in range(last.bit_length()) if 2**power <= last]
    return tuple(sorted({*powers, *line.num_steps(task)}))


def _words(task: Task, line: Line) -> tuple[Tensor, Tensor]:
    tokens, labels = task.batch(line.length, EVAL_KEY, range(line.items), split_of(task, line.length))
    return to_torch(tokens), to_torch(labels)


def _rollout(
    model: Any, tokens: Int[Tensor, "batch seq"], depths: Sequence[int], ledger: Ledger
) -> Iterator[tuple[int, Any, Tensor]]:
    """(k, state, logits) after each of the depths."""
    rows, seq = tokens.shape
    noise = None
    if model.spec.noise_width:
        places = torch.arange(seq).expand(rows, seq)
        noise = states.standard_noise(EVAL_KEY, range(rows), places, model.spec.noise_width)
    plan, done = model.spec.plan(max(depths)), 0
    with torch.no_grad():
        context = model.encode(tokens)
        state = model.init_state(context, noise)
        for k in depths:
            state = run_plan(model, plan[done:k], context, state, ledger=ledger)
            done = k
            yield k, state, model.head(model.coda(state, context)).float()


def _laws(logits: Tensor, labels: Tensor) -> Float[Tensor, "batch seq *cells symbols"]:
    return logits if labels.dim() == 2 else logits.unflatten(-1, (labels.shape[-1], -1))


def _trace(model: Any, task: Task, line: Line, ledger: Ledger) -> tuple[list[GridPoint], float]:
    tokens, labels = _words(task, line)
    points, first_wrong = [], float("nan")
    for k, state, logits in _rollout(model, tokens, traced_depths(line, task), ledger):
        laws = _laws(logits, labels)
        points.append(GridPoint(k=k, rms=float(state.square().mean().sqrt()), margin=_margin(laws, labels)))
        if k == task.num_steps(line.length):
            first_wrong = _first_wrong(laws.argmax(-1), labels)
    return points, first_wrong


def _halting(model: Any, task: Task, line: Line, ledger: Ledger) -> GridHalting:
    tokens, labels = _words(task, line)
    last, needed = max(line.num_steps(task)), task.num_steps(line.length)
    stop = torch.full((line.items,), last)
    right, running = torch.zeros(line.items, dtype=torch.bool), torch.ones(line.items, dtype=torch.bool)
    for k, state, logits in _rollout(model, tokens, range(1, last + 1), ledger):
        read = _laws(logits, labels).argmax(-1)[:, -1] == labels[:, -1]
        stops = running & ((model.halt(state)[:, -1] > 0) | (k == last))
        stop[stops] = k
        right[stops] = (read if labels.dim() == 2 else read.all(-1))[stops]
        running &= ~stops
    on_time, correct = int((stop == needed).sum()), int(right.sum())
    return GridHalting(
        length=line.length,
        items=line.items,
        on_time=_share(on_time, line.items),
        error=float((stop - needed).abs().double().mean()),
        exact_match=_share(correct, line.items),
    )


def _margin(laws: Float[Tensor, "batch seq *cells symbols"], labels: Int[Tensor, "batch seq *cells"]) -> float:
    best = laws.topk(2, dim=-1).values
    margin = best[..., 0] - best[..., 1]
    per_position = margin if labels.dim() == 2 else margin.amin(-1)
    return float(per_position[:, 1:].flatten().quantile(0.01))


def _first_wrong(read: Int[Tensor, "batch seq *cells"], labels: Int[Tensor, "batch seq *cells"]) -> float:
    wrong = read != labels
    wrong = wrong if labels.dim() == 2 else wrong.any(-1)
    found = [int(row.nonzero()[0]) if row.any() else row.numel() for row in wrong]
    return float(np.median(found))
