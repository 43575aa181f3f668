"""Schedules: rules that edit the full plan of a model, and what can be told apart by running them.

The full plan p is cut into units u_1 .. u_M, of which the first kmid have the block sequence of u_1 (`units.py`).

    full            u_1 .. u_M
    prefix(k)       u_1 .. u_k                          repeat(k)     u_1 .. u_k, then u_k another M-k times
    suffix(k)       u_{M-k+1} .. u_M                    same(a)       u_1, a times
    cyclic(a)       u_1 .. u_kmid in a cycle, a units   repeat_first(a)  u_1 (a-kmid+1) times, then u_2 .. u_kmid
    permute(seed)   units permuted inside each run of equal block sequence, no run of length >= 2 left as it is
    pinned(j)       p with every iteration index j
    layer_major     p stably sorted by block            pass_major    p stably sorted by iteration
    regrid(k)       the k iteration ids of grid(k): k steps to the trained end time
    extend_last(a)  p, then u_M again, a > M units      extend_cycle(a)  p, then its last run in a cycle, a > M units
    inner(x)        x applied to every inner run as if it were a full plan, the rest of each unit kept

A repeated application keeps its (block, iteration), past M too: no schedule makes an index that the full plan or the
grid does not have. Where a model may go on counting, this is the same word: clamped indices go on as extend_last,
indices that start over as extend_cycle, and a block without an index as both.

The *word* of a plan writes each application as its operator class; plans with equal words compute the same function, so
a contrast between them carries no information.

Reference: Dau, Khuat, Dung, "Beyond Depth Truncation", arXiv:2609.19934, and its `depth-control-protocol` repository.
Deviation: what is trivial by construction is decided by words, for every schedule, and is never run.
"""

import dataclasses
import random
import re
from collections.abc import Callable, Iterable, Sequence

from looplab._registry import did_you_mean
from looplab.audit.result import ScheduleEntry
from looplab.audit.units import FullPlan, block_runs, joined, runs
from looplab.audit.units import cut_units as cut_units
from looplab.audit.units import full_plan as full_plan
from looplab.audit.words import Word
from looplab.audit.words import live_states as live_states
from looplab.audit.words import minimal_applications as minimal_applications
from looplab.audit.words import naive_applications as naive_applications
from looplab.audit.words import trie as trie
from looplab.recurrence.plan import Plan

NO_INDEX = "the block has no iteration index"
ONE_KIND = "only one kind of unit"
NOT_WRITTEN = "readout component not written"
NO_LAYER_VIEW = "model offers no layer view"
RUNS_ONCE = "the first block runs once"
WHOLE_GAP = "takes the whole gap by construction"


def same_plan(name: str) -> str:
    """The reason of a control that is another schedule."""
    return f"same plan as {name}"


def _permuted(full: FullPlan, seed: int) -> Plan:
    draw = random.Random(seed)
    units: list[Plan] = []
    for run in runs(full.units):
        order = list(range(len(run)))
        while len(run) > 1 and order == sorted(order):
            draw.shuffle(order)
        units += [run[i] for i in order]
    return joined(units)


def _cycle(full: FullPlan, a: int) -> Plan:
    return joined(full.units[i % full.kmid] for i in range(a))


def _extend_cycle(full: FullPlan, a: int) -> Plan:
    *_, last = runs(full.units)
    return full.plan + joined(last[i % len(last)] for i in range(a - full.M))


def _regrid(full: FullPlan, k: int) -> Plan:
    ids = () if full.grid is None else full.grid(k)
    return Plan.of((block, i) for i in ids for block, _ in full.units[0])


