"""The engine's figures on a quiet machine of two cores, in 12 minutes: `python -m benchmarks.engine_cpu --out DIR`.

Every part runs one case of `benchmarks.cases.engine` in a process of its own, with one thread, at sizes that end in
time; it is stopped where it would take more than its share, and what a part leaves goes to those after it. Tables of
each case lie in DIR as JSON, Markdown and TeX, and report.md says which parts passed. `--list` says what would be run.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from benchmarks.gpu_15min import Part, run, written
from benchmarks.timing import hardware

MINUTES = 12.0
SMALL = "--model loop-256 --rows 8"
FEW = "--requests 32 --outputs 16 --pairs 5 --sequential 1"
CASES: tuple[tuple[str, float, str], ...] = (
    ("targets", 0.11, f"--only loop-512 {FEW}"),
    ("targets", 0.19, f"--only loop-768 --widths 8 16 {FEW}"),
    ("targets", 0.10, f"--only sandwich-512 --widths 8 {FEW}"),
    ("rivals", 0.20, "--steps 4 --widths 1 8 16 --outputs 16 --batches 1 --pairs 5"),
    ("depth_mix", 0.08, "--rows 8 --requests 48 --outputs 16 --pairs 2 --sequential 2 --laws spread bimodal"),
    ("coda_rows", 0.06, "--rows 8 --requests 48 --outputs 16 --pairs 2"),
    ("online", 0.07, f"{SMALL} --requests 64 --outputs 16"),
    ("gates", 0.05, "--rows 8 --requests 32 --outputs 32 --pairs 2 --thresholds 0.5 0.7"),
    ("kv_rules", 0.05, f"{SMALL} --requests 48 --outputs 16 --pairs 1 --sequential 1 --windows 8 --thresholds 0.5"),
    ("prefix", 0.03, f"{SMALL} --requests 48 --outputs 8 --pairs 2"),
    ("pressure", 0.03, f"{SMALL} --requests 24 --outputs 80 --pairs 2"),
    ("long_context", 0.02, f"{SMALL} --requests 48 --outputs 8 --pairs 1 --sequential 1 --context 512"),
    ("overhead", 0.01, ""),
)
"""(case, share of the minutes, its options)."""


def parts(out: Path) -> list[Part]:
    """What is run, in order."""
    command = (sys.executable, "-m", "benchmarks.cases.engine")
    return [
        Part(f"engine.{case}", (*command, case, *words.split(), "--out", str(_folder(out, words.split()))), share)
        for case, share, words in CASES
    ]


def _folder(out: Path, words: list[str]) -> Path:
    """Of a part; parts of one case have one each, named by their model."""
    return out / words[1] if words[:1] == ["--only"] else out


def main() -> None:
    """Runs all parts and writes report.md and report.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("engine-out"), help="folder of tables and report")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--only", nargs="*", help="names of parts, such as engine.targets")
    parser.add_argument("--list", action="store_true", help="print the parts and their shares, and stop")
    options = parser.parse_args()
    chosen = [part for part in parts(options.out) if part.name in (options.only or [part.name])]
    if options.list:
        for part in chosen:
            print(f"{part.name:<20} {part.share * options.minutes:5.1f} min  {' '.join(part.words[1:])}")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * options.minutes
    found = []
    for place, part in enumerate(chosen):
        share = part.share / sum(other.share for other in chosen[place:])
        left = max(1.0, (end - time.monotonic()) * share)
        print(f"{part.name}: at most {left:.0f} s", flush=True)
        found.append(run(part, left))
        print(f"  {found[-1]['outcome']} ({found[-1]['seconds']} s)", flush=True)
        (options.out / "report.json").write_text(json.dumps({"device": hardware(), "parts": found}, indent=1) + "\n")
        (options.out / "report.md").write_text(written(found, hardware()))
    print(f"Report: {options.out / 'report.md'}")


if __name__ == "__main__":
    main()
