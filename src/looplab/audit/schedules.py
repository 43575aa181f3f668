"""Schedules: rules that edit the full plan of a model, and what can be told apart by running them.

The full plan p is cut into units u_1 .. u_M. A unit is the shortest block sequence of which p is a repetition (a pass,
a cycle), the stretch between two marks where the readout was trained at several points of one plan, otherwise one
application. kmid is the number of leading units with the block sequence of u_1.

    full            u_1 .. u_M
    prefix(k)       u_1 .. u_k                          repeat(k)     u_1 .. u_k, then u_k another M-k times
    suffix(k)       u_{M-k+1} .. u_M                    same(a)       u_1, a times
    cyclic(a)       u_1 .. u_kmid in a cycle, a units   repeat_first(a)  u_1 (a-kmid+1) times, then u_2 .. u_kmid
    permute(seed)   units permuted inside each run of equal block sequence, no run of length >= 2 left as it is
    pinned(j)       p with every iteration index j
    layer_major     p stably sorted by block            pass_major    p stably sorted by iteration

A repeated application keeps its (block, iteration). The *word* of a plan writes each application as its operator class;
plans with equal words compute the same function, so a contrast between them carries no information.

Reference: Dau, Khuat, Dung, "Beyond Depth Truncation", arXiv:2609.19934, and its `depth-control-protocol` repository.
Deviation: what is trivial by construction is decided by words, for every schedule, and is never run.
"""

import dataclasses
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

from looplab._registry import did_you_mean
from looplab.audit.result import ScheduleEntry
from looplab.recurrence.plan import Application, Plan, PlanNode, Steps
from looplab.recurrence.spec import LoopSpec, Refuse

Word = tuple[tuple[int, int], ...]
"""A plan in operator classes: one (block, class) per application."""

NO_INDEX = "the block has no iteration index"
ONE_KIND = "only one kind of unit"
NOT_WRITTEN = "readout component not written"
RUNS_ONCE = "the first block runs once"
WHOLE_GAP = "takes the whole gap by construction"
SMALL_GRID = 16
"""Up to this many units, the default grid is every k."""


def same_plan(name: str) -> str:
    """The reason of a control that is another schedule."""
    return f"same plan as {name}"


@dataclasses.dataclass(frozen=True)
class FullPlan:
    """The plan that a checkpoint runs by default, cut into units, with what its LoopSpec says about sameness.

    `operator_class(block, iteration)`: equal values are the same function. `writers`: blocks that write what the
    readout reads. `max_iteration`: iteration indices below it have parameters of their own; None is no limit.
    """

    plan: Plan
    units: tuple[Plan, ...]
    operator_class: Callable[[int, int], int]
    writers: frozenset[int]
    max_iteration: int | None = None

    @classmethod
    def of(
        cls,
        plan: Plan,
        operator_class: Callable[[int, int], int],
        *,
        writers: Iterable[int] | None = None,
        marks: Sequence[int] = (),
        max_iteration: int | None = None,
    ) -> "FullPlan":
        """Cuts `plan` into units; without `writers` every block writes what the readout reads."""
        blocks = frozenset(block for block, _ in plan) if writers is None else frozenset(writers)
        return cls(plan, cut_units(plan, marks), operator_class, blocks, max_iteration)

    @property
    def M(self) -> int:  # noqa: N802 - the paper's letter
        """Units of the full plan."""
        return len(self.units)

    @property
    def kmid(self) -> int:
        """Leading units with the block sequence of the first."""
        return len(next(_runs(self.units)))

    def word(self, plan: Plan) -> Word:
        """The plan with every application replaced by its operator class."""
        return tuple((block, self.operator_class(block, iteration)) for block, iteration in plan)

    def boundaries(self) -> tuple[int, ...]:
        """Numbers of units after which the block sequence changes, and M."""
        ends, total = [], 0
        for run in _runs(self.units):
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
        asked = ",".join(map(str, steps)) if isinstance(steps, tuple) else steps
        raise ValueError(
            f"--num-steps {asked} needs iteration indices {limit}..{largest}, but the model has {limit}. "
            f"Use --num-steps {limit} or fewer."
        )
    marks = spec.marks(steps)
    return FullPlan.of(plan, spec.operator_class, writers=spec.writes_readout, marks=marks, max_iteration=limit)


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


def _runs(units: Sequence[Plan]) -> Iterator[tuple[Plan, ...]]:
    """Maximal runs of units with equal block sequence."""
    return (tuple(run) for _, run in groupby(units, key=_signature))


def _joined(units: Iterable[Plan]) -> Plan:
    return Plan(tuple(application for unit in units for application in unit))


