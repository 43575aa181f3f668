"""Paired timing, and the one form in which a case reports."""

import datetime
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import looplab


def paired(
    first: Callable[[], Any],
    second: Callable[[], Any],
    *,
    pairs: int,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[float], list[float]]:
    """Seconds of alternating runs, after one warm-up of each.

    Args:
        clock: `time.process_time` counts the processor's time of this process alone, for a machine that others use.
    """
    first(), second()
    times: tuple[list[float], list[float]] = ([], [])
    for index in range(pairs):
        for side in (0, 1) if index % 2 == 0 else (1, 0):
            start = clock()
            (first, second)[side]()
            if torch.cuda.is_available():  # launches return before their work is done
                torch.cuda.synchronize()
            times[side].append(clock() - start)
    return times


def report(case: str, numbers: dict[str, Any], out: str | None) -> None:
    """Prints one JSON document, and writes it under `out`."""
    facts = {
        "case": case,
        **numbers,
        "hardware": hardware(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "looplab": looplab.__version__,
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
    }
    text = json.dumps(facts, sort_keys=True)
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
        name = f"{case}_{facts['hardware'].replace(' ', '-').lower()}_{facts['date']}.json"
        Path(out, name).write_text(json.dumps(facts, sort_keys=True, indent=1) + "\n")
    print(text)


def ratio(slow: list[float], fast: list[float]) -> dict[str, float]:
    """Medians, and the median and range of the paired ratios slow / fast."""
    ratios = sorted(a / b for a, b in zip(slow, fast, strict=True))
    return {
        "slow_seconds": statistics.median(slow),
        "fast_seconds": statistics.median(fast),
        "ratio": statistics.median(ratios),
        "ratio_low": ratios[0],
        "ratio_high": ratios[-1],
    }


def hardware() -> str:
    """Processor family and number of cores torch may use."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} {torch.get_num_threads()} threads"


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
