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
from looplab.report.latex import render
from looplab.report.tables import Cell, Table

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "process": time.process_time}
"""process: processor time of this process alone, all its threads together."""


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


def report(
    case: str, numbers: dict[str, Any], out: str | None, detail: Callable[[str], bool] = lambda column: False
) -> None:
    """Prints one JSON document, and writes it under `out`, its rows as Markdown and TeX too.

    Args:
        detail: Columns that go into a second table.
    """
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
        path = Path(out, f"{case}_{facts['hardware'].replace(' ', '-').lower()}_{facts['date']}.json")
        path.write_text(json.dumps(facts, sort_keys=True, indent=1) + "\n")
        tables = _tables(facts, detail)
        if tables:
            path.with_suffix(".md").write_text("\n".join(markdown(one) for one in tables))
            path.with_suffix(".tex").write_text("\n".join(render(one) for one in tables))
    print(text)


def markdown(table: Table) -> str:
    """A caption and a table."""
    lines = [table.columns, ["---"] * len(table.columns), *[[cell.text for cell in row] for row in table.rows]]
    return "\n".join([f"{table.caption}. {table.note}", "", *[f"| {' | '.join(line)} |" for line in lines], ""])


def _tables(facts: dict[str, Any], detail: Callable[[str], bool]) -> list[Table]:
    """The rows of a report; what is detail beside the words of a row in a second table."""
    rows = facts.get("rows", [])
    columns = list(dict.fromkeys(name for row in rows for name in row))
    words = [name for name in columns if any(isinstance(row.get(name), str) for row in rows)]
    main, rest = [name for name in columns if not detail(name)], [name for name in columns if detail(name)]
    note = ", ".join(f"{name} {facts[name]}" for name in ("hardware", "threads", "torch", "looplab", "commit", "date"))
    found = []
    for caption, chosen in ((facts["case"], main), (f"{facts['case']}, counts", [*words, *rest] if rest else [])):
        chosen = list(dict.fromkeys(chosen))
        body = tuple(tuple(Cell(cell(row.get(name, ""))) for name in chosen) for row in rows)
        left = tuple(i for i, name in enumerate(chosen) if name in words)
        found += [Table(facts["case"], caption, tuple(chosen), body, note, left)] if body and chosen else []
    return found


def cell(value: Any) -> str:
    """A number as tables show it."""
    return f"{value:.3f}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


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
