"""Plans: the ordered list of applications `(block, iteration)` that one forward pass runs.

    model-loop of one core, 3 loops           (0,0) (0,1) (0,2)
    layer-loop of three layers, 2 loops       (0,0) (0,1) (1,0) (1,1) (2,0) (2,1)
    two blocks of 4 iterations                (0,0) (0,1) (0,2) (0,3) (1,0) (1,1) (1,2) (1,3)
    two levels, 2 cycles of 2                 (0,0) (0,1) (1,0) (0,2) (0,3) (1,1)
    the same, supervised after each cycle     (0,0) (0,1) (1,0) | (0,2) (0,3) (1,1) |
    dense, 3 layers                           (0,0) (1,0) (2,0)

A plan order is the rule that turns a number of steps into a plan. Truncation, repetition, sampled depth and early exit
are edits of a plan or walks over one, written elsewhere. No PyTorch here.
"""

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, overload

PRELUDE = -1
CODA = -2
"""Stand-ins for a block where layers outside the loop are named, as in a key-value cache."""

Steps = int | tuple[int, ...]


class Application(NamedTuple):
    """One run of one block; `iteration` counts applications of the same block from 0."""

    block: int
    iteration: int


@dataclass(frozen=True)
class Plan:
    """An immutable sequence of applications. `str(plan)` is `[0.0 0.1 1.0]`, which `Plan.parse` reads."""

    applications: tuple[Application, ...]

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int]]) -> "Plan":
        """A plan of (block, iteration) pairs. A negative number is a ValueError."""
        applications = tuple(Application(block, iteration) for block, iteration in pairs)
        for application in applications:
            if min(application) < 0:
                raise ValueError(f"Plan: block and iteration must be at least 0. Got {tuple(application)}.")
        return cls(applications)

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """Reads `[0.0 0.1 1.0]`. Anything else is a ValueError."""
        match = re.fullmatch(r"\[\s*((?:\d+\.\d+(?:\s+\d+\.\d+)*)?)\s*\]", text.strip())
        if match is None:
            raise ValueError(f"Plan must be written like [0.0 0.1 1.0]. Got {text!r}.")
        return cls.of(tuple(int(part) for part in entry.split(".")) for entry in match.group(1).split())  # type: ignore[misc]

    def __len__(self) -> int:
        return len(self.applications)

    def __iter__(self) -> Iterator[Application]:
        return iter(self.applications)

    @overload
    def __getitem__(self, index: int) -> Application: ...
    @overload
    def __getitem__(self, index: slice) -> "Plan": ...
    def __getitem__(self, index: int | slice) -> "Application | Plan":
        picked = self.applications[index]
        return Plan(picked) if isinstance(index, slice) else picked  # type: ignore[arg-type,return-value]

    def __add__(self, other: "Plan") -> "Plan":
        return Plan(self.applications + other.applications)

    def __str__(self) -> str:
        return "[" + " ".join(f"{block}.{iteration}" for block, iteration in self) + "]"

    def iterations(self) -> dict[int, int]:
        """Block -> how many iterations of its own it runs; what a depth-indexed cache must hold."""
        return {block: len(set(indices)) for block, indices in self.indices().items()}

    def indices(self) -> dict[int, tuple[int, ...]]:
        """Block -> its iteration indices, in the order they run."""
        found: dict[int, tuple[int, ...]] = {}
        for block, iteration in self:
            found[block] = (*found.get(block, ()), iteration)
        return found


@dataclass
class PlanNode:
    """A node of the trie of several plans: each distinct non-empty prefix is one node, made once.

    `wanted` holds the names of the schedules that end here.
    """

    application: Application | None
    children: list["PlanNode"] = dataclasses.field(default_factory=list)
    wanted: list[str] = dataclasses.field(default_factory=list)

    def size(self) -> int:
        """Applications in this subtree, the node itself included; the root counts 0."""
        return (self.application is not None) + sum(child.size() for child in self.children)


def check_steps(num_steps: object) -> Steps:
    """`num_steps` if it is an int >= 0 or a tuple of such; otherwise a ValueError that says so."""
    entries = num_steps if isinstance(num_steps, tuple) else (num_steps,)
    if not entries or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in entries):
        raise ValueError(f"num_steps must be an int >= 0 or Int[batch]. Got {num_steps!r}")
    return num_steps  # type: ignore[return-value]


class PlanOrder(ABC):
    """Turns a number of steps into a plan over `num_blocks` blocks."""

    @property
    @abstractmethod
    def default_steps(self) -> Steps:
        """What the checkpoint's own forward runs."""

    @abstractmethod
    def plan(self, num_steps: Steps, num_blocks: int) -> Plan:
        """The plan of `num_steps`: an int gives every block that many iterations; a tuple gives one count each."""

    def marks(self, num_steps: Steps, num_blocks: int) -> tuple[int, ...]:
        """Numbers of applications after which the readout is trained; by default the end of the plan only."""
        return (len(self.plan(num_steps, num_blocks)),)


