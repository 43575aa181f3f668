"""Blocks world: n blocks from random stacks to random stacks, one block at a time, on a table with room for all.

    on b, on t, on t   on t, on c, on t   <moves>   b>t a>b      what every block shall stand on, stands on; moves

A block is misplaced unless everything from it down to the table is as wanted. Only misplaced blocks move, and twice at
most: some plan as short as any puts each onto its final place, where that is ready, or onto the table. Up to 6 blocks
the reference is such a shortest plan; beyond, it has two phases, all misplaced blocks onto the table, then onto their
places. `bounds` says how far that may be from the shortest.

Reference: Gupta, Nau, "On the complexity of blocks-world planning", Artificial Intelligence 56 (1992); Slaney,
Thiebaux, "Blocks World revisited", Artificial Intelligence 125 (2001).
"""

import functools
import math
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from looplab.tasks.base import TASKS, Draws, check_trained
from looplab.tasks.moves import ASK, MARKS, MoveTask
from looplab.tasks.symmetry import Symmetry

TABLE = -1
OPTIMAL_TO = 6
"""Blocks up to which the reference is a shortest plan."""

Stacks = tuple[int, ...]
"""What every block stands on: a block, or TABLE."""


@dataclass(frozen=True)
class Rearrangement:
    """What every block stands on, and shall stand on."""

    stacks: Stacks
    goal: Stacks


