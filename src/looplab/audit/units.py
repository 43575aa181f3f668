"""The full plan of a model, cut into the units that schedules move: p = u_1 .. u_M.

A unit is the shortest block sequence of which p is a repetition (a pass, a cycle), the stretch between two marks where
the readout was trained at several points of one plan, otherwise one application. kmid is the number of leading units
with the block sequence of u_1. Where one block runs several times in a row inside a unit of several blocks, the model
has two levels, and those stretches are its inner runs.

Reference: Dau, Khuat, Dung, "Beyond Depth Truncation". Deviation: units of several applications; theirs have one.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

from looplab.audit.words import Word
from looplab.recurrence.plan import Plan, Steps
from looplab.recurrence.spec import LoopSpec, Refuse

SMALL_GRID = 16
"""Up to this many units, the default grid is every k."""


@dataclasses.dataclass(frozen=True)
class FullPlan:
    """The plan that a checkpoint runs by default, cut into units, with what its LoopSpec says about sameness.

    `operator_class(block, iteration)`: equal values are the same function. `writers`: blocks that write what the
    readout reads. `max_iteration`: iteration indices below it have parameters of their own; None is no limit. `grid`:
    k -> the iteration ids of k steps to the trained end time, where the model is conditioned on the step size.
    `layer_view`: the model offers its single layers as blocks.
    """

    plan: Plan
    units: tuple[Plan, ...]
    operator_class: Callable[[int, int], int]
    writers: frozenset[int]
    max_iteration: int | None = None
    grid: Callable[[int], tuple[int, ...]] | None = None
    layer_view: bool = False

    @classmethod
    def of(
        cls,
        plan: Plan,
        operator_class: Callable[[int, int], int],
        *,
        writers: Iterable[int] | None = None,
        marks: Sequence[int] = (),
        max_iteration: int | None = None,
        grid: Callable[[int], tuple[int, ...]] | None = None,
        layer_view: bool = False,
    ) -> "FullPlan":
        """Cuts `plan` into units; without `writers` every block writes what the readout reads."""
        blocks = frozenset(block for block, _ in plan) if writers is None else frozenset(writers)
        return cls(plan, cut_units(plan, marks), operator_class, blocks, max_iteration, grid, layer_view)

    @property
    def M(self) -> int:  # noqa: N802 - the paper's letter
        """Units of the full plan."""
        return len(self.units)

    @property
    def kmid(self) -> int:
        """Leading units with the block sequence of the first."""
        return len(next(runs(self.units)))

    @property
    def blocks(self) -> frozenset[int]:
        """Blocks that the full plan runs."""
        return frozenset(block for block, _ in self.plan)

    @property
    def regrids(self) -> bool:
        """Whether coarser grids replace the full plan: a grid, and units of one kind that run one index each."""
        one_index = all(len({iteration for _, iteration in unit}) == 1 for unit in self.units)
        return self.grid is not None and self.kmid == self.M and one_index

    @property
    def inner_block(self) -> int | None:
        """The block that runs several times in a row inside a unit of several blocks, everywhere equally often."""
        stretches = [(block, len(run)) for unit in self.units for block, run in block_runs(unit)]
        repeated = {stretch for stretch in stretches if stretch[1] > 1}
        if len(repeated) != 1 or len({block for block, _ in self.units[0]}) == 1:
            return None
        block, length = next(iter(repeated))
        return block if all(n == length for b, n in stretches if b == block) else None

    @property
    def inner(self) -> "FullPlan | None":
        """The first inner run as a full plan of its own, one application a unit; None without a second level."""
        stretches = (run for block, run in block_runs(self.units[0]) if block == self.inner_block)
        return next(map(self.within, stretches), None)

    def within(self, stretch: Plan) -> "FullPlan":
        """An inner run as a full plan of its own, one application a unit."""
        units = tuple(stretch[i : i + 1] for i in range(len(stretch)))
        return dataclasses.replace(self, plan=stretch, units=units, grid=None)

    def word(self, plan: Plan) -> Word:
        """The plan with every application replaced by its operator class."""
        return tuple((block, self.operator_class(block, iteration)) for block, iteration in plan)

    def boundaries(self) -> tuple[int, ...]:
        """Numbers of units after which the block sequence changes, and M."""
        ends, total = [], 0
        for run in runs(self.units):
            total += len(run)
            ends.append(total)
        return tuple(ends)

    def default_grid(self) -> tuple[int, ...]:
        """Every k up to M = 16; else powers of two, kmid, block boundaries and M."""
        if self.M <= SMALL_GRID:
            return tuple(range(1, self.M + 1))
        powers = {2**n for n in range(self.M.bit_length()) if 2**n <= self.M}
        return tuple(sorted(powers | {self.kmid, self.M} | set(self.boundaries())))


def full_plan(spec: LoopSpec, num_steps: Steps | None = None) -> FullPlan:
    """The full plan of a model, from its LoopSpec.

    Raises:
        ValueError: `num_steps` does not fit the model's order, or needs iteration indices beyond the model's own.
    """
    steps = spec.default_steps if num_steps is None else num_steps
    plan = spec.order.plan(steps, len(spec.blocks))
    limit = spec.max_iteration if isinstance(spec.beyond, Refuse) else None
    largest = max((iteration for _, iteration in plan), default=0)
    if limit is not None and largest >= limit:
        raise ValueError(_beyond_table(spec, steps, plan, limit, largest))
    return FullPlan.of(
        spec.regridded(plan),
        spec.operator_class,
        writers=spec.writes_readout,
        marks=spec.marks(steps),
        max_iteration=limit,
        grid=spec.grid,
        layer_view=spec.refine is not None,
    )


def _beyond_table(spec: LoopSpec, steps: Steps, plan: Plan, limit: int, largest: int) -> str:
    asked = ",".join(map(str, steps)) if isinstance(steps, tuple) else steps
    indices = f"indices {limit}..{largest}" if largest > limit else f"index {limit}"
    units = len(cut_units(plan, spec.marks(steps)))
    default = spec.order.plan(spec.default_steps, len(spec.blocks))
    longer = units > len(cut_units(default, spec.marks(spec.default_steps)))
    remedy = f"--extend {units} to reuse trained indices" if longer else f"at most {limit} steps of each block"
    return f"--num-steps {asked} needs iteration {indices}, but the model has {limit}. Use {remedy}."


def cut_units(plan: Plan, marks: Sequence[int] = ()) -> tuple[Plan, ...]:
    """The units of a plan. `marks`: numbers of applications after which the readout was trained."""
    if len(marks) > 1:
        return tuple(plan[start:end] for start, end in zip((0, *marks[:-1]), marks, strict=True))
    blocks = _signature(plan)
    length = next(
        (
            n
            for n in range(1, len(blocks) // 2 + 1)
            if len(blocks) % n == 0 and blocks == blocks[:n] * (len(blocks) // n)
        ),
        1,
    )
    return tuple(plan[start : start + length] for start in range(0, len(plan), length))


def _signature(plan: Plan) -> tuple[int, ...]:
    return tuple(block for block, _ in plan)


def runs(units: Sequence[Plan]) -> Iterator[tuple[Plan, ...]]:
    """Maximal runs of units with equal block sequence."""
    return (tuple(run) for _, run in groupby(units, key=_signature))


def block_runs(unit: Plan) -> Iterator[tuple[int, Plan]]:
    """Maximal stretches of one block, with the block."""
    return ((block, Plan(tuple(run))) for block, run in groupby(unit, key=lambda application: application.block))


def joined(units: Iterable[Plan]) -> Plan:
    """Units put one after the other."""
    return Plan(tuple(application for unit in units for application in unit))
