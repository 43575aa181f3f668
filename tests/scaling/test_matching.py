"""Compute matching: the published table, and which measurements may be compared."""

import dataclasses

import pytest

from looplab.scaling.matching import SAME, Measurement, match

LOOPIE = {"loops": 2, "widths": (2176, 2304, 2432)}
CONDITIONS = dict.fromkeys(SAME, "a")


def measured(width, layers, loops, seconds, **more):
    given = {"quartiles": (seconds - 0.01, seconds + 0.01), "peak_bytes": 10**9 * layers, "steps": 20}
    return Measurement(
        width=width, layers=layers, loops=loops, step_seconds=seconds, conditions=CONDITIONS, **given | more
    )


MEASURED = (
    measured(2048, 48, 1, 1.0),
    measured(2176, 25, 2, 0.8),
    measured(2304, 27, 2, 0.995),
    measured(2432, 28, 2, 1.2),
)


def test_the_published_table():
    """arXiv:2607.16051: depths, nominal FLOPs and activations of the three candidates."""
    rows = match((2048, 48), **LOOPIE).rows
    shown = [(row.width, row.layers, row.loops, f"{row.flops:.2f}", f"{row.memory:.2f}") for row in rows]
    assert shown == [
        (2048, 48, 1, "1.00", "1.00"),
        (2048, 24, 2, "1.00", "0.50"),
        (2176, 25, 2, "1.18", "0.55"),
        (2304, 27, 2, "1.42", "0.63"),
        (2432, 28, 2, "1.65", "0.69"),
    ]


def test_equal_time_equal_flops_and_equal_memory_are_different_matches():
    found = {by: match((2048, 48), by=by, measurements=MEASURED, **LOOPIE) for by in ("flops", "step-time", "memory")}
    picked = {by: next(row.width for row in table.rows if row.matched) for by, table in found.items()}
    assert picked == {"flops": 2048, "step-time": 2304, "memory": 2432}
    assert "not measured" in str(found["step-time"]) and "<- matched by step-time" in str(found["step-time"])


def test_candidates_inside_the_quartiles_are_tied():
    close = [*MEASURED[:3], measured(2432, 28, 2, 1.005)]
    rows = match((2048, 48), by="step-time", measurements=close, **LOOPIE).rows
    assert [row.tied or row.matched for row in rows] == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"by": "step-time", "measurements": ()}, "matching by step-time needs measurements. Got none for 2048x48"),
        ({"widths": (2200,)}, "widths must be multiples of 128. Got 2200. Take 2176"),
        ({"loops": 5}, "loops must divide the 48 layers of the reference. Got 5"),
        ({"measurements": (measured(2048, 48, 1, 1.0, steps=3),)}, "medians of 20 steps or more. Got 3"),
    ],
)
def test_refusals(change, message):
    with pytest.raises(ValueError, match=message):
        match((2048, 48), **LOOPIE | change)


def test_measurements_of_other_hardware_are_not_matched():
    other = dataclasses.replace(MEASURED[1], conditions=CONDITIONS | {"hardware": "A100"})
    with pytest.raises(ValueError, match="must have one hardware. Got a for 2048x48 and A100 for 2176x25: not matched"):
        match((2048, 48), by="step-time", measurements=[MEASURED[0], other], **LOOPIE)
