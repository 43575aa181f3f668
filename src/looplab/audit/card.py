"""The model card of an audit: what a checkpoint declares about itself, in words and exact counts."""

import dataclasses
from typing import Any

from looplab.audit.result import ModelCard
from looplab.audit.runner import Runner, weight_hash
from looplab.audit.schedules import FullPlan
from looplab.recurrence.depth import Depth, DepthSampler, FixedDepth, PrefixDepth, UniformDepth
from looplab.recurrence.depth import Grid as StepSizes
from looplab.recurrence.spec import BlockSpec, LoopSpec, ParamCount


def model_card(runner: Runner, full: FullPlan, *, name: str, source: str, tokenizer: str) -> ModelCard:
    """The card of one model.

    Args:
        name: What the user calls it.
        source: Built-in name or name of its folder.
        tokenizer: Name of the tokenizer it was read with.
    """
    spec: LoopSpec = runner.spec
    return ModelCard(
        name=name,
        source=source,
        architecture=spec.name,
        version=spec.version,
        parameters=_parameters(spec.params),
        dense=is_dense(full),
        blocks=tuple(_block_line(block) for block in spec.blocks),
        default_steps="once each" if is_dense(full) else ", ".join(map(str, full.plan.iterations().values())),
        trained_depth=trained_depth(spec.trained_depth),
        trained_units=trained_units(spec, full),
        applications=len(full.plan),
        unit_applications=len(full.units[0]),
        units=full.M,
        kmid=full.kmid,
        index_parts=tuple(sorted(spec.index_parts)),
        kv_rule=str(spec.kv_rule),
        noise_width=spec.noise_width,
        vocabulary=spec.vocab[0],
        max_positions=spec.max_positions,
        dtype=str(runner.weights.dtype).removeprefix("torch."),
        weight_hash=weight_hash(runner.model),
        tokenizer=tokenizer,
        notes=tuple(runner.model.notes),
    )


def is_dense(full: FullPlan) -> bool:
    """No block runs twice."""
    return len({block for block, _ in full.plan}) == len(full.plan)


def trained_depth(depth: Depth) -> str:
    """A depth law in words."""
    if isinstance(depth, StepSizes):
        return f"steps of sizes {', '.join(f'{size:g}' for size in depth.sizes)}"
    if isinstance(depth, PrefixDepth):
        return f"the first applications, {trained_depth(depth.law)}"
    if isinstance(depth, FixedDepth):
        return f"fixed {depth.num_steps}"
    if isinstance(depth, UniformDepth):
        return f"uniform {depth.low} to {depth.high}"
    return str(depth) if isinstance(depth, DepthSampler) else "unknown"


def trained_units(spec: LoopSpec, full: FullPlan) -> tuple[int, int] | None:
    """Smallest and largest number of units of `full` at which the readout was trained; None if that is unknown."""
    depth = spec.trained_depth
    if not isinstance(depth, DepthSampler):
        return None
    support = depth.support()
    lengths = [
        n if depth.of_prefix else len(spec.order.plan(n, len(spec.blocks))) for n in (min(support), max(support))
    ]
    low, high = (min(full.M, length // len(full.units[0])) for length in lengths)
    return low, high


def _parameters(params: ParamCount) -> dict[str, int]:
    counts: dict[str, Any] = dataclasses.asdict(params)
    core, active = counts.pop("core"), counts.pop("active")
    named = {**counts, **{f"core {i}": n for i, n in enumerate(core)}, "total": params.total}
    return named if active is None else {**named, "active": active}


def _block_line(block: BlockSpec) -> str:
    layers = "layer" if len(block.layers) == 1 else "layers"
    ids = ", ".join(map(str, block.layers))
    return f"{layers} {ids}: reads {', '.join(block.reads)}; writes {', '.join(block.writes)}"