@TASKS.register("blocks")
@dataclass(frozen=True, kw_only=True)
class Blocks(MoveTask):
    """Rearrange stacks of blocks. Arrangements are uniform."""

    blocks: int = 8
    """Blocks that have a name."""
    train: tuple[int, ...] = (3, 4)
    """Blocks to train at; tests go to twice the most."""

    def __post_init__(self) -> None:
        if not 2 <= self.blocks <= 26:
            raise ValueError(f"Blocks.blocks must be from 2 to 26. Got {self.blocks}. 8 is the usual number.")
        check_trained(self, self.train)

    @functools.cached_property
    def tokens(self) -> tuple[str, ...]:
        """`b>c` puts b onto c; `t` is the table."""
        names = self._names
        moves = (f"{block}>{below}" for block in names for below in ("t", *names) if block != below)
        return (*MARKS, *("on " + name for name in ("t", *names)), *moves)

    @property
    def train_difficulties(self) -> tuple[int, ...]:
        return self.train

    @property
    def test_difficulties(self) -> tuple[int, ...]:
        most = max(self.train)
        return tuple(sorted({*self.train, *range(most, min(2 * most, self.blocks) + 1)}))

    def check(self, difficulty: int) -> None:
        """Refuses a single block, which cannot be rearranged, and more than have a name."""
        if not 2 <= difficulty <= self.blocks:
            bound = "at least 2" if difficulty < 2 else f"at most {self.blocks}"
            raise ValueError(
                f"difficulty must be {bound} for {self.name}. Got {difficulty}. Blocks.blocks is how many have a name."
            )

    def most_moves(self, difficulty: int) -> int:
        """No block moves more than twice, and those that begin or end at the bottom once."""
        return 2 * difficulty - 2

    def difficulty_of(self, problem: Rearrangement) -> int:
        return len(problem.stacks)

    def space(self, difficulty: int) -> float:
        return float(arrangements(difficulty) * (arrangements(difficulty) - 1))

    def chance(self, difficulty: int) -> float:
        """The commonest plan is one block onto the table: it answers every start where that block is on another."""
        starts = sum(stacks * _with_stacks(difficulty - 1, stacks) for stacks in range(1, difficulty))
        return starts / self.space(difficulty)

    def draw(self, difficulty: int, draws: Draws) -> Rearrangement:
        while True:
            problem = Rearrangement(_random_stacks(difficulty, draws), _random_stacks(difficulty, draws))
            if problem.stacks != problem.goal:
                return problem

    def canonical(self, problem: Rearrangement) -> bytes:
        """The same under all names of blocks. What stands on, or shall stand on, or under a block leads from one to
        the next; a component is read from the block that makes it least, and the components are sorted."""
        steps = [problem.stacks, _above(problem.stacks), problem.goal, _above(problem.goal)]
        unseen, components = {*range(len(problem.stacks))}, []
        while unseen:
            first = _reading(steps, min(unseen))
            components.append(min(_reading(steps, root)[1] for root in first[0]))
            unseen -= {*first[0]}
        return repr(sorted(components)).encode()

    def decode(self, tokens: NDArray[np.int64]) -> Rearrangement:
        stated = [int(t) for t in tokens]
        stated = stated[: stated.index(ASK)] if ASK in stated else []
        count = len(stated) // 2
        on = tuple(token - self._table + TABLE for token in stated)
        goal, stacks = on[:count], on[count:]
        if count < 1 or len(stated) % 2 or not (_standing(stacks) and _standing(goal)):
            raise ValueError(
                f"blocks: tokens must say what every block shall stand on, then what it stands on, and {MARKS[ASK]}, "
                f"without circles or two blocks on one. Got {[int(t) for t in tokens][:8]}. Draw one with sample."
            )
        return Rearrangement(stacks, goal)

    def start(self, problem: Rearrangement) -> Stacks:
        return problem.stacks

    def play(self, problem: Rearrangement, position: Stacks, move: int) -> Stacks | None:
        block, below = divmod(move - self._first_move, self.blocks)
        below += TABLE if below <= block else 0  # the block itself is left out of the list
        if move < self._first_move or not max(block, below) < len(position):
            return None
        if block in position or (below != TABLE and below in position) or position[block] == below:
            return None
        return (*position[:block], below, *position[block + 1 :])

    def solved(self, problem: Rearrangement, position: Stacks) -> bool:
        return position == problem.goal

    def solve(self, problem: Rearrangement) -> tuple[int, ...]:
        plan = _shortest(problem) if len(problem.stacks) <= OPTIMAL_TO else _two_phases(problem)
        return tuple(self._first_move + block * self.blocks + below + (below < block) for block, below in plan)

    def bounds(self, problem: Rearrangement) -> tuple[int, int]:
        """Fewest and most moves that a shortest plan can have: misplaced blocks, and those of the two phases."""
        return _misplaced(problem.stacks, problem.goal).bit_count(), len(_two_phases(problem))

    def wanted(self, problem: Rearrangement) -> list[int]:
        return self.placed(problem, problem.goal)

    def placed(self, problem: Rearrangement, position: Stacks) -> list[int]:
        return [self._table - TABLE + below for below in position]

    def symmetries(self, difficulty: int) -> tuple[Symmetry, ...]:
        """Generators: two neighbouring blocks change names, and so what is said of them its place."""
        found, seq = [], self.length(difficulty)
        for block in range(difficulty - 1):
            order = list(range(self.blocks))
            order[block], order[block + 1] = block + 1, block
            renamed = [TABLE, *order]  # by number + 1
            marks = [self._table + 1 + below for below in renamed]
            moves = []
            for number in range(self.blocks**2):
                mover, below = divmod(number, self.blocks)
                below += TABLE if below <= mover else 0
                mover, below = order[mover], renamed[below + 1]
                moves.append(self._first_move + mover * self.blocks + below + (below < mover))
            places = [*order[:difficulty], *(difficulty + b for b in order[:difficulty]), *range(2 * difficulty, seq)]
            found.append(Symmetry(tuple(places), (*range(self._table), *marks, *moves)))
        return tuple(found)

    @property
    def _names(self) -> str:
        return "abcdefghijklmnopqrstuvwxyz"[: self.blocks].replace("t", "T")

    @property
    def _table(self) -> int:
        return len(MARKS)

    @property
    def _first_move(self) -> int:
        return len(MARKS) + 1 + self.blocks


def arrangements(blocks: int) -> int:
    """Ways to stack so many blocks: 1, 3, 13, 73, 501, .."""
    return sum(_with_stacks(blocks, stacks) for stacks in range(1, blocks + 1))


def _with_stacks(blocks: int, stacks: int) -> int:
    """Of these, those with so many stacks (Lah numbers)."""
    return math.comb(blocks - 1, stacks - 1) * math.factorial(blocks) // math.factorial(stacks)


