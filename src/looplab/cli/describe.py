"""`looplab describe MODEL`: what a model declares about itself, and what running it costs. No forward pass is made."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from looplab._registry import did_you_mean
from looplab.cli import exit_codes
from looplab.cli.checkpoint import ReadAs, open_checkpoint
from looplab.interop import builtin_names
from looplab.interop.checkpoint import hub_hint
from looplab.models.base import PRESETS, LoopedLM, build
from looplab.recurrence.plan import Plan, Steps
from looplab.recurrence.spec import LoopSpec

TOKENS = 1024
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class Options(ReadAs):
    """Describe one model: blocks and plan, trained depth, parameters, FLOPs and KV bytes, all exact."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """A checkpoint folder, the name of a built-in checkpoint, or the name of a preset (see `looplab list`)."""
    num_steps: tuple[int, ...] = ()
    """Iterations per block: one number, or one per block. Default: what the model itself runs."""
    tokens: int | None = None
    """Length of the sequence that FLOPs are counted for. Default: 1024, or a shorter longest context."""
    kv_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Dtype of cached keys and values."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print one JSON object instead of tables."""


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code."""
    options = tyro.cli(Options, args=argv, prog="looplab describe")
    if options.tokens is not None and options.tokens < 1:
        raise exit_codes.UserError(f"--tokens must be at least 1. Got {options.tokens}.", exit_codes.USAGE)
    model = open_model(options.model, options)
    with exit_codes.user_error(exit_codes.USAGE, (ValueError,)):
        plan = model.spec.plan(_steps(options.num_steps))
    tokens = options.tokens or min(TOKENS, model.spec.max_positions or TOKENS)
    facts = description(model.spec, plan, tokens=tokens, kv_dtype=options.kv_dtype)
    facts = {"model": options.model, "reference": model.reference, **facts, "notes": list(model.notes)}
    if options.json:
        print(json.dumps(facts, indent=1))
    else:
        show(facts, Console())
    return exit_codes.DONE


def open_model(name: str, read_as: ReadAs | None = None) -> LoopedLM:
    """The preset `name` without weights, or the checkpoint that `looplab.load` finds."""
    if name in PRESETS:
        if read_as is not None and (read_as.family != "auto" or read_as.tied is not None or read_as.assume):
            raise exit_codes.UserError(
                f"--family, --tie and --assume say how files are read. Got the preset {name!r}. Leave them out.",
                exit_codes.USAGE,
            )
        return build(PRESETS[name](), device="meta")
    if name not in builtin_names() and not Path(name).is_dir():
        near = hub_hint(name) or did_you_mean(name, [*PRESETS, *builtin_names()])
        raise exit_codes.UserError(
            f"MODEL must be a checkpoint folder, a built-in name or a preset. Got {name!r}.{near} "
            f"Built in: {', '.join(builtin_names())}. Presets: {', '.join(PRESETS)}.",
            exit_codes.MODEL,
        )
    return open_checkpoint(name, read_as).model


def description(spec: LoopSpec, plan: Plan, *, tokens: int, kv_dtype: str) -> dict[str, Any]:
    """The facts as JSON-ready values.

    Args:
        tokens: Length of one sequence, all of it scored.
        kv_dtype: A key of `ITEM_BYTES`.
    """
    counts = Counter(block for block, _ in plan)
    rule = spec.kv_rule
    kv = spec.cost.kv_bytes_per_token(
        type(rule).__name__, plan.iterations(), itemsize=ITEM_BYTES[kv_dtype], size=rule.size
    )
    params = {name: getattr(spec.params, name) for name in type(spec.params).__dataclass_fields__ if name != "core"}
    active = params.pop("active")
    core = {f"core.{block}": count for block, count in enumerate(spec.params.core)}
    return {
        "architecture": spec.name,
        "version": spec.version,
        "trained_depth": str(spec.trained_depth),
        "order": str(spec.order),
        "plan": str(plan),
        "applications": len(plan),
        "distinct_functions": len({(a.block, spec.operator_class(*a)) for a in plan}),
        "index_parts": sorted(spec.index_parts),
        "max_iteration": spec.max_iteration,
        "blocks": [
            {"layers": list(b.layers), "parameters": b.params, "reads": list(b.reads), "writes": list(b.writes)}
            for b in spec.blocks
        ],
        "state": {
            name: {"width": part.width, "per": part.per, "init": part.init, "random": part.random}
            for name, part in spec.state.items()
        },
        "readout": list(spec.readout),
        "halt": spec.halt.layout if spec.halt else None,
        "kv_rule": str(rule),
        "causal": spec.causal,
        "max_positions": spec.max_positions,
        "vocabulary": spec.vocab[0],
        "parameters": {**params, **core, "total": spec.params.total, **({"active": active} if active else {})},
        "cost": {
            "tokens": tokens,
            "forward_flops": spec.cost.forward(counts, tokens=tokens),
            "forward_flops_per_token": spec.cost.forward(counts, tokens=tokens) / tokens,
            "application_flops": {str(b): spec.cost.blocks[b].forward(tokens=tokens) for b in sorted(counts)},
            "kv_dtype": kv_dtype,
            "kv_bytes_per_token": kv,
            "kv_bytes": kv * tokens,
        },
    }


def show(facts: dict[str, Any], console: Console) -> None:
    """Prints a description as tables."""
    cost = facts["cost"]
    about = _table("", "")
    for label, value in (
        ("architecture", f"{facts['architecture']} (version {facts['version']})"),
        ("reference", facts["reference"]),
        ("trained depth", facts["trained_depth"]),
        ("order", facts["order"]),
        ("plan", facts["plan"]),
        ("applications", f"{facts['applications']}, of {facts['distinct_functions']} distinct functions"),
        ("depends on the iteration", ", ".join(facts["index_parts"]) or "nothing"),
        ("iterations with parameters", "any" if facts["max_iteration"] is None else str(facts["max_iteration"])),
        ("state", "; ".join(_state(name, field) for name, field in facts["state"].items())),
        ("readout", ", ".join(facts["readout"])),
        ("halting score", facts["halt"] or "none"),
        ("KV rule", facts["kv_rule"]),
        ("longest context", "not declared" if facts["max_positions"] is None else f"{facts['max_positions']} tokens"),
        ("vocabulary", f"{facts['vocabulary']:,}"),
        *(("note", note) for note in facts["notes"]),
    ):
        about.add_row(label, Text(value))
    blocks = _table("block", "layers", "parameters", "applications", "FLOPs each")
    run = Counter(a.block for a in Plan.parse(facts["plan"]))
    for index, block in enumerate(facts["blocks"]):
        flops = cost["application_flops"].get(str(index))
        layers = " ".join(map(str, block["layers"]))
        each = "" if flops is None else f"{flops:,}"
        blocks.add_row(str(index), layers, f"{block['parameters']:,}", str(run[index]), each)
    parameters = _table("group", "count")
    for name, count in facts["parameters"].items():
        if count:
            parameters.add_row(name, f"{count:,}")
    costs = _table("", "")
    costs.add_row("forward FLOPs", f"{cost['forward_flops']:,}")
    costs.add_row("forward FLOPs per token", f"{cost['forward_flops_per_token']:,.1f}")
    costs.add_row(f"KV bytes ({cost['kv_dtype']})", f"{cost['kv_bytes']:,}")
    costs.add_row("KV bytes per token", f"{cost['kv_bytes_per_token']:,}")
    for title, table in (
        (facts["model"], about),
        ("blocks", blocks),
        ("parameters, stored once", parameters),
        (f"cost of {cost['tokens']} tokens", costs),
    ):
        console.print(Text(title, style="bold"), table)


def _steps(counts: tuple[int, ...]) -> Steps | None:
    if not counts:
        return None
    return counts[0] if len(counts) == 1 else counts


def _state(name: str, field: dict[str, Any]) -> str:
    noise = ", random" if field["random"] else ""
    return f"{name}: {field['width']} per {field['per']}, starts as {field['init']}{noise}"


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_header=any(columns))
    for index, column in enumerate(columns):
        table.add_column(column, overflow="fold", justify="left" if index == 0 or not any(columns) else "right")
    return table