@dataclass(frozen=True, kw_only=True)
class ModelLoop(PlanOrder):
    """Block 0, `num_steps` times."""

    num_steps: int

    def __post_init__(self) -> None:
        check_steps(self.num_steps)

    @property
    def default_steps(self) -> int:
        return self.num_steps

    def plan(self, num_steps: Steps, num_blocks: int) -> Plan:
        if num_blocks != 1:
            raise ValueError(
                f"ModelLoop repeats one block. Got {num_blocks} blocks. Use Blocks(...) or LayerLoop(...)."
            )
        return _in_turn((_single(num_steps, "ModelLoop"),))


@dataclass(frozen=True, kw_only=True)
class LayerLoop(PlanOrder):
    """Every stored layer is a block and runs `num_steps` iterations before the next one starts."""

    num_steps: int

    def __post_init__(self) -> None:
        check_steps(self.num_steps)

    @property
    def default_steps(self) -> int:
        return self.num_steps

    def plan(self, num_steps: Steps, num_blocks: int) -> Plan:
        return _in_turn((_single(num_steps, "LayerLoop"),) * num_blocks)


@dataclass(frozen=True, kw_only=True)
class Blocks(PlanOrder):
    """Several blocks in turn, each with its own number of iterations."""

    num_steps: tuple[int, ...]

    def __post_init__(self) -> None:
        check_steps(self.num_steps)

    @property
    def default_steps(self) -> tuple[int, ...]:
        return self.num_steps

    def plan(self, num_steps: Steps, num_blocks: int) -> Plan:
        counts = num_steps if isinstance(check_steps(num_steps), tuple) else (num_steps,) * num_blocks
        if len(counts) != num_blocks:  # type: ignore[arg-type]
            raise ValueError(f"num_steps must have one entry per block ({num_blocks}). Got {num_steps!r}")
        return _in_turn(counts)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class TwoLevel(PlanOrder):
    """`h` high cycles; each applies block 0 (low) `l` times and then block 1 (high) once.

    `num_steps` as an int sets the number of high cycles; a tuple is (high cycles, low steps per cycle). `share`: both
    blocks use the same layers; otherwise the core's layers are split in half, high first. `repeats`: how often one
    application runs through its layers.
    """

    h: int = 2
    l: int = 3  # noqa: E741
    share: bool = True
    repeats: int = 1

    def __post_init__(self) -> None:
        if self.h < 1 or self.l < 1 or self.repeats < 1:
            raise ValueError(
                f"TwoLevel.h, l and repeats must be at least 1. Got h={self.h}, l={self.l}, repeats={self.repeats}. "
                "Without low steps use ModelLoop."
            )

    @property
    def default_steps(self) -> tuple[int, int]:
        return (self.h, self.l)

    def plan(self, num_steps: Steps, num_blocks: int) -> Plan:
        check_steps(num_steps)
        counts = num_steps if isinstance(num_steps, tuple) else (num_steps, self.l)
        if len(counts) != 2 or counts[1] < 1:
            raise ValueError(
                "num_steps of a two-level model must be an int, or (high cycles, low steps per cycle) with at least 1 "
                f"low step. Got {num_steps!r}"
            )
        high, low = counts
        pairs: list[tuple[int, int]] = []
        for cycle in range(high):
            pairs += [(0, cycle * low + step) for step in range(low)] + [(1, cycle)]
        return Plan.of(pairs)


@dataclass(frozen=True, kw_only=True)
class DeepSupervision(PlanOrder):
    """`steps` supervision steps; each is `h` high cycles of `l` low applications and one high, as in `TwoLevel`.

    The readout is trained after every supervision step. `num_steps` counts supervision steps.
    """

    steps: int
    h: int
    l: int  # noqa: E741

    def __post_init__(self) -> None:
        for name in ("steps", "h", "l"):
            if getattr(self, name) < 1:
                raise ValueError(f"DeepSupervision.{name} must be at least 1. Got {getattr(self, name)}.")

    @property
    def default_steps(self) -> int:
        return self.steps

    @property
    def applications(self) -> int:
        """Applications of one supervision step."""
        return self.h * (self.l + 1)

    def plan(self, num_steps: Steps, num_blocks: int) -> Plan:
        cycles = self.h * _single(num_steps, "DeepSupervision")
        return TwoLevel(h=self.h, l=self.l).plan((cycles, self.l), num_blocks)

    def marks(self, num_steps: Steps, num_blocks: int) -> tuple[int, ...]:
        count = _single(num_steps, "DeepSupervision")
        return tuple(self.applications * (step + 1) for step in range(count))


@dataclass(frozen=True, kw_only=True)
class Sequential(PlanOrder):
    """A dense stack: every block once, in order. Only `num_steps` 1 exists."""

    @property
    def default_steps(self) -> int:
        return 1

    def plan(self, num_steps: Steps, num_blocks: int) -> Plan:
        if check_steps(num_steps) != 1:
            raise ValueError(f"num_steps of a dense model must be 1: no block is repeated. Got {num_steps!r}")
        return _in_turn((1,) * num_blocks)


def _single(num_steps: Steps, order: str) -> int:
    check_steps(num_steps)
    if isinstance(num_steps, tuple):
        if len(num_steps) != 1:
            raise ValueError(f"num_steps of {order} must be one int. Got {num_steps!r}")
        return num_steps[0]
    return num_steps


def _in_turn(counts: tuple[int, ...]) -> Plan:
    return Plan.of((block, iteration) for block, count in enumerate(counts) for iteration in range(count))
