"""Fits: recovery, nested laws, refusals, and equal bytes for equal input."""

import subprocess
import sys

import numpy as np
import pytest
from scipy.integrate import quad

from looplab.records import dump_json
from looplab.scaling import Fit, FitRefused, fit, read_runs
from looplab.scaling.fit import BOOTSTRAP, SANDWICH, huber_likelihood
from looplab.scaling.laws import Additive, Chinchilla, Decay, ForwardBackward, IsoDepth, Parcae, Power, Table, Tilt
from looplab.scaling.runs import subset
from synthetic import TRUTH, rows_of

QUICK = {"starts": 24, "replicates": 0}
POWER = ForwardBackward(gain=Power())
TRUTHS = [
    (IsoDepth(), {"phi": 0.459}),
    (POWER, {"phi_b": 0.459, "phi_f": 0.3}),
    (ForwardBackward(gain=Tilt()), {"phi": 0.459, "kappa": 0.1}),
    (ForwardBackward(gain=Decay()), {"phi": 0.459, "kappa": 0.5}),
    (ForwardBackward(gain=Additive()), {"phi": 0.459, "c": 0.2, "q": 0.6}),
    (Parcae(count="core"), {}),
]


@pytest.fixture(scope="module")
def fitted(power_runs):
    return fit(power_runs, POWER, starts=24, replicates=20)


@pytest.mark.parametrize(("law", "gains"), TRUTHS, ids=lambda value: getattr(value, "title", ""))
def test_noise_free_runs_give_the_truth_back(law, gains):
    found = fit(read_runs(rows_of(law, noise=0.0, gains=gains)), law, **QUICK)
    for name, value in (TRUTH | gains).items():
        assert found.value(name) == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.slow
def test_nested_laws_never_fit_better_and_are_equal_where_no_run_truncates(power_runs, full_runs):
    narrow, wide = (fit(power_runs, law, **QUICK).objective for law in (IsoDepth(), POWER))
    table = fit(power_runs, ForwardBackward(gain=Table()), **QUICK).objective
    assert table < wide < narrow < fit(power_runs, Chinchilla(), **QUICK).objective
    ratio = fit(power_runs, ForwardBackward(gain=Power(coordinates="ratio")), **QUICK)
    split = fit(power_runs, POWER, **QUICK)
    assert ratio.objective == pytest.approx(split.objective, rel=1e-9)
    assert ratio.value("phi") - ratio.value("psi") == pytest.approx(split.value("phi_f"), rel=1e-6)
    iso = fit(full_runs, IsoDepth(), **QUICK)
    held = fit(full_runs, POWER, fixed={"phi_f": 0.0}, **QUICK)
    assert held.objective == pytest.approx(iso.objective, rel=1e-9)
    assert held.value("phi_b") == pytest.approx(iso.value("phi"), rel=1e-6)


def test_estimates_lie_near_the_truth_with_intervals_around_them(fitted):
    for name, value in (TRUTH | {"phi_b": 0.459, "phi_f": 0.3}).items():
        place = fitted.names.index(name.lower())
        assert abs(np.log(fitted.value(name) / value)) < 0.15
        for method in (BOOTSTRAP, SANDWICH):
            low, high = fitted.intervals[method][place]
            assert low < fitted.estimates[place] < high
    assert fitted.start_share >= 0.85 and fitted.converged == 20
    assert fitted.gap <= 1e-7 and fitted.improved <= 1e-6


@pytest.mark.slow
def test_a_fit_survives_json_and_repeats_byte_for_byte(power_rows, fitted):
    text = dump_json(fitted.to_dict())
    assert Fit.from_json(text) == fitted
    again = fit(read_runs(power_rows[::-1]), POWER, starts=24, replicates=20)
    assert dump_json(again.to_dict()) == text
    other = fit(read_runs(power_rows), POWER, starts=24, replicates=20, chunk=7)
    assert other.estimates == pytest.approx(fitted.estimates, rel=1e-7)
    assert "second" not in text and "phi_f" in str(fitted)
    with pytest.raises(ValueError, match="must have schema 1. Got 2"):
        Fit.from_json(text.replace('"schema": 1', '"schema": 2'))


