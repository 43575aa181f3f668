"""What each application does to the state, measured in passing while the plans are walked.

    relative       |x_j - x_{j-1}| / |x_{j-1}|
    state cosine   cos(x_j, x_{j-1})
    update cosine  cos(x_j - x_{j-1}, x_{j-1} - x_{j-2})

x_j is one component of the state after j applications, at the positions that predict scored tokens. Sums and counts are
kept per document, so that noise seeds add and shards join. A number is the mean over documents of each document's mean
over tokens, with quartiles over documents. A token whose denominator is below 1e-12 (a zero state, no update) is left
out of that measure and not counted. In float64. Only the paths of a few schedules are measured, without a further
application.

Components with one value per row instead of per token (halting scores) have no scored tokens and are not measured.

Reference: arXiv:2609.19934 (relative update, over all positions of a document). Deviations: scored tokens only.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from looplab._types import Float, Int
from looplab.audit.geometry import ZERO
from looplab.audit.result import Update
from looplab.recurrence.plan import Plan, PlanNode
from looplab.recurrence.spec import StateField
from looplab.recurrence.state import component

MEASURES = ("relative", "state_cosine", "update_cosine")
CHUNK = 2**22
"""Numbers that are turned into float64 at a time."""


def token_components(fields: Mapping[str, StateField]) -> tuple[str, ...]:
    """The state components with a vector per token. `fields`: the state of the LoopSpec."""
    return tuple(name for name, field in fields.items() if field.per == "token")


class UpdateMeter:
    """Measures one walk over one batch: hand it to `walk(on_step=...)`, then read `tables`.

    It holds the scored tokens of at most one state per schedule, in the state's own dtype: of x_{j-2}, until the
    applications that lead to x_j have been made.
    """

    def __init__(
        self,
        root: PlanNode,
        schedules: Sequence[str],
        components: Sequence[str],
        read: tuple[Int[Tensor, " tokens"], Int[Tensor, " tokens"]],
        rows: int,
        prefixes: Sequence[int] = (),
    ):
        """Finds the paths of `schedules` in the trie.

        Args:
            components: `token_components` of the model.
            read: Row and position of every scored token (`Batch.read`).
            rows: Rows of the batch.
            prefixes: Positions of every component before those of the tokens; none given: no such positions.
        Raises:
            KeyError: A schedule that the trie does not run.
        """
        self._components, self._read, self._rows = tuple(components), read, rows
        self._prefixes = tuple(prefixes) or (0,) * len(self._components)
        self._parents: dict[int, int] = {}
        # Node -> how many applications still need the state before it, and that state.
        self._waiting: dict[int, int] = {}
        self._kept: dict[int, tuple[Tensor, ...]] = {}
        # Node -> the schedules whose path it lies on, and which of their applications it is.
        self._places: dict[int, list[tuple[str, int]]] = {}
        self.tables: dict[str, Float[np.ndarray, "rows applications components 3 2"]] = {}
        """Schedule -> (sum, count) of every measure."""
        for name in schedules:
            path = _path(root, name)
            if path is None:
                raise KeyError(f"UpdateMeter: schedules must be run by the walk. Got {name!r}, which no node wants.")
            self.tables[name] = np.zeros((rows, len(path), len(self._components), len(MEASURES), 2))
            for j, node in enumerate(path):
                if id(node) not in self._places and j > 0:
                    self._parents[id(node)] = id(path[j - 1])
                    self._waiting[id(path[j - 1])] = self._waiting.get(id(path[j - 1]), 0) + 1
                self._places.setdefault(id(node), []).append((name, j))

    def __call__(self, node: PlanNode, before: Any, after: Any) -> None:
        """Measures one application: `walk` calls it with the states before and after."""
        key = id(node)
        if key not in self._places:
            return
        previous = self._taken(self._parents.get(key))
        states = [self._scored(before), self._scored(after)]
        if key in self._waiting:
            self._kept[key] = states[0]
        for c in range(len(self._components)):
            earlier = None if previous is None else previous[c]
            measured = self._measured(earlier, states[0][c], states[1][c])
            for name, j in self._places[key]:
                self.tables[name][:, j, c] = measured

    def _scored(self, state: Any) -> tuple[Tensor, ...]:
        pairs = zip(self._components, self._prefixes, strict=True)
        leaves = [component(state, name)[:, prefix:] for name, prefix in pairs]
        return tuple(leaf[tuple(index.to(leaf.device) for index in self._read)].flatten(1) for leaf in leaves)

    def _taken(self, parent: int | None) -> tuple[Tensor, ...] | None:
        if parent is None:
            return None
        self._waiting[parent] -= 1
        return self._kept[parent] if self._waiting[parent] else self._kept.pop(parent)

    def _measured(self, earlier: Tensor | None, before: Tensor, after: Tensor) -> Float[np.ndarray, "rows 3 2"]:
        """Per row and measure, the sum over scored tokens and how many they are."""
        total = torch.zeros(self._rows, len(MEASURES), 2, dtype=torch.float64)
        step = max(1, CHUNK // max(1, before.shape[1]))
        for start in range(0, len(before), step):
            part = slice(start, start + step)
            x0, x1 = before[part].double(), after[part].double()
            update = x1 - x0
            found = [_quotient(update.norm(dim=1), x0.norm(dim=1)), _cosine(x1, x0)]
            if earlier is not None:
                found.append(_cosine(update, x0 - earlier[part].double()))
            rows = self._read[0][part].cpu()
            for m, (values, counted) in enumerate(found):
                pairs = torch.stack([values, counted.double()], dim=1)
                total[:, m].index_add_(0, rows, pairs.cpu())
        return total.numpy()


def _path(node: PlanNode, name: str) -> list[PlanNode] | None:
    if name in node.wanted:
        return []
    for child in node.children:
        rest = _path(child, name)
        if rest is not None:
            return [child, *rest]
    return None


def _quotient(numerator: Tensor, denominator: Tensor) -> tuple[Tensor, Tensor]:
    """The quotient, 0 where it has none, and where it has one."""
    counted = denominator >= ZERO
    return torch.where(counted, numerator / denominator.clamp(min=ZERO), 0.0), counted


def _cosine(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The same for the cosine of two vectors per token."""
    aligned, has_x = _quotient((x * y).sum(dim=1), x.norm(dim=1))
    cosine, has_y = _quotient(aligned, y.norm(dim=1))
    return cosine, has_x & has_y


