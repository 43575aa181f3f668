"""What early exits gain over continuous batching at full depth: `depth_mix`, `width` and `targets`.

Arms of a case run the same requests with the same recorded depths, in turn; all arms with exits must say the same
tokens, and both ways must say what one request after the other says, before a number is printed.
"""

import argparse
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from benchmarks.cases.engine_load import Drive, Load, Numbers, Run, load_of, model_of, replayed, run
from benchmarks.cases.engine_table import (
    Row,
    Rows,
    bounds,
    check_alone,
    check_equal,
    counts,
    equal_promised,
    facts,
    fractions,
    in_turn,
    interval,
    latency,
    speed,
)
from benchmarks.timing import CLOCKS
from looplab.engine.config import EngineConfig
from looplab.engine.engine import Engine
from looplab.engine.stats import EngineStats
from looplab.recurrence.exit import ExitRule

FULL, WAVE, REFILL = "continuous, full depth", "depth batching, wave", "depth batching, refill"
ARMS: dict[str, dict[str, Any]] = {FULL: {"segments": "plan"}, WAVE: {"refill": False}, REFILL: {}}
TARGETS: tuple[tuple[str, float, bool, dict[int, float]], ...] = (
    ("loop-512", 1.5, False, {8: 0.95, 16: 0.95, 32: 0.95}),
    ("loop-768", 1.5, False, {8: 0.95, 16: 0.95, 32: 0.95}),
    ("loop-768", 1.0, False, {8: 0.95, 16: 0.95, 32: 0.95}),
    ("sandwich-512", 2.0, True, {8: 0.95, 16: 0.95, 32: 0.95}),
    ("sandwich-512", 1.0, False, {8: 0.80, 16: 0.82, 32: 0.85}),
)
"""(model, R / W, whether m = W, W -> least measured share of S_adj)."""


