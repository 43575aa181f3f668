"""The contract of an exit rule: after which step a token stops.

    memory_0 = start(spec, s_0);   (stop_t, memory_t) = observe(memory_{t-1}, what is seen after step t)
    a token stops after the first step t >= min_steps with stop_t, and after max_steps at the latest

A rule is a frozen object without state of its own. What it has to remember is a NamedTuple of tensors whose first axis
is the row, handed in and handed back, and `Seen.steps` has one entry per row: rows of different ages can share a call.
The decision about a step uses the state after that step.
"""

import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from looplab._registry import Registry
from looplab._types import Bool, Float, Int
from looplab.recurrence import state as states
from looplab.recurrence.plan import PlanOrder, Steps
from looplab.recurrence.spec import LoopSpec

EXIT_RULES: Registry[type["ExitRule"]] = Registry("exit rule", package="looplab.recurrence.exit")


class Seen(NamedTuple):
    """What a rule sees of every row after a step. Each tensor has the row as first axis."""

    steps: Int[Tensor, " batch"]
    """Steps that the row has run, from 1."""
    state: Float[Tensor, "batch seq dim"]
    """The part of the state that the readout reads."""
    score: Tensor | None = None
    """`model.halt(state)`, where the rule asks for it."""
    logits: Float[Tensor, "batch seq cells symbols"] | None = None
    """Readout of the state, where the rule asks for it; one cell where a position is one token."""
    context: Float[Tensor, "batch seq width"] | None = None
    """Output of the prelude, where the rule asks for it."""


class Nothing(NamedTuple):
    """The memory of a rule that has none."""


@dataclass(frozen=True, kw_only=True)
class ExitRule(ABC):
    """When a token stops. `str(rule)` is its command-line form, such as `hazard(0.5)`."""

    min_steps: int = 1
    """No token stops before it."""

    number: ClassVar[str] = ""
    """The field that `exit_rule(threshold=...)` sets; empty: the rule has no number."""
    reads_score: ClassVar[bool] = False
    """Whether it needs the model's trained stopping score."""
    reads_logits: ClassVar[bool] = False
    """Whether it needs coda and head after every step."""
    reads_context: ClassVar[bool] = False
    """Whether it needs what the prelude made of the token."""

    def __post_init__(self) -> None:
        if isinstance(self.min_steps, bool) or not isinstance(self.min_steps, int) or self.min_steps < 1:
            raise ValueError(f"{type(self).__name__}.min_steps must be an int of at least 1. Got {self.min_steps!r}.")

    @property
    def early(self) -> bool:
        """False where every token stops after the same step, known before the run."""
        return True

    def check(self, spec: LoopSpec) -> None:
        """Refuses a rule that the model cannot answer.

        Raises:
            ValueError: The rule needs a trained score that the model does not have, or may stop early while no shorter
                run lies on the way of the model's own run.
        """
        if self.early:
            check_early(spec, self, exit_points(spec))

    def fits(self, points: Mapping[int, int]) -> None:
        """Refuses bounds that a run with these exit points (`exit_points`) cannot keep."""
        if self.min_steps > max(points):
            raise ValueError(
                f"exit: min_steps of {self} must be at most num_steps, {max(points)}. Got {self.min_steps}. "
                "Raise num_steps or lower min_steps"
            )

    def start(self, spec: LoopSpec, state: Float[Tensor, "batch seq dim"]) -> Any:
        """The memory before step 1.

        Args:
            state: What the readout reads of the state before the first application.
        """
        return Nothing()

    @abstractmethod
    def observe(self, memory: Any, seen: Seen) -> tuple[Bool[Tensor, "batch seq"], Any]:
        """Which tokens may stop now, and the memory for the next step."""

    def stops(self, memory: Any, seen: Seen, max_steps: int) -> tuple[Bool[Tensor, "batch seq"], Any]:
        """`observe`, within the bounds: never before `min_steps`, always at `max_steps`."""
        wants, memory = self.observe(memory, seen)
        age = seen.steps[:, None]
        return (wants & (age >= self.min_steps)) | (age >= max_steps), memory

    @property
    def name(self) -> str:
        """Name in the registry."""
        return next(name for name in EXIT_RULES if EXIT_RULES[name] is type(self))

    def __str__(self) -> str:
        inside = [f"{getattr(self, self.number):g}"] if self.number else []
        inside += [f"min_steps={self.min_steps}"] if self.min_steps != 1 else []
        return f"{self.name}({', '.join(inside)})" if inside else self.name


