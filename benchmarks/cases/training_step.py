"""Training steps: `python -m benchmarks.cases.training_step CASE ...`, or no name for all of them.

    speed     hand_loop sampled_depth naive_sampled per_sequence rivals
    memory    memory_window memory_checkpoint layer_unit readout_chunk

Counts, bytes and losses are asserted; a case that misses one ends with an error. Nothing depends on the times. Each
case takes less than a minute on a machine that does nothing else.
"""

import argparse
import os

import torch

from benchmarks.cases import training_memory, training_speed
from benchmarks.cases.models import table
from benchmarks.timing import report

CASES = {**training_speed.CASES, **training_memory.CASES}


def main() -> None:
    """Measures the cases and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], metavar="CASE")
    parser.add_argument("--pairs", type=int, default=7, help="paired runs of hand_loop and rivals")
    parser.add_argument("--draws", type=int, default=200, help="optimizer steps of sampled_depth and naive_sampled")
    parser.add_argument("--rows", type=int, default=1, help="of the batch of hand_loop and rivals")
    parser.add_argument("--seq", type=int, default=128, help="tokens per row of the same")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", help="folder for the results as JSON")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in options.cases or CASES:
        case = CASES[name]
        print(f"\n{name}: {(case.__doc__ or '').splitlines()[0]}")
        rows = case(options)
        print(table(rows))
        report(f"training_step_{name}", {"rows": rows, "load": os.getloadavg()[0]}, options.out)


if __name__ == "__main__":
    main()
