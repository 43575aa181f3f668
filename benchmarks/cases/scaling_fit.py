"""Fits of all gains to 576 synthetic runs against the straightforward way: SciPy's L-BFGS-B, one search at a time.

Both sides search from the same starts and fit the same bootstrap replicates. SciPy has the analytic gradient and the
objective times 1e6, which its absolute stopping tests need. Printed are processor seconds of one thread, and how many
starts reached the least objective on either side; no time is printed unless the least objectives agree to 1e-4.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.timing import report
from looplab.scaling import fit, read_runs
from looplab.scaling.bootstrap import draw_counts
from looplab.scaling.examples import synthetic_runs
from looplab.scaling.laws import Additive, Decay, ForwardBackward, IsoDepth, Law, Power, Table, Tilt
from looplab.scaling.solver import Problem, draw_starts

sys.path.append(str(Path(__file__).parents[2] / "tests" / "reference"))
import huber_fit

TRUTH = {"A": 22.2, "alpha": 0.199, "B": 1223.0, "beta": 0.369, "E": 1.57, "phi_b": 0.459, "phi_f": 0.3}
POWER = ForwardBackward(gain=Power())
LAWS: list[Law] = [IsoDepth(), POWER, *(ForwardBackward(gain=g) for g in (Tilt(), Decay(), Additive(), Table()))]


def measured(starts: int, replicates: int, sample: int) -> dict[str, Any]:
    """Seconds of every law, and of SciPy on `sample` starts and replicates of the power gain, scaled to all."""
    runs = read_runs(synthetic_runs(POWER, POWER.values(**TRUTH), noise=0.005, seed=1))
    rows, best = [], None
    for law in LAWS:
        began = time.process_time()
        found = fit(runs, law, starts=starts, replicates=replicates)
        best = found if law == POWER else best
        rows.append(
            {
                "law": law.title,
                "seconds": time.process_time() - began,
                "at_best": found.start_share,
                "converged": found.converged,
            }
        )
    assert best is not None
    points = runs.points()
    problem = Problem(POWER, points, POWER.box(points))
    forward, back = points.pairs[points.pair].T
    data = points.n_once, points.n_rec, points.tokens, points.loss, forward, back
    draws = np.random.default_rng(0)
    one = np.ones(len(points))
    began = time.process_time()
    with np.errstate(all="ignore"):
        ends = [huber_fit.search(start, data, one)[1] for start in draw_starts(problem, sample, draws)]
    searched = (time.process_time() - began) * starts / sample
    counts, _ = draw_counts(problem, runs.cell_index, sample, draws)
    began = time.process_time()
    for count in counts:
        huber_fit.search(best.theta, data, count[runs.cell_index])
    drawn = (time.process_time() - began) * replicates / sample
    _, reached = huber_fit.search(best.theta, data, one)
    assert abs(reached / best.objective - 1) < 1e-4, "the two sides end at different minima"
    ours = next(row["seconds"] for row in rows if row["law"] == "Power")
    return {
        "runs": len(runs), "starts": starts, "replicates": replicates, "laws": rows,
        "all_seconds": sum(row["seconds"] for row in rows),
        "scipy": {
            "sample": sample, "seconds": searched + drawn, "ratio": (searched + drawn) / ours,
            "at_best": float(np.mean(np.array(ends) <= best.objective * 1.001)),
        },
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=500)
    parser.add_argument("--replicates", type=int, default=200)
    parser.add_argument("--sample", type=int, default=50)
    parser.add_argument("--out")
    options = parser.parse_args()
    numbers = measured(options.starts, options.replicates, options.sample)
    report("scaling_fit", {**numbers, "load": os.getloadavg()[0]}, options.out)


if __name__ == "__main__":
    main()