def exit_rule(name: str, threshold: float | int | None = None, *, min_steps: int = 1) -> ExitRule:
    """The rule of a command line: `exit_rule("hazard", 0.5)` is `HazardExit(threshold=0.5)`.

    Raises:
        KeyError: No rule has this name.
        ValueError: A threshold is missing, out of range, or given to a rule that has none; the rule needs more than one
            number and cannot be named on a command line.
    """
    rule = EXIT_RULES[name]
    number = rule.number
    required = [field.name for field in dataclasses.fields(rule) if field.default is dataclasses.MISSING]
    if set(required) - {number}:
        raise ValueError(
            f"exit rule {name} needs {', '.join(required)}, which is no single number. Build {rule.__name__} in Python"
        )
    if not number:
        if threshold is not None:
            raise ValueError(f"exit rule {name} takes no threshold. Got {threshold}. Leave it out")
        return rule(min_steps=min_steps)
    if threshold is None:
        raise ValueError(f"exit rule {name} needs a threshold, which sets {rule.__name__}.{number}. Got none. Give one")
    whole = number != "threshold" and float(threshold).is_integer()
    return rule(min_steps=min_steps, **{number: int(threshold) if whole else float(threshold)})


def check_positive(rule: ExitRule, threshold: float) -> None:
    """Refuses a threshold that is not a finite number above 0."""
    if not (math.isfinite(threshold) and threshold > 0):
        raise ValueError(
            f"{type(rule).__name__}.threshold must be a finite number above 0. Got {threshold}. "
            "Use FullExit() to run every step"
        )


def check_count(rule: ExitRule, field: str, least: int) -> None:
    """Refuses a count that is not an int of at least `least`."""
    value = getattr(rule, field)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{type(rule).__name__}.{field} must be an int of at least {least}. Got {value!r}.")


def without_gate() -> str:
    """Names of the rules that need no trained score, for messages."""
    return ", ".join(name for name in EXIT_RULES if not EXIT_RULES[name].reads_score)


def no_gate(spec: LoopSpec) -> ValueError:
    """The error where a trained stopping score is asked of a model that has none."""
    return ValueError(f"{spec.name} has no trained gate; exit rules available: {without_gate()}")


def exit_points(spec: LoopSpec, num_steps: Steps | None = None) -> dict[int, int]:
    """Step -> applications after which a token may stop there; the end of the run is the last one.

    Step t is where a run of t steps ends: there the readout is defined, and trained as far as it ever is. A loop of one
    block has one after every iteration, two levels after every high cycle, deep supervision after every supervision
    step. Where blocks run in turn, or a shorter run takes other step sizes, no shorter run lies on the way of a deeper
    one, and only the end is left. Where num_steps is a tuple, steps count its first entry.
    """
    steps = spec.default_steps if num_steps is None else num_steps
    whole = len(spec.plan(steps))
    first = steps if isinstance(steps, int) else steps[0]
    if first < 1:
        raise ValueError(
            f"num_steps must be at least 1 where a rule says when to stop. Got {num_steps}. Use loop.forward"
        )
    return {**(_shorter(spec.order, steps, len(spec.blocks)) if spec.grid is None else {}), first: whole}


@functools.lru_cache(maxsize=256)
def _shorter(order: PlanOrder, steps: Steps, blocks: int) -> dict[int, int]:
    """Step -> applications, of the shorter runs that lie on the way of this one."""
    first, rest = (steps, ()) if isinstance(steps, int) else (steps[0], steps[1:])
    plan, points = order.plan(steps, blocks), {}
    for t in range(1, first):
        shorter = order.plan((t, *rest) if rest else t, blocks)
        if shorter == plan[: len(shorter)]:
            points[t] = len(shorter)
    return points


def check_early(spec: LoopSpec, rule: ExitRule, points: Mapping[int, int]) -> None:
    """Refuses a rule that may stop early where the end is the only step to stop after."""
    if len(points) == 1 and max(points) > 1:
        raise ValueError(
            f"exit: {rule} may stop early, but no shorter run of {spec.name} lies on the way of this one: its blocks "
            "run in turn, or a shorter run takes other step sizes. Choose num_steps instead, with exit rule full"
        )


def readable(spec: LoopSpec, state: Any, tokens: int) -> Float[Tensor, "batch seq dim"]:
    """What the readout reads of a state, per token: its fields side by side, without the slots before the tokens."""
    fields = [
        states.component(state, name)[:, -tokens:]
        for name, part in spec.state.items()
        if part.read_by_coda and part.per == "token"
    ]
    return fields[0] if len(fields) == 1 else torch.cat(fields, dim=-1)


def precise(tensor: Tensor) -> Tensor:
    """At least float32: norms and sums of probabilities are not taken in half precision."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
