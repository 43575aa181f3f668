"""The page of trained gates: how often they choose their teacher's depth, and how deep they go."""

import os
from pathlib import Path

from looplab.report.keyed import Keyed
from looplab.report.sheet import measured, write_sheet
from looplab.report.tables import Table, amount, words
from looplab.training.gates import GateResult


def write_gates(result: GateResult, folder: str | os.PathLike[str]) -> Path:
    """Writes the page and tables.tex, and returns the path of the page."""
    keyed = Keyed(result)
    return write_sheet(
        result,
        folder,
        title="Gates",
        subject=result.model,
        sentences=sentences(result),
        tables=[depths_table(keyed), losses_table(keyed)],
    )


def sentences(result: GateResult) -> list[str]:
    """What was trained, and the best and worst agreement of every gate."""
    taught = "its own gate" if result.teacher == "hazard" else f"the rule {result.teacher}"
    said = [
        f"Teacher: {taught}, over {result.steps} steps. {result.updates} updates on {result.text}; compared on "
        f"{result.tokens:,} tokens of {result.documents} documents of {result.held_out}."
    ]
    for gate in dict.fromkeys(row.gate for row in result.rows):
        rows = [row for row in result.rows if row.gate == gate]
        agreed = [row.agreement.estimate for row in rows]
        furthest = max(rows, key=lambda row: row.distance.estimate)
        said.append(
            f"{gate}: the teacher's depth for {min(agreed):.1%} to {max(agreed):.1%} of tokens; furthest from it at "
            f"{furthest.threshold:g}, by {furthest.distance.estimate:.2f} steps."
        )
    return said


def depths_table(result: Keyed) -> Table:
    """Depths beside the teacher's, by threshold."""
    rows = [
        (
            words(row.gate),
            amount(row.threshold, 4),
            amount(row.teacher_threshold, 4),
            measured(row.agreement, percent=True),
            measured(row.mean_depth),
            measured(row.teacher_depth),
            measured(row.distance),
        )
        for row in result.rows
    ]
    columns = ("gate", "threshold", "teacher's", "same depth", "mean depth", "teacher's depth", "distance, steps")
    note = (
        "Small: 95 % intervals over documents. same_step is the control of lookahead: the same head about the step "
        "whose state it reads. A lookahead gate cannot stop after step 1."
    )
    return Table("depths", "Chosen depths on held-out text", columns, tuple(rows), note)


def losses_table(result: Keyed) -> Table:
    """Training losses by tenths of the run."""
    rows = [(words(gate), *(amount(loss, 4) for loss in result.losses[gate])) for gate in result.held.losses]
    width = max((len(losses) for losses in result.held.losses.values()), default=0)
    columns = ("gate", *(f"{number}/{width}" for number in range(1, width + 1)))
    return Table("losses", "Training loss, by tenths of the updates", columns, tuple(rows))
