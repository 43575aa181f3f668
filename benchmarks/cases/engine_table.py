"""Columns of the engine's benchmarks, from runs over one load. What each means: benchmarks/README.md.

facts      of a model, a load and an engine: k, r, dbar, W, R, m, bounds, numerics, bytes of the cache
counts     of a run: launches and rows per stage, waste by cause, padding
speed      tokens per second of an arm's runs, and as a ratio to another arm's
latency    percentiles over requests
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.baselines import sequential
from benchmarks.cases.engine_load import Load, Run
from looplab.engine.bound import adjusted_bound, exact_bound, speedup_bound, work_of
from looplab.engine.stats import STAGES, WASTES

Row = dict[str, Any]
Rows = list[Row]
PERCENTILES = (50, 90, 99)


def facts(found: Run, load: Load) -> Row:
    """What the arms of a case have in common, and what an engine was built with."""
    spec, config = found.engine.model.spec, found.engine.config
    work, steps = work_of(spec.cost), spec.default_steps
    decoded = sum(len(own) for own in load.depths)
    return {
        "k": work.ratio, "r": steps, "dbar": load.mean if decoded else float(steps),
        "W": config.launch_rows, "R": config.max_resident, "m": config.min_coda_rows,
        "numerics": found.engine.runner.numerics, "kv_rule": found.engine.runner.kv_rule,
        "kv_mib": found.stats.kv_bytes / 2**20,
    }  # fmt: skip


def bounds(load: Load, baseline: Sequence[Run]) -> Row:
    """S_max, S_exact and S_adj of a load whose full-depth runs are the baseline."""
    spec = baseline[0].engine.model.spec
    steps = spec.default_steps
    bound = speedup_bound(work_of(spec.cost), [steps], [load.mean])
    tokens = [
        (len(prompt) + i, (depth,))
        for prompt, own in zip(load.prompts, load.depths, strict=True)
        for i, depth in enumerate(own)
    ]
    prefill = statistics.median(one.stats.launch_seconds["prefill"] for one in baseline)
    decode = statistics.median(one.decode_seconds for one in baseline)
    return {
        "S_max": bound,
        "S_exact": exact_bound(spec.cost, [steps], tokens),
        "S_adj": adjusted_bound(bound, prefill_seconds=prefill, decode_seconds=decode),
    }


def counts(found: Run) -> Row:
    """Launches and mean rows per stage, waste by cause, padding."""
    stats = found.stats
    row: Row = {}
    for stage in STAGES:
        launches = stats.launches[stage]
        row |= {f"{stage}_launches": launches, f"{stage}_rows": stats.launch_rows[stage] / max(1, launches)}
    row |= {f"waste_{cause}": stats.wasted[cause] for cause in WASTES}
    return row | {"waste": sum(stats.wasted.values()), "padding": stats.padding}


def fractions(found: Run, load: Load, *, full: bool) -> Row:
    """Share of the work that depths allow to save, and how full core launches were."""
    spec, width = found.engine.model.spec, found.engine.config.launch_rows or 1
    work = work_of(spec.cost)
    allowed = load.decoded * work.outside + sum(sum(own) for own in load.depths) * work.blocks[0]
    if full:
        allowed = load.decoded * work.at([spec.default_steps])
    spent = load.decoded * work.outside + found.stats.applications * work.blocks[0]
    rows, launches = found.stats.launch_rows["core"], found.stats.launches["core"]
    if found.window_launches:
        rows, launches = found.window_rows, found.window_launches
    return {"work": allowed / spent, "occupancy": rows / max(1, launches) / width}


def speed(mine: Sequence[Run], base: Sequence[Run], limit: float | None = None) -> Row:
    """Tokens per second, of the steady window and of the whole run, and the ratio to the same runs of another arm.

    Args:
        limit: What the ratio is to reach; None: nothing is said of it.
    """
    ratios = [one.rate / other.rate for one, other in zip(mine, base, strict=True)]
    low, high = interval(ratios)
    row = {
        "tokens_s": statistics.median(one.rate for one in mine),
        "whole_tokens_s": statistics.median(one.stats.output_tokens / one.seconds for one in mine),
        "ratio": statistics.median(ratios), "low": low, "high": high,
    }  # fmt: skip
    return row if limit is None else row | {"time": row["ratio"] / limit}


def latency(runs: Sequence[Run]) -> Row:
    """Percentiles over the requests of all runs."""
    found = [trail.latencies() for one in runs for trail in one.trails]
    return {
        f"{name}_p{share}": float(np.percentile([one[name] for one in found], share))
        for name in found[0]
        for share in PERCENTILES
    }


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    draws = np.median(np.random.default_rng(0).choice(values, (2000, len(values))), axis=1)
    return float(np.quantile(draws, 0.025)), float(np.quantile(draws, 0.975))


def in_turn(names: Sequence[str], once: Callable[[str], Run], pairs: int) -> dict[str, list[Run]]:
    """Runs of every arm, there and back again (A B B A), after one of each to warm up."""
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for pair in range(pairs + 1):
        for name in names if pair % 2 else reversed(names):
            found = once(name)
            if pair:
                runs[name].append(found)
    return runs


def check_equal(what: str, answers: Sequence[list[list[int]]]) -> None:
    """Refuses arms that say different tokens: a ratio of their speeds would mean nothing."""
    for other in answers[1:]:
        wrong = [i for i, (a, b) in enumerate(zip(answers[0], other, strict=True)) if a != b]
        if wrong:
            raise AssertionError(
                f"engine: {what} must say the same tokens. They differ in {len(wrong)} of {len(answers[0])} requests, "
                f"first in {wrong[0]}. No speed is reported"
            )


def check_alone(found: Run, load: Load, requests: int, *, full: bool, kv_rule: str | None = None) -> Row:
    """Runs the first requests one after the other, token by token; their tokens must be those of the engine.

    Args:
        kv_rule: None: last_exited.
    Returns:
        The speed of that arm.
    """
    model = found.engine.model
    steps = model.spec.default_steps
    depths = [(steps,) * len(own) for own in load.depths] if full else load.depths
    said = sequential.run(model, load.prompts[:requests], depths[:requests], steps, kv_rule=kv_rule)
    if equal_promised(model):
        check_equal("the engine and one request after the other", [said.tokens, found.tokens[:requests]])
    same = sum(a == b for a, b in zip(said.tokens, found.tokens, strict=False))
    decoded = sum(len(own) for own in depths[:requests])
    return {"W": 1, "R": 1, "tokens_s": decoded / max(said.decode_seconds, 1e-9), "equal": f"{same}/{requests}"}


def equal_promised(model: Any) -> bool:
    """Whether tokens may not depend on the shape of a launch: not below float32."""
    return bool(next(model.parameters()).dtype == torch.float32)