def engine_of(
    model: Any,
    width: int,
    residents: int,
    options: argparse.Namespace,
    gates: Mapping[str, ExitRule] | None = None,
    **changes: Any,
) -> Engine:
    """A new engine, so that nothing is cached; m is W / 2 where launches stay full meanwhile, else 1.

    Args:
        gates: As for `Engine`.
        changes: Fields of its configuration.
    """
    longest = model.spec.max_positions
    config = EngineConfig(
        launch_rows=width,
        max_resident=residents,
        min_coda_rows=1 if residents < width + width // 2 else max(1, width // 2),
        num_pages=residents * -(-longest // 16) + 1,
        numerics=options.numerics,
        max_waiting=10**6,
        reuse="off",
    )
    return Engine(model, Numbers(), replace(config, **changes), gates=gates)


def depth_mix(options: argparse.Namespace) -> Rows:
    """Depth laws: what exits gain over continuous batching at full depth."""
    model = model_of(options.model, options.device, options.dtype)
    width, residents = options.rows, options.residents or options.rows + options.rows // 2
    rows: Rows = []
    for law in options.laws:
        load = load_of(
            law, model.spec.default_steps, requests=max(options.requests, 4 * residents), prompt=options.prompt,
            outputs=options.outputs, seed=0,
        )  # fmt: skip
        runs = arms(model, load, width, residents, options)
        rows += [{"law": law} | row for row in compared(load, runs)]
        if options.sequential:
            for name, arm in (("sequential, exits", REFILL), ("sequential, full depth", FULL)):
                alone = check_alone(runs[arm][0], load, options.sequential, full=arm == FULL)
                rows.append({"law": law, "arm": name} | alone)
    return rows


def width(options: argparse.Namespace) -> Rows:
    """Launch rows and residents: where thin readouts cost what exits gain."""
    model = model_of(options.model, options.device, options.dtype)
    rows: Rows = []
    for launch in options.widths:
        for factor in (1.0, 1.5, 2.0):
            residents = round(launch * factor)
            load = load_of(
                "spread", model.spec.default_steps, requests=max(options.requests, 4 * residents),
                prompt=options.prompt, outputs=options.outputs, seed=0,
            )  # fmt: skip
            rows += compared(load, arms(model, load, launch, residents, options))
    return rows


def targets(options: argparse.Namespace) -> Rows:
    """The targets of realised speed-up: models, launch rows and residents, against continuous batching."""
    rows: Rows = []
    built: dict[str, Any] = {}
    for name, factor, whole, least in TARGETS:
        if name not in (options.only or [name]):
            continue
        model = built.setdefault(name, model_of(name, options.device, options.dtype))
        for launch in options.widths:
            residents = round(launch * factor)
            changes = {"min_coda_rows": launch} if whole else {}
            row = _target(model, launch, residents, changes, options)
            goal = least.get(launch)
            rows.append({"model": name} | row | {"target": goal, "met": goal is not None and row["time"] >= goal})
    return rows


def arms(model: Any, load: Load, width: int, residents: int, options: argparse.Namespace) -> dict[str, list[Run]]:
    """Runs of every arm; those with the same depths say the same tokens."""

    def once(name: str) -> Run:
        engine = engine_of(model, width, residents, options, **ARMS[name])
        return run(engine, load, full=name == FULL, clock=CLOCKS[options.clock])

    runs = in_turn(list(ARMS), once, options.pairs)
    if equal_promised(model):
        check_equal("arms with the same recorded depths", [runs[name][0].tokens for name in (WAVE, REFILL)])
    return runs


def compared(load: Load, runs: dict[str, list[Run]]) -> Rows:
    """One row per arm, beside continuous batching at full depth."""
    known = bounds(load, runs[FULL])
    return [
        {"arm": name}
        | facts(mine[0], load)
        | speed(mine, runs[FULL], 1.0 if name == FULL else known["S_adj"])
        | known
        | fractions(mine[0], load, full=name == FULL)
        | counts(mine[0])
        | latency(mine)
        for name, mine in runs.items()
    ]


def _target(model: Any, width: int, residents: int, changes: dict[str, Any], options: argparse.Namespace) -> Row:
    """One cell: both engines stand in their steady window and run in turn, a share of the window at a time.

    The window costs its warm-up once, not once per repetition. Lengths vary, so that prompts come evenly.
    """
    waiting = max(options.requests, residents)
    load = load_of(
        "spread", model.spec.default_steps, requests=3 * residents + waiting, prompt=options.prompt,
        outputs=options.outputs, seed=0, spread=True,
    )  # fmt: skip
    clock = CLOCKS[options.clock]
    drives: dict[str, Drive] = {}
    for name in (FULL, REFILL):
        engine = engine_of(model, width, residents, options, **(ARMS[name] | changes))
        drives[name] = drive = Drive(engine, load, replayed(engine, load, full=name == FULL), clock=clock)
        while drive.ended < 2 * residents:
            drive.tick()
    before = {name: drive.engine.stats() for name, drive in drives.items()}
    share = int(0.7 * waiting * options.outputs / options.pairs)
    rates: dict[str, list[float]] = {name: [] for name in drives}
    seconds = dict.fromkeys(drives, 0.0)
    for repetition in range(options.pairs):
        for name in (FULL, REFILL) if repetition % 2 else (REFILL, FULL):
            tokens, took = _share(drives[name], share, clock)
            rates[name].append(tokens / took)
            seconds[name] += took
    after = {name: drive.engine.stats() for name, drive in drives.items()}
    runs = {name: _windowed(drive, before[name], after[name], seconds[name]) for name, drive in drives.items()}
    for name in runs:
        check_alone(runs[name], load, options.sequential, full=name == FULL)
    known = bounds(load, [runs[FULL]])
    ratios = [mine / base for mine, base in zip(rates[REFILL], rates[FULL], strict=True)]
    low, high = interval(ratios)
    mine = runs[REFILL]
    return (
        {"arm": REFILL}
        | facts(mine, load)
        | {"tokens_s": mine.rate, "ratio": statistics.median(ratios), "low": low, "high": high}
        | known
        | {"time": statistics.median(ratios) / known["S_adj"], "time_low": low / known["S_adj"]}
        | fractions(mine, load, full=False)
        | counts(mine)
    )


def _share(drive: Drive, tokens: int, clock: Callable[[], float]) -> tuple[int, float]:
    """Ticks until so many tokens more are said: how many were, and the seconds."""
    start, had = clock(), drive.tokens
    while drive.tokens < had + tokens:
        if not drive.engine.waiting:
            raise ValueError("engine: too few requests for a steady window; raise --requests")
        drive.tick()
    return drive.tokens - had, clock() - start


def _windowed(drive: Drive, before: EngineStats, after: EngineStats, seconds: float) -> Run:
    return replace(
        drive.finish(),
        window_seconds=seconds,
        window_tokens=after.output_tokens - before.output_tokens,
        window_rows=after.launch_rows["core"] - before.launch_rows["core"],
        window_launches=after.launches["core"] - before.launches["core"],
    )


CASES: dict[str, Callable[[argparse.Namespace], Rows]] = {"depth_mix": depth_mix, "width": width, "targets": targets}
