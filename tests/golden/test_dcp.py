"""Our measurements against those of the original protocol code, on recorded hidden states and document sums.

Where our definition is stricter, the test says so and holds the number that ours gives.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import tolerances
from looplab.audit.bootstrap import ScheduleSums, TemperatureSums, bootstrap_losses, refit_replicates
from looplab.audit.config import AuditConfig
from looplab.audit.decompose import decompositions, probe_gains
from looplab.audit.probes.affine import AffineProblem, fit_affine
from looplab.audit.probes.descent import Descent
from looplab.audit.probes.gradient import TokenIds
from looplab.audit.probes.scores import token_nll, token_scores
from looplab.audit.probes.temperature import exact_refit, fit_temperature
from looplab.intervals import Draws, document_draws, expected_calibration_error

HERE = Path(__file__).parent / "dcp"
EXPECTED = json.loads((HERE / "expected.json").read_text())
IO = load_file(HERE / "io.safetensors")
SCHEDULES = ("full", "prefix2")
CONFIG = AuditConfig(replicates=1000)
READOUTS = ("T", "Tx", "Tin", "aff")


def head(hidden):
    return hidden @ IO["head_weight"].T.to(hidden.dtype)


def recorded(schedule):
    return EXPECTED["configs"][schedule]["math"]


def calibration(schedule, dtype=torch.float32):
    return IO[f"Z_cal.{schedule}"].to(dtype), IO["Y_cal"].long(), IO["doc_cal"].long()


def evaluation(schedule):
    return IO[f"Z_eval.{schedule}"], IO["Y_eval"].long(), IO["doc_eval"].long()


def close(found, expected):
    torch.testing.assert_close(float(found), float(expected), **tolerances.RECORDED)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_temperature_is_the_exact_minimiser(schedule, dtype):
    # Stricter: the recorded float32 L-BFGS stops up to 1.2e-3 from the minimum of the same objective; ours is at it.
    hidden, targets, _ = calibration(schedule, dtype)
    close(fit_temperature([head(hidden)], targets).temperature, recorded(schedule)["T_float64"])


@pytest.fixture(scope="module", params=SCHEDULES)
def measured(request):
    hidden, targets, _ = calibration(request.param)
    fit = fit_temperature([head(hidden)], targets)
    hidden, targets, documents = evaluation(request.param)
    return request.param, token_scores(hidden, head, targets, documents, beta=fit.beta)


def test_losses_raw_and_calibrated_are_the_recorded_ones(measured):
    schedule, scores = measured
    close(scores.raw.nll.mean(), recorded(schedule)["nll"])
    close(scores.temperature.nll.mean(), recorded(schedule)["nll_T"])


def test_hidden_states_are_not_rounded_before_they_are_measured(measured):
    # Stricter: the original stores bfloat16 and so shifts the raw loss by 7e-5 nats; ours is lossless.
    schedule, scores = measured
    rounded = recorded(schedule)["nll_if_stored_bf16"]
    assert abs(scores.raw.nll.mean() - recorded(schedule)["nll"]) < 0.2 * abs(rounded - recorded(schedule)["nll"])


def test_every_token_has_the_recorded_scores(measured):
    schedule, scores = measured
    for name, found in (("conf", scores.raw.confidence), ("entropy", scores.raw.entropy), ("brier", scores.raw.brier)):
        torch.testing.assert_close(
            torch.from_numpy(found).float(), IO[f"{name}_raw.{schedule}"], **tolerances.FLOAT32_SCORES
        )
    assert (torch.from_numpy(scores.correct) == IO[f"correct_raw.{schedule}"].bool()).all()


@pytest.mark.parametrize(("schedule", "exact"), [("full", 0.036103), ("prefix2", 0.035501)])
def test_calibration_errors_are_the_recorded_ones_at_the_recorded_temperature(schedule, exact):
    hidden, targets, documents = evaluation(schedule)
    scores = token_scores(hidden, head, targets, documents, beta=1 / recorded(schedule)["T"])
    for readout, name in ((scores.raw, "ece"), (scores.temperature, "ece_T")):
        close(expected_calibration_error(readout.confidence, scores.correct), recorded(schedule)[name])
    # Stricter: at the exact minimiser the error is another one, because tokens cross bins.
    scores = token_scores(hidden, head, targets, documents, beta=1 / recorded(schedule)["T_float64"])
    ours = expected_calibration_error(scores.temperature.confidence, scores.correct)
    assert ours == pytest.approx(exact, abs=1e-5)


def test_average_scores_are_the_recorded_ones(measured):
    schedule, scores = measured
    close(scores.raw.brier.mean(), recorded(schedule)["brier"])
    close(scores.temperature.brier.mean(), recorded(schedule)["brier_T"])
    close(scores.raw.entropy.mean(), recorded(schedule)["entropy"])
    close(scores.raw.confidence.mean(), recorded(schedule)["conf"])
    close(scores.correct.mean(), recorded(schedule)["acc"])
    close(scores.logit_norm.mean(), recorded(schedule)["logit_norm"])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_recorded_affine_map_has_the_recorded_loss(schedule):
    hidden, targets, _ = evaluation(schedule)
    mapped = hidden * IO[f"affine_a.{schedule}"] + IO[f"affine_b.{schedule}"]
    close(token_nll(mapped, head, targets).mean(), recorded(schedule)["nll_affine"])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_affine_fit_at_the_recorded_penalty_is_at_least_as_good(schedule):
    # Stricter: the recorded fit stops after 20 iterations; ours goes on until the gradient is below 1e-5.
    hidden, targets, _ = calibration(schedule)
    problem = AffineProblem(hidden, head, TokenIds(targets), 1.0, 2**20)
    strength = recorded(schedule)["affine_lambda"]
    search = Descent(problem.loss_and_gradient, problem.identity())
    start = search.at(problem.identity())
    ours = search.solve(strength, start, problem.curvature(start.x))
    theirs = torch.cat([IO[f"affine_{name}.{schedule}"] for name in "ab"]).double()

    def objective(x):
        return problem.loss(x) + strength * float((x - problem.identity()).square().sum())

    assert ours.converged
    assert objective(theirs) - 1e-4 < objective(ours.point.x) <= objective(theirs) + 1e-7


@pytest.mark.parametrize(("schedule", "strength", "loss"), [("full", 0.1, 1.7182), ("prefix2", 0.001, 3.2346)])
def test_the_affine_choice_by_documents(schedule, strength, loss):
    # Stricter: shift in units of the hidden RMS, seven penalties, documents instead of tokens held out. The recorded
    # choices are 0.1 and 0.01, with losses 1.7180 and 3.2341.
    hidden, targets, documents = calibration(schedule)
    fit = fit_affine(hidden, head, targets, documents, [f"document {d}" for d in range(12)])
    assert fit.strength == strength
    hidden, targets, _ = evaluation(schedule)
    assert token_nll(fit.apply(hidden), head, targets).mean() == pytest.approx(loss, abs=1e-3)


def recorded_losses(domain):
    names = {"full": "full"} | {f"{f}({k})": f"{f}{k}" for f in ("prefix", "suffix", "repeat") for k in (1, 2, 4)}

    def sums(readout, schedule):
        return IO[f"doc_nll_sum.{domain}.{readout}.{schedule}"].numpy()

    tables = {
        name: ScheduleSums(raw=sums("raw", schedule), fixed={readout: sums(readout, schedule) for readout in READOUTS})
        for name, schedule in names.items()
    }
    draws = Draws.from_indices(IO["bootstrap_doc_index"].numpy(), 24)
    return bootstrap_losses(tables, draws, tokens=IO[f"doc_tokens.{domain}"].double().numpy())


def plain(estimate):
    """Point value and plain percentile interval."""
    return [estimate.value, estimate.plain_low, estimate.plain_high]


def same(found, expected):
    torch.testing.assert_close(
        torch.tensor(found, dtype=torch.float64),
        torch.tensor(expected, dtype=torch.float64),
        **tolerances.RECORDED_SHARES,
    )


TERMS = {"application": "apply", "distinct": "distinct", "composition": "compose"}


@pytest.mark.parametrize("domain", ["math", "web"])
def test_the_decomposition_over_the_recorded_draws_is_the_recorded_one(domain):
    expected = EXPECTED["decomposition"][domain]["point_plus_percentile"]
    found = decompositions(recorded_losses(domain), units=6, kmid=4, reasons={}, unmeasured={}, config=CONFIG)
    for decomposition, suffix in ((found[0], ""), (found[1], "_Tcal")):
        assert decomposition.probe == ("T" if suffix else "raw")
        gap = expected[f"naive{suffix}"]
        same(
            plain(decomposition.gap),
            [gap["nats"], *gap["ci"]],
        )
        for part in decomposition.parts:
            number = expected[f"{TERMS[part.name]}{suffix}"]
            same(plain(part.nats), [number["nats"], *number["ci"]])
            same(plain(part.share), [number["share"], *number["share_ci"]])


@pytest.mark.parametrize("domain", ["math", "web"])
@pytest.mark.parametrize("readout", READOUTS)
def test_probe_shares_over_the_recorded_draws_are_the_recorded_ones(domain, readout):
    number = EXPECTED["decomposition"][domain]["point_plus_percentile"][f"calib_{readout}"]
    gains = probe_gains(recorded_losses(domain), grid=(1,), units=6, reasons={}, config=CONFIG)
    (gain,) = (gain for gain in gains if gain.probe == readout)
    same(plain(gain.net), [number["nats"], *number["ci"]])
    same(plain(gain.share), [number["share"], *number["share_ci"]])


def test_printed_intervals_are_expanded():
    # Stricter: the published [-0.6688, -0.3854] is the plain percentile interval of 24 documents; ours is wider.
    found = decompositions(recorded_losses("math"), units=6, kmid=4, reasons={}, unmeasured={}, config=CONFIG)
    nats = found[0].part("application").nats
    assert (nats.low, nats.high) == pytest.approx((-0.6753, -0.3727), abs=5e-5)


def test_point_estimates_are_not_means_of_replicates():
    # Stricter: one of the two published scripts reports the mean over resamples, 2.6423 nats instead of 2.6339.
    found = recorded_losses("math")
    gap = {("raw", "prefix(1)"): 1.0, ("raw", "full"): -1.0}
    same(found.rows(gap).mean(), EXPECTED["decomposition"]["math"]["bootstrap_mean"]["total_gap"]["mean"])
    assert found.point(gap) == pytest.approx(2.6339, abs=1e-4)


def refitted_losses():
    tables = {}
    for schedule in SCHEDULES:
        hidden, targets, documents = calibration(schedule)
        logits = [head(hidden)]
        fit = fit_temperature(logits, targets, documents)
        draws = document_draws(12, 2000, seed=0, domain="math", split="calibration")
        refits = refit_replicates(fit, draws, exact_refit(logits, targets, documents))
        scores = token_scores(*_with_head(schedule), beta=fit.beta, extra_betas=refits.exact_betas)
        tables[schedule.replace("2", "(2)")] = ScheduleSums(
            raw=np.bincount(IO["doc_eval"].numpy(), weights=scores.raw.nll),
            fixed={"fixed": scores.sums.loss},
            temperature=TemperatureSums(at_fit=scores.sums, exact=scores.extra, replicates=refits),
        )
    draws = document_draws(24, 2000, seed=0, domain="math", split="evaluation")
    return bootstrap_losses(tables, draws, tokens=IO["doc_tokens.math"].double().numpy())


def _with_head(schedule):
    hidden, targets, documents = evaluation(schedule)
    return hidden, head, targets, documents


def test_calibration_documents_are_resampled_too():
    # Stricter: the published intervals keep T fixed, which gives [15.77, 22.90] % here; refits give [15.85, 22.95] %.
    gains = {g.probe: g for g in probe_gains(refitted_losses(), grid=(2,), units=6, reasons={}, config=CONFIG)}
    refitted, fixed = gains["temperature"].share, gains["fixed"].share
    assert refitted.value == pytest.approx(fixed.value, rel=1e-9)
    assert (fixed.low, fixed.high) == pytest.approx((0.1577, 0.2290), abs=1e-4)
    assert (refitted.low, refitted.high) == pytest.approx((0.1585, 0.2295), abs=1e-4)
