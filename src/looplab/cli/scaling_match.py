"""`looplab scaling match`: looped shapes that cost what a reference without loops costs."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from looplab.cli import exit_codes
from looplab.cli.exit_codes import UserError, user_error
from looplab.scaling import match
from looplab.scaling.matching import SAME, Measurement


@dataclass(frozen=True, kw_only=True)
class Options:
    """Find the looped shape that costs what a reference costs, in FLOPs, step time or memory.

    All three quantities are always shown; the matched one is named. Equal FLOPs, equal time and equal memory are
    different shapes.
    """

    reference: str = "2048x48"
    """WIDTHxLAYERS of the model without loops."""
    loops: int = 2
    """Applications of every stored layer."""
    widths: tuple[int, ...] = (2176, 2304, 2432)
    """Widths of the candidates, multiples of 128."""
    by: Literal["flops", "step-time", "memory"] = "flops"
    """The quantity that is matched."""
    measurements: Path | None = None
    """JSONL with width, layers, loops, step_seconds, quartiles [low, high], peak_bytes, steps, and hardware, seq_len,
    tokens_per_step, optimizer, checkpointing, data, which must be alike in all rows."""


def main(argv: Sequence[str]) -> int:
    """Runs the action and returns its exit code."""
    options = tyro.cli(Options, args=list(argv), prog="looplab scaling match")
    numbers = options.reference.split("x")
    if len(numbers) != 2 or not all(part.isdigit() and int(part) for part in numbers):
        raise UserError(
            f"--reference must be WIDTHxLAYERS. Got {options.reference!r}. Write 2048x48.", exit_codes.USAGE
        )
    measured = [] if options.measurements is None else _read(options.measurements)
    with user_error(exit_codes.DATA if measured else exit_codes.USAGE, (ValueError,)):
        found = match(
            (int(numbers[0]), int(numbers[1])),
            loops=options.loops,
            widths=options.widths,
            by=options.by,
            measurements=measured,
        )
    print(found)
    return exit_codes.DONE


def _read(path: Path) -> list[Measurement]:
    with user_error(exit_codes.DATA, (OSError, KeyError, TypeError, ValueError)):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        return [
            Measurement(
                width=int(row["width"]),
                layers=int(row["layers"]),
                loops=int(row["loops"]),
                step_seconds=float(row["step_seconds"]),
                quartiles=(float(row["quartiles"][0]), float(row["quartiles"][1])),
                peak_bytes=int(row["peak_bytes"]),
                steps=int(row["steps"]),
                conditions={name: str(row[name]) for name in SAME},
            )
            for row in rows
        ]
