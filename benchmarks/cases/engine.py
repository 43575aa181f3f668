"""Continuous depth batching: `python -m benchmarks.cases.engine CASE ...`, or no name for all of them.

    depth_mix     depth laws: sequential at full depth and with exits, continuous batching at full depth, depth
                  batching without and with refill
    width         launch rows and residents
    targets       the cells that have a target, each with its least share of S_adj
    coda_rows     rows that a readout waits for
    kv_rules      rules for keys and values, at full depth and with exits; costs in nats on a checkpoint
    gates         ways to know when to stop, on a checkpoint and its gates
    speculative   guesses at few steps, confirmed at full depth, on a checkpoint and a random model
    online        Poisson arrivals
    prefix        prompts that begin alike
    pressure      fewer pages than residents need
    long_context  a context whose keys and values take longer to read than the weights
    rivals        decoding at equal depth against `generate` and continuous batching of transformers
    overhead      the scheduler alone, per launch

Tokens are compared between arms before a number is printed. What the columns mean: benchmarks/README.md.
"""

import argparse
import os

import torch

from benchmarks.cases import (
    engine_depth,
    engine_drafts,
    engine_knobs,
    engine_memory,
    engine_online,
    engine_overhead,
    engine_rivals,
)
from benchmarks.cases.models import table
from benchmarks.timing import CLOCKS, report

CASES = {
    **engine_depth.CASES,
    **engine_knobs.CASES,
    **engine_drafts.CASES,
    **engine_online.CASES,
    **engine_memory.CASES,
    **engine_rivals.CASES,
    **engine_overhead.CASES,
}
DETAIL = (
    "prefill_ encode_ core_ coda_ waste_ padding latency_ queue_ ttft_ms_p90 tpot_ms_p90 numerics kv_rule whole_ "
    "evicted_ limit_ replayed_ k r"
).split()
"""Columns, or their first letters, that stand in the files and not on the screen."""


def parser() -> argparse.ArgumentParser:
    """Options of all cases; each takes those that it names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], metavar="CASE")
    parser.add_argument("--model", default="loop-512", help="loop-DIM or sandwich-DIM")
    parser.add_argument("--checkpoint", default="demo", help="of gates, kv_rules and speculative")
    parser.add_argument("--laws", nargs="*", default=["equal", "spread", "bimodal", "tail"], help="of depth_mix")
    parser.add_argument("--rows", type=int, default=16, help="W where it does not vary")
    parser.add_argument("--residents", type=int, help="R where it does not vary; default 1.5 W")
    parser.add_argument("--widths", nargs="*", type=int, default=[8, 16, 32], help="W of width, targets and rivals")
    parser.add_argument(
        "--only", nargs="*", choices=sorted({one[0] for one in engine_depth.TARGETS}), help="models of targets"
    )
    parser.add_argument("--requests", type=int, default=128, help="at least; of targets: in the window")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a prompt")
    parser.add_argument("--outputs", type=int, default=40, help="tokens per request")
    parser.add_argument("--context", type=int, default=128, help="tokens: twice the prompts of prefix, windows of "
                        "gates and kv_rules, prompts of long_context")  # fmt: skip
    parser.add_argument("--pairs", type=int, default=7, help="runs per arm, after one to warm up")
    parser.add_argument("--sequential", type=int, default=8, help="requests that also run one after the other")
    parser.add_argument("--thresholds", nargs="*", type=float, default=[0.3, 0.5, 0.7], help="of gates; kv_rules: 1st")
    parser.add_argument("--windows", type=int, default=16, help="held-out windows of gates and kv_rules")
    parser.add_argument("--draft-steps", nargs="*", type=int, default=[1, 2], help="of speculative")
    parser.add_argument("--draft-tokens", nargs="*", type=int, default=[2, 4, 8], help="of speculative")
    parser.add_argument("--at-once", nargs="*", type=int, default=[1, 4, 16], help="requests of speculative")
    parser.add_argument("--rates", nargs="*", type=float, default=[0.5, 0.8, 0.95, 1.2], help="shares of capacity")
    parser.add_argument("--seeds", type=int, default=3, help="of online")
    parser.add_argument("--limit", type=float, default=5.0, help="of online, in times of a request alone")
    parser.add_argument("--shares", nargs="*", type=float, default=[0.0, 0.5, 0.9], help="shared part of prompts")
    parser.add_argument("--pages", nargs="*", type=float, default=[1.0, 0.7, 0.5, 0.35], help="of those needed")
    parser.add_argument("--batches", type=int, default=3, help="requests of rivals, in multiples of their rows")
    parser.add_argument("--steps", nargs="*", type=int, default=[1, 4], help="of rivals; 1: a dense model")
    parser.add_argument("--lengths", nargs="*", default=["equal", "exponential"], help="of answers, of rivals")
    parser.add_argument("--rivals", nargs="*", default=[engine_rivals.PADDED, engine_rivals.CONTINUOUS])
    parser.add_argument("--numerics", default="fast", choices=["fast", "exact"])
    parser.add_argument("--clock", default="wall", choices=list(CLOCKS), help="process: on a machine that others use")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16; bfloat16 promises no equal tokens")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", help="folder for the results as JSON, Markdown and TeX")
    return parser


def main() -> None:
    """Measures the cases and reports."""
    options = parser().parse_args()
    torch.set_num_threads(options.threads)
    for name in options.cases or CASES:
        case = CASES[name]
        print(f"\n{name}: {(case.__doc__ or '').splitlines()[0]}")
        rows = case(options)
        print(table([{key: cell for key, cell in row.items() if not detail(key)} for row in rows]))
        asked = {key: value for key, value in vars(options).items() if key not in ("cases", "out")}
        report(f"engine_{name}", {"rows": rows, "options": asked, "load": os.getloadavg()[0]}, options.out, detail)


def detail(column: str) -> bool:
    """Whether a column stands in the second table."""
    return any(column == start or (start.endswith("_") and column.startswith(start)) for start in DETAIL)


if __name__ == "__main__":
    main()
