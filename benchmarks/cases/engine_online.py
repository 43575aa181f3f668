"""Requests that come by themselves: `online`.

An open loop drives the engine in this process, without HTTP: requests of a Poisson process come at their times whether
or not others have been answered, and latencies count from those times. Rates are shares of what depth batching with
refill answers when everything waits for it at once. A request is good where its first token and its later ones both
come within `--limit` times what a request alone on the engine takes; goodput is good requests per second.
"""

import argparse
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.cases.engine_depth import ARMS, FULL, REFILL, engine_of
from benchmarks.cases.engine_load import Drive, Load, Run, load_of, model_of, replayed
from benchmarks.cases.engine_table import Row, Rows, check_equal, counts, facts, fractions, latency

ONLINE = (FULL, REFILL)


def online(options: argparse.Namespace) -> Rows:
    """Latency and goodput at Poisson arrivals, by rate as a share of capacity."""
    model = model_of(options.model, options.device, options.dtype)
    width, residents = options.rows, options.residents or options.rows + options.rows // 2
    load = load_of(
        "spread", model.spec.default_steps, requests=options.requests, prompt=options.prompt, outputs=options.outputs,
        seed=0, spread=True,
    )  # fmt: skip

    def once(name: str, requests: Load, arrivals: Sequence[float] | None = None) -> Run:
        engine = engine_of(model, width, residents, options, **ARMS[name])
        drive = Drive(engine, requests, replayed(engine, requests, full=name == FULL), arrivals=arrivals)
        return drive.finish()

    first = Load(prompts=load.prompts[:1], depths=load.depths[:1])
    once(REFILL, load)  # warms up
    offline = {name: once(name, load) for name in ONLINE}
    alone = [once(REFILL, first).trails[0].latencies() for _ in range(5)]
    limits = {name: options.limit * float(np.median([one[name] for one in alone])) for name in ("ttft_ms", "tpot_ms")}
    capacity = len(load.prompts) / offline[REFILL].seconds
    rows: Rows = []
    for rate in options.rates:
        for name in ONLINE:
            runs = []
            for seed in range(options.seeds):
                gaps = np.random.default_rng([seed, 1]).exponential(1 / (rate * capacity), len(load.prompts))
                runs.append(once(name, load, list(np.cumsum(gaps))))
                check_equal(f"{name} at once and one by one", [offline[name].tokens, runs[-1].tokens])
            rows.append({"arm": name, "rate": rate} | _row(load, runs, rate * capacity, limits, full=name == FULL))
    return rows


def _row(load: Load, runs: Sequence[Run], offered: float, limits: dict[str, float], *, full: bool) -> Row:
    goodputs, answered = [], []
    for one in runs:
        span = max(trail.said[-1] for trail in one.trails) - min(trail.arrived for trail in one.trails)
        found = [trail.latencies() for trail in one.trails]
        good = sum(all(request[name] <= most for name, most in limits.items()) for request in found)
        goodputs.append(good / span)
        answered.append(len(found) / span)
    return (
        facts(runs[0], load)
        | {
            "offered_s": offered, "answered_s": float(np.mean(answered)), "goodput_s": float(np.mean(goodputs)),
            "goodput_low": min(goodputs), "goodput_high": max(goodputs),
        }
        | {f"limit_{name}": most for name, most in limits.items()}
        | latency(runs)
        | fractions(runs[0], load, full=full)
        | counts(runs[0])
    )  # fmt: skip


CASES: dict[str, Callable[[argparse.Namespace], Rows]] = {"online": online}
