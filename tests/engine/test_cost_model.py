"""The table of the design: which share of the bound is left, from the scheduler itself on a clock of launches.

The simulations run in a process of their own: every call inside the scheduler would be type-checked here.
"""

import json
import random
import statistics
import subprocess
import sys

import pytest

from looplab.engine.bound import LaunchCost, realised
from looplab.engine.config import EngineConfig
from looplab.engine.cost_model import CostRunner, DepthLaw, fit_coda_rows, simulate
from looplab.engine.stages import Facts

H = 21.0
LOOPED = DepthLaw(chances=(0.2, 0.3, 0.3, 0.2))


def normal_depths():
    """floor of N(8, 3^2), clipped to 2 .. 16."""
    law = statistics.NormalDist(8, 3)
    ends = [0.0, *(law.cdf(d + 1) for d in range(2, 16)), 1.0]
    return DepthLaw(chances=(0.0, *(b - a for a, b in zip(ends, ends[1:], strict=False))))


SANDWICH = normal_depths()
WIDTHS = (8, 16, 32)
CELLS = {
    "k .08, R = W, m = 1": (0.08, LOOPED, (1.0, 0.0), (0.968, 0.974, 0.981)),
    "k .11, R = W, m = 1": (0.11, LOOPED, (1.0, 0.0), (0.957, 0.965, 0.975)),
    "k .16, R = W, m = 1": (0.16, LOOPED, (1.0, 0.0), (0.940, 0.951, 0.965)),
    "k .16, R = 1.5 W, m = W/2": (0.16, LOOPED, (1.5, 0.5), (0.98, 0.985, 0.99)),
    "k 1.2, R = W, m = W/2": (1.2, SANDWICH, (1.0, 0.5), (0.829, 0.845, 0.881)),
    "k 1.2, R = 1.5 W, m = W/2": (1.2, SANDWICH, (1.5, 0.5), (0.93, 0.94, 0.96)),
    "k 1.2, R = 2 W, m = W": (1.2, SANDWICH, (2.0, 1.0), (1.00, 1.00, 1.00)),
    "k .08, wave": (0.08, LOOPED, None, (0.73, 0.76, 0.81)),
    "k 1.2, wave": (1.2, SANDWICH, None, (0.74, 0.75, 0.78)),
}
"""Name -> (k, depths, (R / W, m / W) or None for waves, shares at the three widths)."""

SIMULATION = """
import json, sys
from looplab.engine.bound import LaunchCost
from looplab.engine.config import EngineConfig
from looplab.engine.cost_model import DepthLaw, fit_coda_rows, realised_of, simulate

def run(job):
    chances, ratio, width, config = job
    core, coda = LaunchCost(per_row=1.0, rows=21.0), LaunchCost(per_row=ratio, rows=21.0)
    window = simulate(EngineConfig(launch_rows=width, **config), DepthLaw(chances=tuple(chances)), core=core, coda=coda)
    return [realised_of(window, core=core, coda=coda, width=width), *window]

print(json.dumps([run(job) for job in json.load(sys.stdin)]))
"""


