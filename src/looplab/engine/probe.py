"""Two launches of core and readout, timed, so that the cost model knows this machine and this model. No torch.

    T(n) = a (h + n)      fitted to the fastest of a few launches of W / 4 rows (1 at least) and of W rows

The probe runs on a fresh runner: it takes seats 0 .. W - 1 and a page for each, and gives all of them back. `predict`
runs the scheduler itself against what was found.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from looplab.engine.bound import LaunchCost, fit_launch
from looplab.engine.config import EngineConfig
from looplab.engine.cost_model import DepthLaw, fit_coda_rows
from looplab.engine.request import DepthParams, SamplingParams
from looplab.engine.stages import Job, Row, Runner, Span

REPEATS = 3
"""Launches of each size that are timed, after one that is not."""


class Prediction(NamedTuple):
    """What early exits come to, by the cost model of this machine."""

    coda_rows: int
    """m: rows that a readout waits for."""
    realised: float
    """Share of S_max."""
    depths: str
    """Which depths this is for, in words."""


def predict(
    runner: Runner,
    config: EngineConfig,
    law: DepthLaw,
    depths: str,
    *,
    coda_rows: int | None,
    clock: Callable[[], float] = time.perf_counter,
) -> Prediction | None:
    """The best m and what it comes to; None where launches are not of single iterations, or cannot be timed.

    Args:
        config: With W and R as numbers.
        depths: What `law` stands for, in words.
        coda_rows: m, where it is given.
    """
    width = config.launch_rows
    assert width is not None
    if width < 2 or runner.facts.whole or width >= runner.facts.pages:
        return None
    core, coda = probe_launches(runner, width, clock=clock)
    rows, tried = fit_coda_rows(config, law, core=core, coda=coda, among=None if coda_rows is None else (coda_rows,))
    return Prediction(rows, next(one.realised for one in tried if one.rows == rows), depths)


def probe_launches(
    runner: Runner, width: int, *, clock: Callable[[], float] = time.perf_counter
) -> tuple[LaunchCost, LaunchCost]:
    """Cost of launches of the first block, and of readouts with the encoding of the next token.

    Args:
        width: W, at least 2, and no more than the runner has seats and pages for.
    """
    if not 2 <= width < runner.facts.pages:
        raise ValueError(
            f"probe_launches: width must be from 2 to the pages that can be handed out, {runner.facts.pages - 1}. "
            f"Got {width}. Set min_coda_rows instead."
        )
    rows = _begun(runner, width)
    try:
        few = max(1, width // 4)
        core = _fitted(lambda n: runner.core(0, rows[:n]), few, width, clock)
        done = [row._replace(steps=1, successor=True) for row in rows]
        coda = _fitted(lambda n: runner.poll(runner.coda(done[:n]), wait=True), few, width, clock)
    finally:
        for row in rows:
            runner.close(row.seat)
    return core, coda


def _begun(runner: Runner, width: int) -> list[Row]:
    """Rows that are ready for their first iteration."""
    depth = DepthParams(num_steps=max(runner.facts.max_steps))
    rows = []
    for seat in range(width):
        job = Job(
            request=f"probe {seat}",
            choice=0,
            tokens=(0,),
            sampling=SamplingParams(temperature=0.0),
            seed=0,
            depth=depth,
            prefill_steps=1,
        )
        runner.open(seat, job)
        rows.append(Row(seat, 1, 0, (seat + 1,)))
    spans = [Span(row.seat, 0, 1, row.pages, (row.seat,), None) for row in rows]
    runner.poll(runner.prefill(spans), wait=True)
    runner.encode(rows, [0] * width)
    return rows


def _fitted(launch: Callable[[int], object], few: int, many: int, clock: Callable[[], float]) -> LaunchCost:
    return fit_launch(*((rows, min(_times(launch, rows, clock))) for rows in (few, many)))


def _times(launch: Callable[[int], object], rows: int, clock: Callable[[], float]) -> Sequence[float]:
    launch(rows)
    times = []
    for _ in range(REPEATS):
        began = clock()
        launch(rows)
        times.append(clock() - began)
    return times