def _permuted(full: FullPlan, seed: int) -> Plan:
    draw = random.Random(seed)
    units: list[Plan] = []
    for run in _runs(full.units):
        order = list(range(len(run)))
        while len(run) > 1 and order == sorted(order):
            draw.shuffle(order)
        units += [run[i] for i in order]
    return _joined(units)


def _cycle(full: FullPlan, a: int) -> Plan:
    return _joined(full.units[i % full.kmid] for i in range(a))


_RULES: dict[str, Callable[[FullPlan, int], Plan]] = {
    "full": lambda full, _: full.plan,
    "prefix": lambda full, k: _joined(full.units[:k]),
    "suffix": lambda full, k: _joined(full.units[full.M - k :]),
    "repeat": lambda full, k: _joined(full.units[:k] + full.units[k - 1 : k] * (full.M - k)),
    "same": lambda full, a: _joined(full.units[:1] * a),
    "cyclic": _cycle,
    "repeat_first": lambda full, a: _joined(full.units[:1] * (a - full.kmid + 1) + full.units[1 : full.kmid]),
    "permute": _permuted,
    "pinned": lambda full, j: Plan.of((block, j) for block, _ in full.plan),
    "layer_major": lambda full, _: Plan(tuple(sorted(full.plan, key=lambda application: application.block))),
    "pass_major": lambda full, _: Plan(tuple(sorted(full.plan, key=lambda application: application.iteration))),
}
_LETTER = {
    "prefix": "k",
    "suffix": "k",
    "repeat": "k",
    "same": "a",
    "cyclic": "a",
    "repeat_first": "a",
    "permute": "seed",
    "pinned": "j",
}
ORDERS = ("layer_major", "pass_major")
FORMS = (
    ", ".join(f"{family}({_LETTER[family]})" if family in _LETTER else family for family in _RULES) + " or [0.0 0.1]"
)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A rule with its argument, or an explicit plan. `str(schedule)` is the text form that `parse` reads."""

    family: str
    argument: int | None = None
    explicit: Plan | None = None

    def __str__(self) -> str:
        if self.explicit is not None:
            return str(self.explicit)
        return self.family if self.argument is None else f"{self.family}({self.argument})"

    @property
    def k(self) -> int | None:
        """The number of units a schedule of the grid is named by."""
        return self.argument if _LETTER.get(self.family) in ("k", "a") else None

    def plan(self, full: FullPlan) -> Plan:
        """The plan for one model.

        Raises:
            ValueError: The argument is out of range, or an index has no parameters, for this model.
        """
        if self.explicit is not None:
            plan = self.explicit
        else:
            self._check(full)
            plan = _RULES[self.family](full, self.argument or 0)
        self._check_indices(plan, full)
        return plan

    def _check(self, full: FullPlan) -> None:
        letter = _LETTER.get(self.family)
        if letter in ("k", "a") and self.argument is not None:
            low = full.kmid if self.family == "repeat_first" else 1
            if not low <= self.argument <= full.M:
                raise ValueError(f"schedule {self} needs {low} <= {letter} <= {full.M}. Got {self.argument}.")

    def _check_indices(self, plan: Plan, full: FullPlan) -> None:
        blocks = {block for block, _ in full.plan}
        for application in plan:
            if application.block not in blocks:
                raise ValueError(f"schedule {self} names block {application.block}, but the model has {_span(blocks)}.")
            if full.max_iteration is not None and application.iteration >= full.max_iteration:
                raise ValueError(
                    f"schedule {self} needs iteration index {application.iteration}, but the model has "
                    f"{full.max_iteration}. Use indices below {full.max_iteration}."
                )

    def check_read(self, full: FullPlan) -> None:
        """ValueError if the plan never writes what the readout reads."""
        if not self.written(full):
            names = " or ".join(str(block) for block in sorted(full.writers))
            raise ValueError(
                f"schedule {self} never runs block {names}, which writes what the readout reads. "
                f"End it with block {names}."
            )

    def written(self, full: FullPlan) -> bool:
        """Whether the plan writes the state component that the readout reads."""
        return any(block in full.writers for block, _ in self.plan(full))

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """Reads `repeat(2)`, `full` or `[0.0 0.1 1.0]`.

        Raises:
            ValueError: Anything else, with a suggestion.
        """
        stripped = text.strip()
        if stripped.startswith("["):
            try:
                return cls("explicit", explicit=Plan.parse(stripped))
            except ValueError:
                raise ValueError(f"cannot read schedule {text!r}. Forms: {FORMS}.") from None
        match = re.fullmatch(r"(\w+)(?:\((\d+)\))?", stripped)
        family, argument = match.groups() if match else (stripped, None)
        if family in _RULES and (family in _LETTER) == (argument is not None):
            return cls(family, None if argument is None else int(argument))
        hint = _suggestion(family, argument)
        raise ValueError(f"cannot read schedule {text!r}.{hint} Forms: {FORMS}.")


def _span(blocks: Iterable[int]) -> str:
    names = sorted(blocks)
    return f"block {names[0]}" if len(names) == 1 else f"blocks {names[0]}..{names[-1]}"


def _suggestion(family: str, argument: str | None) -> str:
    near = did_you_mean(family, list(_RULES))
    name = re.search(r"'(\w+)'", near)
    if name is None:
        return ""
    word = name.group(1)
    form = f"{word}({argument or _LETTER[word]})" if word in _LETTER else word
    return f" Did you mean {form!r}?"


def full() -> Schedule:
    """Every unit, as the checkpoint runs it."""
    return Schedule("full")


def prefix(k: int) -> Schedule:
    """The first k units: naive truncation."""
    return Schedule("prefix", k)


def suffix(k: int) -> Schedule:
    """The last k units, from the same initial state."""
    return Schedule("suffix", k)


def repeat(k: int) -> Schedule:
    """The first k units, the k-th one again until M: the decisive control."""
    return Schedule("repeat", k)


def same(a: int) -> Schedule:
    """The first unit a times."""
    return Schedule("same", a)


def cyclic(a: int) -> Schedule:
    """The first run of units in a cycle, a units."""
    return Schedule("cyclic", a)


def repeat_first(a: int) -> Schedule:
    """The extra units of the first run placed at its start, a units."""
    return Schedule("repeat_first", a)


def permute(seed: int) -> Schedule:
    """Units shuffled inside each run of equal block sequence."""
    return Schedule("permute", seed)


def pinned(j: int) -> Schedule:
    """The full plan with every iteration index j."""
    return Schedule("pinned", j)


def layer_major() -> Schedule:
    """All applications of a block before the next block."""
    return Schedule("layer_major")


def pass_major() -> Schedule:
    """All blocks of an iteration before the next iteration."""
    return Schedule("pass_major")


CONTROLS = ("suffix", "permute", "pinned", "order")
"""Families that `--controls` can name; full, prefix and repeat always run, because the decomposition needs them."""


def default_schedules(
    model: FullPlan,
    *,
    grid: Sequence[int] | None = None,
    controls: Sequence[str] | None = None,
    permutations: int = 4,
    extra: Sequence[Schedule] = (),
    landmarks: bool = True,
) -> tuple[Schedule, ...]:
    """What an audit runs, before trivial rows are struck out; `full` first, k = M never named twice.

    Args:
        grid: Numbers of units; None is the model's default grid.
        controls: Families besides full, prefix and repeat; None is all.
        extra: Further schedules, by name.
        landmarks: Add k = 1 and kmid, which the decomposition needs.

    Raises:
        ValueError: A grid value outside 1..M, an unknown control, or an extra schedule that the model cannot run.
    """
    ks = check_grid(model, grid)
    chosen = CONTROLS if controls is None else tuple(controls)
    for control in chosen:
        if control not in CONTROLS:
            hint = did_you_mean(control, list(CONTROLS))
            raise ValueError(f"--controls must be names out of {', '.join(CONTROLS)}. Got {control!r}.{hint}")
    first, middle = ({1}, {1, model.kmid}) if landmarks else (set(), set())
    rows = [full(), *(prefix(k) for k in sorted({*first, *ks}))]
    rows += [suffix(k) for k in ks] if "suffix" in chosen else []
    rows += [repeat(k) for k in sorted({*middle, *ks})]
    rows += permutes(model, permutations) if "permute" in chosen else []
    rows += [pinned(0)] if "pinned" in chosen else []
    rows += [_other_order(model)] if "order" in chosen else []
    for schedule in extra:
        schedule.plan(model)
        schedule.check_read(model)
    return tuple(dict.fromkeys(row for row in (*rows, *extra) if not _is_full_by_law(row, model)))


def check_grid(model: FullPlan, grid: Sequence[int] | None) -> tuple[int, ...]:
    """The grid in order, or the default one; ValueError for a value outside 1..M."""
    if grid is None:
        return model.default_grid()
    if not grid or any(not 1 <= k <= model.M for k in grid):
        raise ValueError(f"--grid must be whole numbers from 1 to {model.M}. Got {','.join(map(str, grid))!r}.")
    return tuple(sorted(set(grid)))


def _is_full_by_law(schedule: Schedule, model: FullPlan) -> bool:
    return schedule.family in ("prefix", "suffix", "repeat") and schedule.argument == model.M


def _other_order(model: FullPlan) -> Schedule:
    return next((Schedule(order) for order in ORDERS if Schedule(order).plan(model) != model.plan), layer_major())


def permutes(model: FullPlan, count: int, *, tries: int = 200) -> list[Schedule]:
    """`count` draws whose words differ from the full plan's and from each other; all of them if fewer exist.

    Where no permutation has another word, one draw stands for all, so that its row can say so.
    """
    seen = {model.word(model.plan)}
    found: list[Schedule] = []
    varied = any(len({model.word(unit) for unit in run}) > 1 for run in _runs(model.units))
    for seed in range(tries if varied else 0):
        if len(found) == count:
            break
        word = model.word(permute(seed).plan(model))
        if word not in seen:
            seen.add(word)
            found.append(permute(seed))
    return found or [permute(0)] * min(count, 1)


def schedule_map(model: FullPlan, schedules: Sequence[Schedule]) -> tuple[ScheduleEntry, ...]:
    """Plans, words and identifiability of every schedule, in order; rows with a reason are not run."""
    first: dict[Word, Schedule] = {}
    rows = []
    for schedule in schedules:
        plan = schedule.plan(model)
        word = model.word(plan)
        twin = first.setdefault(word, schedule)
        same_as = None if twin is schedule else str(twin)
        reason = sameness(model, plan, twin) if same_as else None if schedule.written(model) else NOT_WRITTEN
        rows.append(
            ScheduleEntry(
                name=str(schedule),
                family=schedule.family,
                k=schedule.k,
                plan=str(plan),
                word=str(Plan.of(word)),
                applications=len(plan),
                units=_units_in(plan, model),
                distinct=len(set(plan)),
                same_as=same_as,
                reason=reason,
            )
        )
    return tuple(rows)


def sameness(model: FullPlan, plan: Plan, twin: Schedule) -> str:
    """Why a plan has the word of `twin`: it is that plan, or its blocks do not see the index that differs."""
    indexed = {(block, model.operator_class(block, iteration)) for block, iteration in model.plan}
    blocks = {block for block, _ in model.plan}
    if plan == twin.plan(model) or len(indexed) > len(blocks):
        return same_plan(str(twin))
    return NO_INDEX


def trivial_contrasts(rows: Sequence[ScheduleEntry]) -> dict[tuple[str, str], str]:
    """Reasons for contrasts of a control that coincides with a schedule of another family, keyed by (plus, minus).

    Where repeat(k) is the full plan, prefix(k) - repeat(k) is the depth curve under another name.
    """
    families = {row.name: row.family for row in rows}
    trivial = {row.name: row.reason for row in rows if row.same_as and families[row.same_as] != row.family}
    pairs = ((plus.name, minus.name) for plus in rows for minus in rows)
    return {(plus, minus): reason for plus, minus in pairs if (reason := trivial.get(plus) or trivial.get(minus))}


def _units_in(plan: Plan, model: FullPlan) -> int:
    return len(plan) * model.M // len(model.plan)


def trie(words: dict[str, tuple[Plan, Word]]) -> PlanNode:
    """The tree of all distinct prefixes of the words, children in the order of the depth-first walk.

    Args:
        words: Schedule name -> its plan and word. Where words share a prefix, the plan named first is run.
    """
    root = PlanNode(None)
    index: dict[int, dict[tuple[int, int], PlanNode]] = {id(root): {}}
    for name, (plan, word) in words.items():
        node = root
        for application, letter in zip(plan, word, strict=True):
            children = index[id(node)]
            if letter not in children:
                children[letter] = child = PlanNode(Application(*application))
                index[id(child)] = {}
                node.children.append(child)
            node = children[letter]
        node.wanted.append(name)
    _order(root)
    return root


def _order(node: PlanNode) -> int:
    """Sorts children so that the one needing most states comes last; returns the states this subtree needs."""
    needs = sorted(((_order(child), i) for i, child in enumerate(node.children)), key=lambda pair: pair[0])
    node.children = [node.children[i] for _, i in needs]
    if not needs:
        return 1
    kept = [1 + need for need, _ in needs[:-1]]  # the node's own state waits for the later children
    return max([needs[-1][0], *kept])


def live_states(root: PlanNode) -> int:
    """Most states held at once by the depth-first walk, the initial one included: the trie's Horton-Strahler number."""
    return _order(root)


def minimal_applications(words: Iterable[Sequence[tuple[int, int]]]) -> int:
    """Fewest applications that make every word: the number of their distinct non-empty prefixes."""
    return len({tuple(word[:n]) for word in words for n in range(1, len(word) + 1)})


def naive_applications(plans: Iterable[Plan]) -> int:
    """Applications when every distinct plan is run alone from the initial state."""
    return sum(len(plan) for plan in set(plans))


def plan_words(model: FullPlan, schedules: Iterable[Schedule]) -> dict[str, Word]:
    """Schedule name -> word."""
    return {str(schedule): model.word(schedule.plan(model)) for schedule in schedules}