def _random_stacks(blocks: int, draws: Draws) -> Stacks:
    """Uniform over arrangements: so many stacks with their probability, then an order of blocks cut in as many."""
    number, stacks = draws.integer(arrangements(blocks)), 1
    while number >= _with_stacks(blocks, stacks):
        number -= _with_stacks(blocks, stacks)
        stacks += 1
    order = draws.permutation(blocks)
    bottoms = {0, *draws.sample(range(1, blocks), stacks - 1)}
    on = [TABLE] * blocks
    for place in range(blocks):
        on[order[place]] = TABLE if place in bottoms else order[place - 1]
    return tuple(on)


def _standing(on: Stacks) -> bool:
    """Whether every block stands on the table in the end, and no two on the same."""
    blocks = [below for below in on if below != TABLE]
    if not {*on} <= {TABLE, *range(len(on))} or len({*blocks}) < len(blocks):
        return False
    reached = {TABLE}
    for _ in on:
        reached |= {block for block, below in enumerate(on) if below in reached}
    return len(reached) == len(on) + 1


def _above(on: Stacks) -> Stacks:
    """What stands on every block, or TABLE for nothing."""
    above = [TABLE] * len(on)
    for block, below in enumerate(on):
        if below != TABLE:
            above[below] = block
    return tuple(above)


def _reading(steps: list[Stacks], root: int) -> tuple[list[int], list[list[int]]]:
    """Blocks reached from a root in order, and where each step leads from each, by that order."""
    order, number = [root], {root: 0, TABLE: TABLE}
    for block in order:
        for step in steps:
            if step[block] not in number:
                number[step[block]] = len(order)
                order.append(step[block])
    return order, [[number[step[block]] for step in steps] for block in order]


def _misplaced(stacks: Stacks, goal: Stacks) -> int:
    """Set of blocks that have to move, as bits."""
    found = 0
    for block in range(len(stacks)):
        at = block
        while at != TABLE and stacks[at] == goal[at]:
            at = stacks[at]
        found |= (at != TABLE) << block
    return found


def _constructive(stacks: Stacks, goal: Stacks) -> tuple[int, int] | None:
    """A misplaced block that can go to its final place now."""
    wrong = _misplaced(stacks, goal)
    for block, below in enumerate(goal):
        ready = below == TABLE or (below not in stacks and not wrong >> below & 1)
        if ready and wrong >> block & 1 and block not in stacks:
            return block, below
    return None


def _put(stacks: Stacks, block: int, below: int) -> Stacks:
    return (*stacks[:block], below, *stacks[block + 1 :])


def _shortest(problem: Rearrangement) -> list[tuple[int, int]]:
    """A move to a final place is never a mistake; where there is none, some misplaced block goes to the table. Plans
    with fewer of those are shorter, so they are searched first."""
    queue = deque([(problem.stacks, list[tuple[int, int]]())])
    seen = {problem.stacks}
    while True:
        stacks, plan = queue.popleft()
        while (move := _constructive(stacks, problem.goal)) is not None:
            stacks, plan = _put(stacks, *move), [*plan, move]
        wrong = _misplaced(stacks, problem.goal)
        if not wrong:
            return plan
        for block in range(len(stacks)):
            after = _put(stacks, block, TABLE)
            if wrong >> block & 1 and block not in stacks and stacks[block] != TABLE and after not in seen:
                seen.add(after)
                queue.append((after, [*plan, (block, TABLE)]))


def _two_phases(problem: Rearrangement) -> list[tuple[int, int]]:
    """All misplaced blocks that are on another go to the table, upper ones first; then all to their places."""
    stacks, plan = problem.stacks, list[tuple[int, int]]()
    wrong = _misplaced(stacks, problem.goal)
    for block in sorted(range(len(stacks)), key=lambda block: -_height(stacks, block)):
        if wrong >> block & 1 and stacks[block] != TABLE:
            plan.append((block, TABLE))
    for block, _ in plan:
        stacks = _put(stacks, block, TABLE)
    while (move := _constructive(stacks, problem.goal)) is not None:
        stacks, plan = _put(stacks, *move), [*plan, move]
    return plan


def _height(stacks: Stacks, block: int) -> int:
    height = 0
    while stacks[block] != TABLE:
        block, height = stacks[block], height + 1
    return height
