"""Which models and cache rules the engine takes, and where their tokens may leave the loop."""

from looplab.engine.slots import name_of
from looplab.recurrence.exit.base import exit_points
from looplab.recurrence.kv.base import KVRule
from looplab.recurrence.kv.depth_indexed import DepthIndexed
from looplab.recurrence.plan import Blocks, LayerLoop, ModelLoop, Sequential
from looplab.recurrence.spec import LoopSpec


def sections_of(spec: LoopSpec, max_steps: int | None) -> list[list[tuple[tuple[int, int], ...]]]:
    """Per section and step, its applications (block, which of the block's own it is)."""
    default = spec.default_steps
    if isinstance(spec.order, ModelLoop | Blocks | LayerLoop | Sequential):
        counts = default if isinstance(default, tuple) else (default,) * len(spec.blocks)
        if max_steps is not None:
            counts = (max_steps,) * len(spec.blocks)
        spec.plan(counts if isinstance(spec.order, Blocks) else counts[0])  # refuses what the model does not define
        return [[((block, step),) for step in range(count)] for block, count in enumerate(counts)]
    steps = max_steps if max_steps is not None else default if isinstance(default, int) else default[0]
    points = exit_points(spec, steps)
    plan, seen, applications = spec.plan(steps), dict.fromkeys(range(len(spec.blocks)), 0), []
    for block, _ in plan:
        applications.append((block, seen[block]))
        seen[block] += 1
    starts = (0, *list(points.values())[:-1])
    return [[tuple(applications[start:end]) for start, end in zip(starts, points.values(), strict=True)]]


def check_model(spec: LoopSpec, *, ragged_cache: bool) -> None:
    """Refuses models that cannot be decoded token by token, each row at its own place."""
    reasons = {
        "is run by the transformers library, whose masks take rows of one length": not ragged_cache,
        "is not causal": not spec.causal,
        "keeps no keys and values": not spec.kv_rules,
        f"needs rows of {spec.fixed_length} tokens": spec.fixed_length is not None,
        f"answers {spec.cells} cells per position": spec.cells != 1,
        "needs extras": any(spec.extras.values()),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(
                f"engine: a model must be a causal language model of one token per position. Got {spec.name}, which "
                f"{reason}. Serve another model"
            )


def check_kv_rule(spec: LoopSpec, rule: KVRule) -> None:
    """Refuses rules that the model does not support; depth-indexed entries may always be read at the last one."""
    name_of(rule)
    if not any(
        known.allows(rule) or (isinstance(rule, DepthIndexed) and known == DepthIndexed()) for known in spec.kv_rules
    ):
        supported = ", ".join(sorted({type(known).__name__ for known in spec.kv_rules}))
        raise ValueError(f"kv_rule: {spec.name} supports {supported}. Got {name_of(rule)}. Choose another")
