"""When the rows of a launch leave: many residents, each with a rule, bounds and a delay of its own.

    known before it runs      num_steps, replayed depths, `full`, `fixed`
    same_step                 the rule sees step t and speaks before the row moves on
    offset_one                what it says of step t is read after step t + 1 was launched: hides the way to the host

A token whose rule fires at step f leaves after step min(f + delay, max); with offset_one never before f + 1, and the
chosen depth is then smaller than what was run. A gate that looks ahead fires for step t + 1 at step t, so it loses
nothing. Rows are grouped by rule, and a rule sees its whole group at once; what it remembers lies in a bank with one
place per seat. Where several blocks run in turn, a token leaves each by itself, and a rule starts anew in each.

Source: continuous depth batching, arXiv:2608.09444. Deviation: depths that are known never come late.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from looplab._types import Float, Int
from looplab.engine.bound import check_rule, work_of
from looplab.engine.request import DepthParams, RefusedError
from looplab.engine.stages import Decision, Job, Row
from looplab.recurrence import state as states
from looplab.recurrence.exit import EXIT_RULES, ExitRule, Seen, exit_rule
from looplab.recurrence.exit.base import readable
from looplab.recurrence.exit.full import FixedExit
from looplab.recurrence.kv.anchor import Anchor
from looplab.recurrence.kv.base import KVRule
from looplab.recurrence.spec import LoopSpec

NAMED = ("full", "fixed", "hazard", "latent", "acceleration", "kl", "entropy", "argmax")
"""Rules that need nothing but the model. Recorded depths come as `DepthParams.replay`."""


def loadable(
    spec: LoopSpec,
    max_steps: Sequence[int],
    *,
    gates: Mapping[str, ExitRule],
    refuses_exits: bool,
    allow_costly: bool,
) -> tuple[dict[str, ExitRule | None], dict[str, str]]:
    """Names of the rules that requests may use, and of the others with the reason why not.

    Args:
        max_steps: Most iterations of every section (`runner`).
        refuses_exits: Whether the KV rule needs every token to run equally deep.
    Returns:
        name -> rule of a gate (None: built by name); name -> why it is refused.
    """
    loaded: dict[str, ExitRule | None] = {}
    refused: dict[str, str] = {}
    for name in (*NAMED, *gates):
        try:
            rule = gates[name] if name in gates else _example(name)
            if rule.early:
                if refuses_exits:
                    raise ValueError("depth_indexed forbids exits; use last_exited")
                _check_answerable(rule, spec, len(max_steps))
                check_rule(
                    name, work_of(spec.cost), _per_block(spec, max_steps), reads_logits=rule.reads_logits,
                    allow_costly=allow_costly,
                )  # fmt: skip
            loaded[name] = gates.get(name)
        except ValueError as error:
            refused[name] = str(error)
    return loaded, refused


def build_rule(depth: DepthParams, loaded: Mapping[str, ExitRule | None], refused: Mapping[str, str]) -> ExitRule:
    """The rule of resolved depth parameters; its `min_steps` is 1, bounds are kept beside it.

    Raises:
        RefusedError: exit_unavailable, exit_refused or invalid_value.
    """
    name = depth.exit_rule or "full"
    if name in refused:
        code = "exit_refused" if "forbids exits" in refused[name] else "exit_unavailable"
        raise RefusedError(code, refused[name], "exit_rule")
    if name not in loaded:
        raise RefusedError("exit_unavailable", f"no exit rule {name}; loaded: {', '.join(loaded)}", "exit_rule")
    gate = loaded[name]
    try:
        if gate is None:
            return exit_rule(name, depth.exit_threshold)
        return gate if depth.exit_threshold is None else dataclasses.replace(gate, threshold=depth.exit_threshold)  # type: ignore[call-arg]
    except ValueError as error:
        raise RefusedError("invalid_value", str(error), "exit_threshold") from None


def check_bounds(rule: ExitRule, depth: DepthParams, kv_rule: KVRule) -> None:
    """Refuses a least depth below what the KV rule keeps apart.

    Raises:
        RefusedError: exit_refused.
    """
    least = 1 if depth.min_steps is None else depth.min_steps
    if rule.early and isinstance(kv_rule, Anchor) and least <= kv_rule.n:
        raise RefusedError(
            "exit_refused",
            f"first_then_shared({kv_rule.n + 1}) needs min_steps of at least {kv_rule.n + 1}; got {least}",
            "min_steps",
        )


class _Late:
    """Flags on their way to the host."""

    def __init__(self, flags: Tensor):
        self._event: torch.cuda.Event | None = None
        self._flags = flags
        self._list: list[bool] | None = None
        if flags.is_cuda:
            self._flags = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
            self._flags.copy_(flags, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[bool]:
        """One per row of the group; waits where they have not arrived."""
        if self._list is None:
            if self._event is not None:
                self._event.synchronize()
            self._list = self._flags.tolist()
        return self._list


class _Exit:
    """The way out of one resident, and how far its token is on it."""

    __slots__ = ("delay", "fired", "least", "most", "num_steps", "pending", "prompt", "replay", "rule")

    def __init__(self, job: Job, rule: ExitRule | None, most: Sequence[int]):
        depth = job.depth
        self.rule = rule
        self.prompt = len(job.tokens)
        self.num_steps = rule.num_steps if isinstance(rule, FixedExit) else depth.num_steps
        self.replay = depth.replay[job.choice] if depth.replay is not None else None
        self.least = 1 if depth.min_steps is None else depth.min_steps
        self.delay = 0 if depth.exit_delay is None else depth.exit_delay
        self.most = tuple(m if depth.max_steps is None else min(m, depth.max_steps) for m in most)
        self.fired = 0
        self.pending: tuple[_Late, int, int] | None = None

    def enter(self) -> None:
        """A token enters a block."""
        self.fired, self.pending = 0, None

    def goal_of(self, block: int, row: Row) -> int:
        """Steps that a token runs, where that is known before; else 0."""
        if row.depths:
            return row.depths[block]
        most, index = self.most[block], row.position - self.prompt
        if self.replay is not None:
            return min(self.replay[index], most) if index < len(self.replay) else most
        if self.num_steps is not None:
            return min(self.num_steps, most)
        return most if self.rule is None or not self.rule.early else 0

    def hear(self, steps: int) -> None:
        """Reads what its rule said a step ago."""
        if self.pending is not None:
            late, place, step = self.pending
            self.pending = None
            if late.read()[place]:
                self.fire(step)

    def fire(self, step: int) -> None:
        """The rule wants to stop after this step."""
        if step >= self.least and not self.fired:
            self.fired = step

    def decide(self, block: int, steps: int, goal: int) -> int:
        """Depth chosen, where the token leaves after `steps` steps; else 0."""
        most = self.most[block]
        end = goal or (min(self.fired + self.delay, most) if self.fired else most)
        return end if steps >= end else 0


Readout = Callable[[], Tensor]
"""Makes what a rule asks for of all rows of the launch, once it is asked for."""


class Exits:
    """The ways out of all residents."""

    def __init__(
        self, spec: LoopSpec, seats: int, max_steps: Sequence[int], *, offset_one: bool, device: torch.device | str
    ):
        self.spec, self.seats, self.max_steps, self.offset_one = spec, seats, tuple(max_steps), offset_one
        self.device = torch.device(device)
        self._of: dict[int, _Exit] = {}
        self._rules: dict[tuple[str, float | None], ExitRule] = {}
        self._memory: dict[type[ExitRule], Any] = {}

    def open(self, seat: int, job: Job, rule: ExitRule | None) -> None:
        """Takes a resident in. Equal rules become one, so that their rows are asked together."""
        if rule is not None:
            number = getattr(rule, rule.number) if rule.number else None
            rule = self._rules.setdefault((rule.name, number), rule)
        self._of[seat] = _Exit(job, rule, self.max_steps)

    def close(self, seat: int) -> None:
        """Lets a resident go."""
        self._of.pop(seat, None)

    def goal(self, block: int, row: Row) -> int:
        """Steps of a block that a token will run, where that is known; else 0."""
        return self._of[row.seat].goal_of(block, row)

    def after(
        self,
        block: int,
        rows: Sequence[Row],
        steps: Sequence[int],
        seats: Int[Tensor, " batch"],
        before: Any,
        state: Any,
        context: Any,
        *,
        score: Readout,
        logits: Readout,
        late: bool,
    ) -> list[Decision]:
        """Who leaves after a step. The first `len(rows)` rows of the tensors count, others are padding.

        Args:
            steps: Steps of this block that each row has now run.
            seats: Of the rows.
            before: State before the step.
            late: Whether the flags may be read a step later.
        """
        groups: dict[ExitRule, list[int]] = {}
        exits = [self._of[row.seat] for row in rows]
        # Known per token: rows of one resident may be guesses of few steps, and what confirms them.
        goals = [exit_.goal_of(block, row) for exit_, row in zip(exits, rows, strict=True)]
        for place, (exit_, step, goal) in enumerate(zip(exits, steps, goals, strict=True)):
            if step == 1:
                exit_.enter()
            exit_.hear(step)
            if not goal and not exit_.fired and step < exit_.most[block]:
                assert exit_.rule is not None
                groups.setdefault(exit_.rule, []).append(place)
        for rule, places in groups.items():
            self._ask(rule, places, exits, steps, seats, before, state, context, score, logits, late)
        return [
            Decision(exit_.decide(block, step, goal)) for exit_, step, goal in zip(exits, steps, goals, strict=True)
        ]

    def _ask(
        self,
        rule: ExitRule,
        places: list[int],
        exits: list[_Exit],
        steps: Sequence[int],
        seats: Tensor,
        before: Any,
        state: Any,
        context: Any,
        score: Readout,
        logits: Readout,
        late: bool,
    ) -> None:
        """Lets a rule see its group."""
        whole = len(places) == seats.shape[0]
        index = None if whole else torch.tensor(places, device=self.device)

        def of(tensor: Tensor) -> Tensor:
            return tensor if index is None else tensor[index]

        ages = [steps[place] for place in places]
        age = torch.tensor(ages, device=self.device)
        memory = self._recall(rule, of(seats), ages, of(readable(self.spec, before, 1)))
        seen = Seen(
            age,
            of(readable(self.spec, state, 1)),
            of(score()) if rule.reads_score else None,
            of(logits()) if rule.reads_logits else None,
            of(context.embeds) if rule.reads_context else None,
        )
        wants, kept = rule.observe(memory, seen)
        states.map(lambda bank, new: bank.index_copy_(0, of(seats), new), self._memory[type(rule)], kept)
        ahead = 0
        if late:
            wants, ahead = _ahead(rule, wants, kept, seen)
        flags = _Late(wants[:, 0])
        for number, place in enumerate(places):
            step = ages[number] + ahead
            if late:
                exits[place].pending = (flags, number, step)
            elif flags.read()[number]:
                exits[place].fire(step)

    def _recall(self, rule: ExitRule, seats: Tensor, ages: list[int], before: Float[Tensor, "batch 1 dim"]) -> Any:
        """What the rule remembers of these rows; at its first step, its start."""
        bank = self._memory.get(type(rule))
        first = [age == 1 for age in ages]
        started = rule.start(self.spec, before) if bank is None or any(first) else None
        if bank is None:
            rows = self.seats + 1
            bank = states.map(lambda leaf: leaf.new_zeros(rows, *leaf.shape[1:]), started)
            self._memory[type(rule)] = bank
        if all(first):
            return started
        held = states.select(bank, seats)
        return held if started is None else states.where(torch.tensor(first, device=self.device), started, held)


def _ahead(rule: ExitRule, wants: Tensor, memory: Any, seen: Seen) -> tuple[Tensor, int]:
    """Flags that are read a step later, and how much further than their own step they speak of."""
    if getattr(getattr(rule, "gate", None), "shift", 0):
        return memory.due, 1
    if rule.reads_context:  # known all along
        return rule.observe(memory, seen._replace(steps=seen.steps + 1))[0], 1
    return wants, 0


def _example(name: str) -> ExitRule:
    """A rule of this name with some number, for what does not depend on it."""
    number = EXIT_RULES[name].number
    return exit_rule(name, None if not number else 2 if number != "threshold" else 0.5)


def _check_answerable(rule: ExitRule, spec: LoopSpec, sections: int) -> None:
    """Refuses a rule that the model cannot answer; where blocks run in turn, all but those that read states alone."""
    if sections == 1:
        rule.check(spec)
    elif rule.reads_score or rule.reads_logits or rule.reads_context or hasattr(rule, "gate"):
        raise ValueError(
            f"exit rule {rule.name} must have a readout after every iteration; {spec.name} runs {sections} blocks in "
            "turn, and only its last one is read; use latent or acceleration"
        )


def _per_block(spec: LoopSpec, max_steps: Sequence[int]) -> list[float]:
    """Iterations of every block, where each section runs so many steps."""
    if len(max_steps) == len(spec.blocks):
        return [float(steps) for steps in max_steps]
    return [float(count) for _, count in sorted(spec.plan(max_steps[0]).iterations().items())]