_RULES: dict[str, Callable[[FullPlan, int], Plan]] = {
    "full": lambda full, _: full.plan,
    "prefix": lambda full, k: joined(full.units[:k]),
    "suffix": lambda full, k: joined(full.units[full.M - k :]),
    "repeat": lambda full, k: joined(full.units[:k] + full.units[k - 1 : k] * (full.M - k)),
    "same": lambda full, a: joined(full.units[:1] * a),
    "cyclic": _cycle,
    "repeat_first": lambda full, a: joined(full.units[:1] * (a - full.kmid + 1) + full.units[1 : full.kmid]),
    "permute": _permuted,
    "pinned": lambda full, j: Plan.of((block, j) for block, _ in full.plan),
    "layer_major": lambda full, _: Plan(tuple(sorted(full.plan, key=lambda application: application.block))),
    "pass_major": lambda full, _: Plan(tuple(sorted(full.plan, key=lambda application: application.iteration))),
    "regrid": _regrid,
    "extend_last": lambda full, a: full.plan + joined(full.units[-1:] * (a - full.M)),
    "extend_cycle": _extend_cycle,
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
    "regrid": "k",
    "extend_last": "a",
    "extend_cycle": "a",
    "inner": "x",
}
ORDERS = ("layer_major", "pass_major")
EXTENSIONS = ("extend_last", "extend_cycle")
INNER = ("prefix", "suffix", "repeat", "same", "permute", "pinned")
"""What `inner` can apply to an inner run; k and a count its applications. The other rules say nothing new there."""
_FAMILIES = (*_RULES, "inner")
FORMS = (
    ", ".join(f"{family}({_LETTER[family]})" if family in _LETTER else family for family in _FAMILIES) + " or [0.0 0.1]"
)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A rule with its argument, or an explicit plan. `str(schedule)` is the text form that `parse` reads.

    `inside` is the argument of `inner`: the schedule of every inner run.
    """

    family: str
    argument: int | None = None
    explicit: Plan | None = None
    inside: "Schedule | None" = None

    def __str__(self) -> str:
        if self.explicit is not None:
            return str(self.explicit)
        argument = self.argument if self.inside is None else self.inside
        return self.family if argument is None else f"{self.family}({argument})"

    @property
    def k(self) -> int | None:
        """The number of units a schedule of the grid is named by; for `inner`, that of its inner runs."""
        if self.inside is not None:
            return self.inside.k
        return self.argument if _LETTER.get(self.family) in ("k", "a") else None

    def plan(self, full: FullPlan) -> Plan:
        """The plan for one model.

        Raises:
            ValueError: The argument is out of range, an index has no parameters, or the rule does not apply, for this
                model.
        """
        if self.explicit is not None:
            plan = self.explicit
        elif self.inside is not None:
            plan = self._inner_plan(full, self.inside)
        else:
            self._check(full)
            plan = _RULES[self.family](full, self.argument or 0)
        self._check_indices(plan, full)
        return plan

    def _inner_plan(self, full: FullPlan, inside: "Schedule") -> Plan:
        if full.inner is None:
            raise ValueError(
                f"schedule {self} needs a model with two levels. Got one whose units hold no inner run. Use {inside}."
            )
        inside._check(full.inner, str(self))
        return joined(
            _RULES[inside.family](full.within(stretch), inside.argument or 0) if block == full.inner_block else stretch
            for unit in full.units
            for block, stretch in block_runs(unit)
        )

    def _check(self, full: FullPlan, name: str = "") -> None:
        name, letter = name or str(self), _LETTER.get(self.family)
        if self.family in EXTENSIONS:
            if self.argument is not None and self.argument <= full.M:
                raise ValueError(f"schedule {name} needs a > {full.M}. Got {self.argument}.")
            return
        if self.family == "regrid" and not full.regrids:
            raise ValueError(
                f"schedule {name} needs one kind of unit, conditioned on the step size. Got a model without such a "
                f"grid. Use prefix({self.argument})."
            )
        if letter in ("k", "a") and self.argument is not None:
            low = full.kmid if self.family == "repeat_first" else 1
            if not low <= self.argument <= full.M:
                raise ValueError(f"schedule {name} needs {low} <= {letter} <= {full.M}. Got {self.argument}.")

    def _check_indices(self, plan: Plan, full: FullPlan) -> None:
        for application in plan:
            if application.block not in full.blocks:
                raise ValueError(
                    f"schedule {self} names block {application.block}, but the model has {_span(full.blocks)}."
                )
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
        """Reads `repeat(2)`, `full`, `inner(prefix(1))` or `[0.0 0.1 1.0]`.

        Raises:
            ValueError: Anything else, with a suggestion.
        """
        found = cls._read(text.strip())
        if found is None:
            raise ValueError(f"cannot read schedule {text!r}.{_suggestion(text.strip())} Forms: {FORMS}.")
        return found

    @classmethod
    def _read(cls, text: str) -> "Schedule | None":
        if text.startswith("["):
            try:
                return cls("explicit", explicit=Plan.parse(text))
            except ValueError:
                return None
        family, argument = _parts(text)
        if family == "inner" and argument is not None:
            inside = cls._read(argument)
            return cls(family, inside=inside) if inside is not None and inside.family in INNER else None
        if family not in _RULES or (family in _LETTER) != (argument is not None):
            return None
        if argument is None:
            return cls(family)
        return cls(family, int(argument)) if re.fullmatch(r"[0-9]+", argument) else None


def _parts(text: str) -> tuple[str, str | None]:
    """The family and what stands between its brackets."""
    match = re.fullmatch(r"(\w+)(?:\((.+)\))?", text)
    return (match.group(1), match.group(2)) if match else (text, None)


def _span(blocks: Iterable[int]) -> str:
    names = sorted(blocks)
    return f"block {names[0]}" if len(names) == 1 else f"blocks {names[0]}..{names[-1]}"


def _suggestion(text: str) -> str:
    near = _nearest(text, _FAMILIES)
    return f" Did you mean {near!r}?" if near and near != text else ""


def _nearest(text: str, families: Sequence[str]) -> str | None:
    """The form nearest to an unreadable text, its number kept."""
    family, argument = _parts(text)
    name = re.search(r"'(\w+)'", did_you_mean(family, list(families)))
    if name is None:
        return None
    word = name.group(1)
    if word == "inner":
        argument = _nearest(argument, INNER) if argument else "prefix(k)"
        return f"inner({argument})" if argument else None
    if word not in _LETTER:
        return word
    return f"{word}({argument if argument and re.fullmatch(r'[0-9]+', argument) else _LETTER[word]})"


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


def regrid(k: int) -> Schedule:
    """k larger steps to the trained end time, for a model conditioned on the step size."""
    return Schedule("regrid", k)


def extend_last(a: int) -> Schedule:
    """The full plan, then its last unit again, a units in all."""
    return Schedule("extend_last", a)


def extend_cycle(a: int) -> Schedule:
    """The full plan, then its last run in a cycle, a units in all."""
    return Schedule("extend_cycle", a)


def inner(inside: Schedule) -> Schedule:
    """`inside` applied to every inner run of a two-level model.

    Raises:
        ValueError: A family that says nothing about an inner run.
    """
    if inside.family not in INNER:
        raise ValueError(f"inner: the schedule must be one of {', '.join(INNER)}. Got {inside}. Use inner(prefix(1)).")
    return Schedule("inner", inside=inside)


CONTROLS = ("suffix", "factorial", "permute", "pinned", "order", "regrid", "inner")
"""Families that `--controls` can name; full, prefix and repeat always run, because the decomposition needs them."""


def default_schedules(
    model: FullPlan,
    *,
    grid: Sequence[int] | None = None,
    controls: Sequence[str] | None = None,
    permutations: int = 4,
    extend: Sequence[int] = (),
    extra: Sequence[Schedule] = (),
    landmarks: bool = True,
) -> tuple[Schedule, ...]:
    """What an audit runs, before trivial rows are struck out; `full` first, k = M never named twice.

    Args:
        grid: Numbers of units; None is the model's default grid.
        controls: Families besides full, prefix and repeat; None is all.
        extend: Numbers of units above M, each reached in both ways.
        extra: Further schedules, by name.
        landmarks: Add k = 1 and kmid, which the decomposition needs.

    Raises:
        ValueError: A grid value outside 1..M, an extension that is none, an unknown control, or an extra schedule that
            the model cannot run.
    """
    ks = check_grid(model, grid)
    _check_extend(model, extend)
    chosen = _check_controls(controls)
    factorial = _factorial_cells(model) if "factorial" in chosen else []
    first, middle = ({1}, {1, model.kmid}) if landmarks else (set(), set())
    rows = [full(), *(prefix(k) for k in sorted({*first, *ks, *({model.kmid} if factorial else ())}))]
    rows += [suffix(k) for k in ks] if "suffix" in chosen else []
    rows += [repeat(k) for k in sorted({*middle, *ks})]
    rows += factorial
    rows += permutes(model, permutations) if "permute" in chosen else []
    rows += [pinned(0)] if "pinned" in chosen else []
    rows += [_other_order(model)] if "order" in chosen else []
    rows += [regrid(k) for k in ks if model.regrids] if "regrid" in chosen else []
    rows += _inner_rows(model) if "inner" in chosen else []
    rows += [Schedule(family, a) for a in sorted(set(extend)) for family in EXTENSIONS]
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


def _check_extend(model: FullPlan, extend: Sequence[int]) -> None:
    if any(a <= model.M for a in extend):
        raise ValueError(
            f"--extend must be whole numbers above {model.M}, the units of the full plan. "
            f"Got {','.join(map(str, extend))!r}."
        )


def _check_controls(controls: Sequence[str] | None) -> tuple[str, ...]:
    chosen = CONTROLS if controls is None else tuple(controls)
    for control in chosen:
        if control not in CONTROLS:
            hint = did_you_mean(control, list(CONTROLS))
            raise ValueError(f"--controls must be names out of {', '.join(CONTROLS)}. Got {control!r}.{hint}")
    return chosen


def _factorial_cells(model: FullPlan) -> list[Schedule]:
    """Count by index on the first run, where it is longer than one unit and not everything."""
    if not 2 <= model.kmid < model.M:
        return []
    return [same(model.kmid), cyclic(model.M), repeat_first(model.M)]


def _inner_rows(model: FullPlan) -> list[Schedule]:
    run = model.inner
    return [] if run is None else [inner(prefix(k)) for k in run.default_grid() if k < run.M]


def _is_full_by_law(schedule: Schedule, model: FullPlan) -> bool:
    if schedule.family == "regrid":
        return schedule.plan(model) == model.plan
    return schedule.family in ("prefix", "suffix", "repeat") and schedule.argument == model.M


def _other_order(model: FullPlan) -> Schedule:
    return next((Schedule(order) for order in ORDERS if Schedule(order).plan(model) != model.plan), layer_major())


def permutes(model: FullPlan, count: int, *, tries: int = 200) -> list[Schedule]:
    """`count` draws whose words differ from the full plan's and from each other; all of them if fewer exist.

    Where no permutation has another word, one draw stands for all, so that its row can say so.
    """
    seen = {model.word(model.plan)}
    found: list[Schedule] = []
    varied = any(len({model.word(unit) for unit in run}) > 1 for run in runs(model.units))
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
        rows.append(
            ScheduleEntry(
                name=str(schedule),
                family=schedule.family,
                k=schedule.k,
                plan=str(plan),
                word=str(Plan.of(word)),
                applications=len(plan),
                units=_units_in(schedule, plan, model),
                distinct=len(set(plan)),
                same_as=same_as,
                reason=_reason(model, schedule, plan, twin),
            )
        )
    return tuple(rows)


def _reason(model: FullPlan, schedule: Schedule, plan: Plan, twin: Schedule) -> str | None:
    if twin is schedule:
        return None if schedule.written(model) else NOT_WRITTEN
    if schedule.family == "layer_major" and len(model.blocks) == 1 and not model.layer_view:
        return NO_LAYER_VIEW
    return sameness(model, plan, twin)


def sameness(model: FullPlan, plan: Plan, twin: Schedule) -> str:
    """Why a plan has the word of `twin`: it is that plan, or its blocks do not see the index that differs."""
    indexed = {(block, model.operator_class(block, iteration)) for block, iteration in model.plan}
    if plan == twin.plan(model) or len(indexed) > len(model.blocks):
        return same_plan(str(twin))
    return NO_INDEX


def _units_in(schedule: Schedule, plan: Plan, model: FullPlan) -> int:
    """Units of a plan; for `inner`, those of one inner run."""
    if schedule.inside is not None and model.inner is not None:
        return len(schedule.inside.plan(model.inner))
    return len(plan) * model.M // len(model.plan)


def plan_words(model: FullPlan, schedules: Iterable[Schedule]) -> dict[str, Word]:
    """Schedule name -> word."""
    return {str(schedule): model.word(schedule.plan(model)) for schedule in schedules}