def test_screening_descends_only_the_best_starts(power_runs, fitted):
    quick = fit(power_runs, POWER, starts=24, replicates=0, screen=4)
    assert quick.objective == pytest.approx(fitted.objective, rel=1e-9)
    assert quick.start_share >= 0.5


def test_refusals(power_runs, power_rows, full_runs):
    with pytest.raises(FitRefused, match="no run truncates. Fit IsoDepth"):
        fit(full_runs, POWER, **QUICK)
    few = subset(power_runs, np.arange(len(power_runs)) % 18 == 0)
    with pytest.raises(FitRefused, match="8 runs for 7 parameters: no fit"):
        fit(few, POWER, **QUICK)
    with pytest.raises(FitRefused, match="evaluation splits"):
        fit(read_runs([power_rows[0] | {"loss_split": "x"}, *power_rows[1:]]), POWER, **QUICK)
    with pytest.raises(KeyError, match="no parameter 'psi'"):
        fit(power_runs, POWER, fixed={"psi": 0.1}, **QUICK)
    with pytest.raises(ValueError, match="starts must be 1 or more. Got 0"):
        fit(power_runs, POWER, starts=0)


def test_few_runs_give_estimates_without_intervals(power_runs):
    some = subset(power_runs, np.arange(len(power_runs)) % 8 == 0)
    found = fit(some, POWER, starts=24, replicates=20)
    assert not found.intervals and not found.replicates
    assert "18 runs in" in str(found) and "point estimates only" in str(found)


def test_an_estimate_on_its_bound_is_called_an_artefact(power_runs):
    rising = [row | {"loss": 3.0 + 0.02 * row["num_steps"] + 1e-3 * (i % 5)} for i, row in enumerate(power_runs.rows)]
    found = fit(read_runs(rising), POWER, **QUICK)
    assert "is at its bound: a fit artefact, not a finding" in str(found)


def test_the_likelihood_is_that_of_a_density():
    delta, residuals = 1e-3, np.random.default_rng(0).normal(size=200) * 2e-3
    size = np.abs(residuals)
    huber = np.where(size <= delta, residuals**2 / 2, delta * (size - delta / 2))
    s, nll = huber_likelihood(float(huber.sum()), 200, delta)

    def density(x):
        own = x * x / 2 if abs(x) <= delta else delta * (abs(x) - delta / 2)
        return np.exp(-own / s**2)

    area = quad(density, -delta, delta)[0] + 2 * quad(density, delta, 1.0, limit=200, points=[0.01, 0.05])[0]
    assert nll == pytest.approx(200 * np.log(area) + huber.sum() / s**2, rel=1e-6)
    assert nll <= min(huber_likelihood(float(huber.sum()), 200, delta)[1], nll) + 1e-9


def test_importing_scaling_leaves_torch_out():
    code = "import sys, looplab.scaling, looplab.scaling.laws; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout == "False\n", found.stderr


@pytest.mark.nightly
@pytest.mark.parametrize(("law", "gains"), TRUTHS[1:5], ids=lambda value: getattr(value, "title", ""))
def test_intervals_cover_the_truth(law, gains):
    """576 runs, 0.005 nats: the published truth lies in the bootstrap interval as often as it should."""
    inside = []
    for seed in range(20):
        rows = rows_of(law, seed=seed, gains=gains, widths=8, budgets=(4.64e17, 1e18, 2.15e18, 4.64e18, 1e19, 2.15e19))
        found = fit(read_runs(rows), law, starts=100, screen=16, restarts=0, seed=seed)
        theta = law.values(**TRUTH, **gains)
        inside.append([low <= t <= high for t, (low, high) in zip(theta, found.intervals[BOOTSTRAP], strict=True)])
    covered = np.mean(inside, axis=0)
    assert covered.min() >= 0.70 and covered.mean() >= 0.88