def simulated(jobs):
    """Share of the bound and window of every job (chances, k, W, further settings)."""
    done = subprocess.run(
        [sys.executable, "-c", SIMULATION], input=json.dumps(jobs), capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def table():
    jobs = {}
    for cell, (ratio, law, sizes, _) in CELLS.items():
        for width in WIDTHS:
            residents, rows = (1.0, 0.0) if sizes is None else sizes
            config = {
                "max_resident": int(residents * width),
                "min_coda_rows": max(1, int(rows * width)),
                "refill": sizes is not None,
            }
            jobs[cell, width] = (law.chances, ratio, width, config)
    return dict(zip(jobs, simulated(list(jobs.values())), strict=True))


def test_the_laws_have_the_means_of_the_table():
    assert LOOPED.mean == pytest.approx(2.5) and SANDWICH.mean == pytest.approx(7.5, abs=0.05)
    drawn = LOOPED.draw(4000, random.Random(0))
    assert statistics.mean(drawn) == pytest.approx(2.5, abs=0.05) and set(drawn) == {1, 2, 3, 4}


@pytest.mark.parametrize("cell", CELLS)
def test_the_scheduler_leaves_the_predicted_share(cell, table):
    for width, predicted in zip(WIDTHS, CELLS[cell][3], strict=True):
        assert table[cell, width][0] == pytest.approx(predicted, abs=0.01), f"width {width}"


def test_the_simulation_agrees_with_the_closed_form(table):
    for width in WIDTHS:
        found, _, depth, _, coda_rows, core_rows = table["k .16, R = 1.5 W, m = W/2", width]
        assert core_rows > 0.99 * width
        closed = realised(0.16, depth, width=width, coda_rows=coda_rows, rows=H)
        assert found == pytest.approx(closed, abs=0.005)


def test_full_depth_in_one_segment_is_the_yardstick():
    """Ordinary continuous batching at full depth makes full launches of both kinds: nothing is lost."""
    config = {"max_resident": 8, "min_coda_rows": 1, "segments": "plan"}
    ((found, _, depth, *_),) = simulated([((0.0, 0.0, 0.0, 1.0), 0.16, 8, config)])
    assert found == pytest.approx(1.0, abs=1e-9) and depth == 4.0


def test_a_window_counts_what_was_run():
    """Two steps of every token on a machine of 1 s a core row and 10 s a readout row, without fixed costs."""
    core, coda = LaunchCost(per_row=1.0, rows=0.0), LaunchCost(per_row=10.0, rows=0.0)
    config = EngineConfig(launch_rows=2, max_resident=2, min_coda_rows=1)
    window = simulate(config, DepthLaw(chances=(0.0, 1.0)), core=core, coda=coda, tokens=3, requests=10)
    assert window.mean_depth == 2.0 and window.tokens > 5
    assert window.seconds == pytest.approx(12 * window.tokens, rel=0.2)


def test_the_runner_follows_recorded_depths():
    facts = Facts(blocks=1, max_steps=(3,), whole=False, pages=4, page_tokens=16, max_tokens=16, depth_causal=True)
    cost = LaunchCost(per_row=1.0, rows=2.0)
    runner = CostRunner(facts, core=cost, coda=cost)
    assert runner.now == 0.0 and runner.rows == {"core": 0, "coda": 0}
    assert runner.poll(runner.coda([]), wait=True) == ()


def test_the_fitted_rows_are_the_smallest_within_a_percent_of_the_best():
    core, coda = LaunchCost(per_row=1.0, rows=H), LaunchCost(per_row=1.2, rows=H)
    config = EngineConfig(launch_rows=2, max_resident=4)
    rows, tried = fit_coda_rows(config, LOOPED, core=core, coda=coda)
    assert [one.rows for one in tried] == [1, 2, 4]
    best = max(one.realised for one in tried)
    assert rows == min(one.rows for one in tried if one.realised >= 0.99 * best) == 2
    assert tried[1].delay == pytest.approx(2 * LOOPED.mean / 4)
    # Readouts that cost next to nothing need not wait.
    assert fit_coda_rows(config, LOOPED, core=core, coda=LaunchCost(per_row=0.001, rows=H))[0] == 1
    with pytest.raises(ValueError, match="launch_rows and max_resident must be numbers. Got None and 16"):
        fit_coda_rows(EngineConfig(max_resident=16), LOOPED, core=core, coda=coda)


def test_a_law_must_be_a_law():
    with pytest.raises(ValueError, match="must be at least 0 and sum to 1. Got"):
        DepthLaw(chances=(0.5, 0.4))
    with pytest.raises(ValueError, match="must be at least 0 and sum to 1. Got"):
        DepthLaw(chances=())
