import dataclasses
import math

import pytest

from looplab.audit.result import TemperatureFit
from looplab.studies.base import STUDIES
from looplab.studies.drift import BOUNDARY, NO_DRIFT, DriftRows
from looplab.studies.measured import NOT_MEASURED
from report.sample import two_blocks

ARM = STUDIES["depth_schedule"]().arms("smoke", 1)[0]


def rows(temperatures, half=0.01, losses=None):
    """Rows of an audit whose schedule of k units wants a planted temperature, known to +-half in its logarithm."""
    result = two_blocks()
    domain, made = result.domains[0], []
    pattern = domain.schedule("full")
    for k, value in temperatures.items():
        name = "full" if k == 8 else f"prefix({k})" if k < 8 else f"extend_last({k})"
        low, high = (None, None) if value is None else (value * math.exp(-half), value * math.exp(half))
        fit = TemperatureFit(
            beta=0.0 if value is None else 1 / value, temperature=value, status="converged", low=low, high=high,
            passes=1, in_sample=None, cross={},
        )  # fmt: skip
        found = dataclasses.replace(pattern, name=name, k=k, temperature=fit)
        if losses:
            loss = dataclasses.replace(pattern.loss(), loss=losses[k - 1])
            found = dataclasses.replace(found, losses=(loss,))
        made.append(found)
    domain = dataclasses.replace(domain, schedules=tuple(made))
    return DriftRows(ARM, dataclasses.replace(result, domains=(domain,)))


STEP = {k: math.exp(0.3) for k in range(1, 8)} | {8: 1.0} | {k: math.exp(-0.2) for k in range(9, 13)}
LINE = {k: math.exp(0.1 * (8 - k)) for k in range(1, 13)}


def test_a_step_has_share_one_and_a_line_one_over_its_steps():
    for far in (1, 12):
        assert rows(STEP).step_share(8, far).value == pytest.approx(1)
    assert rows(LINE).step_share(8, 1).value == pytest.approx(1 / 7)
    assert rows(LINE).step_share(8, 12).value == pytest.approx(1 / 4)


def test_the_interval_of_a_share_holds_its_worst_corners():
    found = rows(STEP, half=0.01).step_share(8, 1)
    assert (found.low, found.high) == pytest.approx((0.28 / 0.32, 0.32 / 0.28))


def test_no_drift_has_no_share():
    flat = dict.fromkeys(range(1, 13), 1.3)
    assert rows(flat).step_share(8, 1).reason == NO_DRIFT
    assert rows(STEP, half=0.16).step_share(8, 1).reason == NO_DRIFT


def test_a_temperature_at_a_boundary_or_not_measured_says_so():
    assert rows(STEP | {1: None}).temperature(1).reason == BOUNDARY
    assert rows(STEP | {1: None}).step_share(8, 1).reason == BOUNDARY
    assert rows({1: 1.2, 8: 1.0}).shift(7, 8).reason == NOT_MEASURED
    assert rows({1: 1.2, 8: 1.0}).naive_slope().reason == NOT_MEASURED


def test_a_distance_has_no_sign_and_no_end_below_zero():
    found = rows({1: 1.5, 7: 1.005, 8: 1.0, 9: 0.8}, half=0.01)
    for k, value in ((1, 0.5), (9, 0.2)):
        row = found.shift(k, 8)
        assert row.value == pytest.approx(value)
        assert 0 < row.low < row.value < row.high
    assert found.shift(7, 8).low == 0


def test_the_naive_slope_is_the_gain_per_whole_plan():
    planted = [estimate(4 - 0.25 * k) for k in range(1, 9)]
    found = rows({k: 1.0 for k in range(1, 9)}, losses=planted).naive_slope()
    assert found.value == pytest.approx(2)
    assert found.low < 2 < found.high


def estimate(value):
    pattern = two_blocks().domains[0].schedule("full").loss().loss
    return dataclasses.replace(pattern, value=value, low=value - 0.1, high=value + 0.1, low90=value, high90=value)


def test_the_controlled_gap_is_the_gap_that_full_count_and_temperature_leave():
    result = two_blocks()
    domain = result.domains[0]
    repeat, full = (domain.schedule(name).loss("temperature").loss.value for name in ("repeat(1)", "full"))
    assert DriftRows(ARM, result).controlled_gap().value == pytest.approx(repeat - full)
