"""P1: planted temperature, on the real audit and on broken ones."""

import pytest

from looplab.audit import decompose
from looplab.audit.config import AuditConfig
from looplab.audit.positive_controls import planted_temperature
from looplab.audit.positive_controls.planted_temperature import TEMPERATURES, PlantedTemperature, fit_errors
from looplab.audit.probes import temperature

pytestmark = pytest.mark.slow


def failing(outcome):
    return [
        e for e, f in zip(outcome.expected.splitlines(), outcome.found.splitlines(), strict=True) if "<- fails" in f
    ]


def test_p1_the_planted_temperature_is_found_and_nothing_where_none_was_planted():
    outcome = PlantedTemperature().run(0)
    assert outcome.passed, outcome
    assert len(outcome.expected.splitlines()) == 6


def test_the_fit_is_exact_on_soft_labels_and_within_one_percent_on_samples():
    soft, sampled, scale = fit_errors(1)
    assert soft < 1e-9 and scale < 1e-8
    assert 1e-5 < sampled < 0.01
    assert TEMPERATURES == (0.5, 0.6, 1.0, 1.7, 2.5, 4.0)


def test_p1_catches_a_fit_that_always_says_one(monkeypatch):
    monkeypatch.setattr(temperature._Search, "_narrow", lambda self, *_: setattr(self, "status", "converged"))
    found = failing(PlantedTemperature().run(0))
    assert {"T from exact soft labels: error <= 1e-06", "T from 200,000 sampled tokens: error <= 1 %"} <= set(found)
    assert "readout scaled by 1/T*: temperature share 100 +- 1 %" in found


@pytest.fixture
def fits_taken_as_good(monkeypatch):
    """Leaves out what needs no audit."""
    monkeypatch.setattr(planted_temperature, "fit_errors", lambda seed: (0.0, 0.0, 0.0))


@pytest.mark.usefixtures("fits_taken_as_good")
def test_p1_catches_a_gain_that_is_not_net_of_the_raw_loss(monkeypatch):
    monkeypatch.setattr(decompose, "gain", lambda probe, schedule: {(probe, schedule): 1.0})
    found = failing(PlantedTemperature().run(0))
    assert "readout scaled by 1/T*: temperature share 100 +- 1 %" in found
    assert "twin, calibrated where it is cut short: temperature share equivalent to 0" in found


@pytest.mark.usefixtures("fits_taken_as_good")
def test_p1_catches_shares_of_a_gap_that_is_not_there(monkeypatch):
    monkeypatch.setattr(AuditConfig, "__post_init__", lambda self: object.__setattr__(self, "gap_floor", -1.0))
    monkeypatch.setattr(decompose, "_share", lambda losses, part, whole, level: losses.estimate(part, level))
    assert "T* = 1: no gap, and no share of it" in failing(PlantedTemperature().run(0))
