"""Continuous depth batching: `python -m benchmarks.cases.engine CASE ...`, or no name for all of them.

    depth_mix   depth laws: sequential at full depth and with exits, continuous batching at full depth, depth batching
                without and with refill
    width       launch rows and residents, beside the closed form of `engine.bound`
    rivals      decoding at equal depth against `generate` of transformers on the same weights

Arms of a case run the same requests with the same recorded depths, in turn; all arms with exits must say the same
tokens, and all at full depth, before a number is printed. `work` is the full-depth FLOPs over those that were executed,
as a share of the exact bound; `fill` the mean rows of core launches in the steady window over W; `time` the ratio of
tokens per second in that window to continuous batching at full depth, and `of_bound` that ratio over S_adj.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.baselines import sequential, transformers_generate
from benchmarks.cases.engine_load import VOCAB, Load, Numbers, Run, load_of, model_of, run
from benchmarks.cases.models import table
from benchmarks.timing import report
from looplab.engine.bound import adjusted_bound, exact_bound, speedup_bound, work_of
from looplab.engine.config import EngineConfig
from looplab.engine.engine import Engine
from looplab.engine.request import SamplingParams

Rows = list[dict[str, Any]]
Rival = Callable[[Sequence[Sequence[int]], Sequence[int]], tuple[list[list[int]], float]]
ARMS: dict[str, dict[str, Any]] = {
    "continuous, full depth": {"segments": "plan"},
    "depth batching, wave": {"refill": False},
    "depth batching, refill": {},
}


def depth_mix(options: argparse.Namespace) -> Rows:
    """Depth laws: what exits gain over continuous batching at full depth."""
    model = model_of(options.model, options.device, options.dtype)
    width, residents = options.rows, options.residents or options.rows + options.rows // 2
    rows: Rows = []
    for law in options.laws:
        steps = model.spec.default_steps
        load = load_of(law, steps, requests=options.requests, prompt=16, outputs=options.outputs, seed=0)
        runs = _arms(model, load, options.pairs, width, residents)
        rows += [{"law": law} | row for row in _rows(model, load, runs, width, residents)]
        if options.sequential:
            rows += [{"law": law} | row for row in _sequential(model, load, options.sequential, runs)]
    return rows


def width(options: argparse.Namespace) -> Rows:
    """Launch rows and residents: where thin readouts cost what exits gain."""
    model = model_of(options.model, options.device, options.dtype)
    rows: Rows = []
    for launch in options.widths:
        for factor in (1.0, 1.5, 2.0):
            residents = round(launch * factor)
            load = load_of(
                "spread", model.spec.default_steps, requests=max(options.requests, 4 * residents), prompt=16,
                outputs=options.outputs, seed=0,
            )  # fmt: skip
            runs = _arms(model, load, options.pairs, launch, residents)
            rows += _rows(model, load, runs, launch, residents)
    return rows


def rivals(options: argparse.Namespace) -> Rows:
    """Decoding at equal depth against transformers on the same weights; all sides must say the same tokens."""
    dim = int(options.model.split("-")[1])
    native, ours = (one.to(options.device) for one in transformers_generate.twins(dim, VOCAB))
    rows: Rows = []
    for launch in (1, *options.widths):
        requests, random = launch * options.batches, np.random.default_rng(launch)
        prompts = [tuple(map(int, row)) for row in random.integers(1, VOCAB, (requests, 16))]
        lengths = {
            "equal": [options.outputs] * requests,
            "exponential": [int(n) for n in np.clip(random.exponential(options.outputs / 2, requests), 2, 200)],
        }
        for law, outputs in lengths.items():
            for name, rival in _rivals(native, launch, law).items():
                ratios = []
                for pair in range(options.pairs + 1):
                    theirs, slow = rival(prompts, outputs)
                    mine, fast = _engine_alone(ours, launch, prompts, outputs)
                    if mine != theirs:
                        raise AssertionError(f"engine: {name} says other tokens")
                    ratios += [slow / fast] if pair else []
                low, high = _interval(ratios)
                row = {"lengths": law, "rows": launch, "against": name, "ratio": statistics.median(ratios)}
                rows.append(row | {"low": low, "high": high, "tokens_s": sum(outputs) / fast})
    return rows


def _rivals(native: Any, rows: int, law: str) -> dict[str, Rival]:
    def padded(prompts: Sequence[Sequence[int]], outputs: Sequence[int]) -> tuple[list[list[int]], float]:
        said: list[list[int]] = []
        seconds = 0.0
        for first in range(0, len(prompts), rows):
            part = slice(first, first + rows)
            tokens, took = transformers_generate.padded(native, prompts[part], outputs[part])
            said, seconds = said + tokens, seconds + took
        return said, seconds

    def continuous(prompts: Sequence[Sequence[int]], outputs: Sequence[int]) -> tuple[list[list[int]], float]:
        return transformers_generate.continuous(native, prompts, outputs[0])

    return {"generate, padded": padded} | ({"continuous batching": continuous} if law == "equal" and rows > 1 else {})


def _engine_alone(
    model: Any, rows: int, prompts: Sequence[Sequence[int]], outputs: Sequence[int]
) -> tuple[list[list[int]], float]:
    """The engine at full depth, the whole plan per launch, as many residents as rows."""
    config = EngineConfig(
        launch_rows=rows, max_resident=rows, min_coda_rows=1, num_pages=rows * 16 + 1, segments="plan", reuse="off"
    )
    engine = Engine(model, Numbers(), config)  # new, so that no prompt is cached; not timed, as loading is not
    start = time.perf_counter()
    sampling = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in outputs]
    found = engine.generate(prompts, sampling)
    return [list(one.tokens) for one in found], time.perf_counter() - start


CASES: dict[str, Callable[[argparse.Namespace], Rows]] = {"depth_mix": depth_mix, "width": width, "rivals": rivals}


def _arms(model: Any, load: Load, pairs: int, width: int, residents: int) -> dict[str, list[Run]]:
    """Runs of every arm, in turn and back again; every engine is new, so no prompt is cached."""

    def one(name: str) -> Run:
        coda = _coda(width, residents)
        config = EngineConfig(
            launch_rows=width, max_resident=residents, min_coda_rows=coda, num_pages=residents * 16 + 1, **ARMS[name]
        )
        return run(Engine(model, Numbers(), config), load, full="segments" in ARMS[name])

    runs: dict[str, list[Run]] = {name: [] for name in ARMS}
    for pair in range(pairs + 1):
        for name in ARMS if pair % 2 else reversed(ARMS):
            found = one(name)
            if pair:  # the first warms up
                runs[name].append(found)
    early = [runs[name][0].tokens for name in ARMS if "segments" not in ARMS[name]]
    if next(model.parameters()).dtype == torch.float32 and any(tokens != early[0] for tokens in early):
        raise AssertionError("engine: arms with the same recorded depths say different tokens")
    return runs


def _rows(model: Any, load: Load, runs: dict[str, list[Run]], width: int, residents: int) -> Rows:
    spec = model.spec
    steps = spec.default_steps
    baseline = runs["continuous, full depth"]
    bound = speedup_bound(work_of(spec.cost), [steps], [load.mean])
    tokens = [
        (len(prompt) + i, (depth,))
        for prompt, own in zip(load.prompts, load.depths, strict=True)
        for i, depth in enumerate(own)
    ]
    exact = exact_bound(spec.cost, [steps], tokens)
    prefill = statistics.median(one.stats.launch_seconds["prefill"] for one in baseline)
    decode = statistics.median(one.decode_seconds for one in baseline)
    adjusted = adjusted_bound(bound, prefill_seconds=prefill, decode_seconds=decode)
    rows: Rows = []
    for name, mine in runs.items():
        ratios = [
            (one.window_tokens / one.window_seconds) / (other.window_tokens / other.window_seconds)
            for one, other in zip(mine, baseline, strict=True)
        ]
        low, high = _interval(ratios)
        executed = mine[0].stats.applications
        whole = load.decoded * steps
        full = name == "continuous, full depth"
        limit = 1.0 if full else adjusted
        rows.append(
            {
                "arm": name, "W": width, "R": residents, "m": _coda(width, residents),
                "tokens_s": statistics.median(one.window_tokens / one.window_seconds for one in mine),
                "S_max": bound, "S_exact": exact, "S_adj": adjusted,
                "work": 1.0 if full else _work(spec, load, executed, whole, exact),
                "fill": mine[0].window_rows / max(1, mine[0].window_launches) / width,
                "time": statistics.median(ratios), "low": low, "high": high,
                "of_bound": statistics.median(ratios) / limit,
                "core_launches": mine[0].stats.launches["core"], "coda_launches": mine[0].stats.launches["coda"],
                "waste": sum(mine[0].stats.wasted.values()),
            }
        )  # fmt: skip
    return rows


def _coda(width: int, residents: int) -> int:
    return 1 if residents < width + width // 2 else width // 2


def _work(spec: Any, load: Load, executed: int, whole: int, exact: float) -> float:
    """Full-depth work over executed work, as a share of what the depths allow; wasted applications make it smaller."""
    asked = sum(sum(own) for own in load.depths)
    work = work_of(spec.cost)
    allowed = load.decoded * work.outside + asked * work.blocks[0]
    spent = load.decoded * work.outside + executed * work.blocks[0]
    return allowed / spent


def _interval(values: list[float]) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    random = np.random.default_rng(0)
    draws = np.median(random.choice(values, (2000, len(values))), axis=1)
    return float(np.quantile(draws, 0.025)), float(np.quantile(draws, 0.975))


def _sequential(model: Any, load: Load, requests: int, runs: dict[str, list[Run]]) -> Rows:
    """The first requests one after the other: the same tokens, and their speed."""
    steps = model.spec.default_steps
    rows: Rows = []
    for name, arm, depths in (
        ("sequential, exits", "depth batching, refill", load.depths),
        ("sequential, full depth", "continuous, full depth", [(steps,) * len(own) for own in load.depths]),
    ):
        said = sequential.run(model, load.prompts[:requests], depths[:requests], steps)
        same = sum(a == b for a, b in zip(said.tokens, runs[arm][0].tokens, strict=False))
        decoded = sum(len(own) for own in depths[:requests])
        rows.append(
            {"arm": name, "W": 1, "R": 1, "tokens_s": decoded / said.decode_seconds, "equal": f"{same}/{requests}"}
        )
    return rows


def main() -> None:
    """Measures the cases and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], metavar="CASE")
    parser.add_argument("--model", default="loop-512", help="loop-DIM or sandwich-DIM")
    parser.add_argument("--laws", nargs="*", default=["equal", "spread", "bimodal", "tail"])
    parser.add_argument("--rows", type=int, default=16, help="W of depth_mix")
    parser.add_argument("--residents", type=int, help="R of depth_mix; default 1.5 W")
    parser.add_argument("--widths", nargs="*", type=int, default=[8, 16, 32], help="W of width and rivals")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--outputs", type=int, default=40, help="tokens per request")
    parser.add_argument("--pairs", type=int, default=7, help="runs per arm, after one to warm up")
    parser.add_argument("--sequential", type=int, default=8, help="requests of the sequential arms; 0: none")
    parser.add_argument("--batches", type=int, default=3, help="requests of rivals, in multiples of their rows")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16; bfloat16 promises no equal tokens")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", help="folder for the results as JSON")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in options.cases or CASES:
        case = CASES[name]
        print(f"\n{name}: {(case.__doc__ or '').splitlines()[0]}")
        rows = case(options)
        print(table(rows))
        report(f"engine_{name}", {"rows": rows, "model": options.model, "load": os.getloadavg()[0]}, options.out)


if __name__ == "__main__":
    main()
