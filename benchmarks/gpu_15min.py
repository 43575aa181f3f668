"""Everything that needs a GPU, in one go of at most 15 minutes: `python -m benchmarks.gpu_15min --out DIR`.

    tests        pytest -m gpu
    engine       depth_mix and width at sizes that fill the device, rivals
    audit        the shared walk over all schedules
    training     float32, bf16 and compiled bf16 through the trainer

Each part has its share of the minutes and is stopped at its end; what had been finished is kept. The report says of
every part whether it passed, failed or ran out of time, its numbers, and the last lines of what it printed. Parts are
ordered by what a reader needs most.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

MINUTES = 15.0
RESERVE = 15.0
"""Seconds kept for writing the report."""


class Part(NamedTuple):
    """One command and its share of the time."""

    name: str
    words: tuple[str, ...]
    share: float
    """Of the minutes; what a part leaves goes to those after it."""


def parts(device: str) -> list[Part]:
    """What is run, in order."""
    python, engine = sys.executable, ("-m", "benchmarks.cases.engine")
    on = ("--device", device)
    size = ("--model", "loop-1024", "--requests", "512", "--pairs", "5", *on)
    return [
        Part("tests", (python, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests"), 0.35),
        Part(
            "engine.depth_mix",
            (python, *engine, "depth_mix", "--rows", "64", "--laws", "spread", "bimodal", *size),
            0.2,
        ),
        Part(
            "engine.rivals",
            (python, *engine, "rivals", "--widths", "16", "64", "--model", "loop-1024", *on, "--steps", "4"),
            0.15,
        ),
        Part("audit_walk", (python, "-m", "benchmarks.cases.audit_walk", *on), 0.08),
        Part("training_device", (python, "-m", "benchmarks.cases.training_device", *on), 0.12),
        Part("engine.width", (python, *engine, "width", "--widths", "32", "64", *size), 0.1),
    ]


def run(part: Part, seconds: float) -> dict[str, Any]:
    """Runs a part for at most so many seconds."""
    start = time.monotonic()
    process = subprocess.Popen(
        part.words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        said, _ = process.communicate(timeout=seconds)
        outcome = "passed" if process.returncode == 0 else f"failed, exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        said, _ = process.communicate()
        outcome = f"stopped after {seconds:.0f} s"
    lines = said.splitlines()
    return {
        "part": part.name,
        "command": " ".join(part.words[1:]),
        "outcome": outcome,
        "seconds": round(time.monotonic() - start, 1),
        "numbers": [json.loads(line) for line in lines if line.startswith('{"')],
        "tail": lines[-25:],
    }


def written(found: list[dict[str, Any]], device: str) -> str:
    """The report for people."""
    lines = [f"# {device}", "", "| part | outcome | seconds |", "|---|---|---|"]
    lines += [f"| {one['part']} | {one['outcome']} | {one['seconds']} |" for one in found]
    for one in found:
        lines += ["", f"## {one['part']}", "", f"    {one['command']}", "", "```", *one["tail"], "```"]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs all parts and writes report.md and report.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-out"), help="folder of the report")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="*", help="names of parts")
    parser.add_argument("--list", action="store_true", help="print the parts and their shares, and stop")
    options = parser.parse_args()
    chosen = [part for part in parts(options.device) if not options.only or part.name in options.only]
    if options.list:
        for part in chosen:
            print(f"{part.name:<18} {part.share * options.minutes:5.1f} min  {' '.join(part.words[1:])}")
        return
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        sys.exit("gpu_15min: --device must be one that this PyTorch can use. Got cuda, and there is none. Use --list.")
    named = torch.cuda.get_device_name() if options.device.startswith("cuda") else options.device
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * options.minutes - RESERVE
    found: list[dict[str, Any]] = []
    for place, part in enumerate(chosen):
        left, shares = end - time.monotonic(), sum(other.share for other in chosen[place:])
        if left <= 0:
            found.append({"part": part.name, "command": "", "outcome": "no time left", "seconds": 0, "tail": []})
            continue
        print(f"{part.name}: at most {left * part.share / shares:.0f} s", flush=True)
        found.append(run(part, left * part.share / shares))
        print(f"  {found[-1]['outcome']} ({found[-1]['seconds']} s)", flush=True)
        (options.out / "report.json").write_text(json.dumps({"device": named, "parts": found}, indent=1) + "\n")
        (options.out / "report.md").write_text(written(found, named))
    print(f"Report: {options.out / 'report.md'}")


if __name__ == "__main__":
    main()
