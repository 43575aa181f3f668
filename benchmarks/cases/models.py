"""Memory and speed of models: `python -m benchmarks.cases.models CASE ...`, or no name for all of them.

    counts    ops_per_application attention_paths compile_step head_chunks
    memory    checkpoint_application checkpoint_layerloop rollout_memory load_memory
    speed     decode_vs_generate train_vs_plain kv_decode mixed_rows adapter_overhead

Counts and bytes are asserted; a case that misses one ends with an error. Times are medians of paired ratios against a
named rival, with the smallest and largest one, and nothing depends on them.
"""

import argparse
import os
from typing import Any

import torch

from benchmarks.cases import models_counts, models_memory, models_speed
from benchmarks.timing import cell, report

CASES = {**models_counts.CASES, **models_memory.CASES, **models_speed.CASES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], metavar="CASE")
    parser.add_argument("--pairs", type=int, default=9, help="paired runs of a timed case")
    parser.add_argument("--tokens", type=int, default=16, help="launches per run of kv_decode and mixed_rows")
    parser.add_argument("--layers", type=int, default=8, help="layers of the folder of load_memory (67 MB each)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", help="folder for the results as JSON")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in options.cases or CASES:
        case = CASES[name]
        print(f"\n{name}: {(case.__doc__ or '').splitlines()[0]}")
        rows = case(options)
        print(table(rows))
        report(f"models_{name}", {"rows": rows, "load": os.getloadavg()[0]}, options.out)


def table(rows: list[dict[str, Any]]) -> str:
    """Aligned columns, one row per line."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [columns] + [[cell(row.get(name, "")) for name in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = []
    for line in cells:
        first, *rest = (text.rjust(width) for text, width in zip(line, widths, strict=True))
        lines.append("  ".join([first.strip().ljust(widths[0]), *rest]))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