def updates(
    table: Float[np.ndarray, "documents applications components 3 2"], plan: Plan, components: Sequence[str]
) -> tuple[Update, ...]:
    """The measures of one schedule, application by application and component by component.

    Args:
        table: Tables of `UpdateMeter`, their rows put in the places of the documents; those of noise seeds added.
        plan: The schedule's own plan.
    """
    if table.shape[1:3] != (len(plan), len(components)):
        raise ValueError(
            f"updates: table must have {len(plan)} applications and {len(components)} components. "
            f"Got {table.shape[1]} and {table.shape[2]}. Give the plan of the schedule that was measured."
        )
    return tuple(_update(table[:, j, c], j, plan, name) for j in range(len(plan)) for c, name in enumerate(components))


def _update(table: Float[np.ndarray, "documents 3 2"], j: int, plan: Plan, name: str) -> Update:
    relative, state_cosine, update_cosine = (_document_means(table[:, m]) for m in range(len(MEASURES)))
    return Update(
        application=j,
        block=plan[j].block,
        iteration=plan[j].iteration,
        component=name,
        relative=_mean(relative),
        low=float(np.quantile(relative, 0.25)) if len(relative) else None,
        high=float(np.quantile(relative, 0.75)) if len(relative) else None,
        state_cosine=_mean(state_cosine),
        update_cosine=_mean(update_cosine),
    )


def _document_means(pairs: Float[np.ndarray, "documents 2"]) -> Float[np.ndarray, " counted"]:
    """Means of the documents in which something was counted."""
    counted = pairs[:, 1] > 0
    return pairs[counted, 0] / pairs[counted, 1]


def _mean(values: Float[np.ndarray, " counted"]) -> float | None:
    return float(values.mean()) if len(values) else None
