"""Every recorded readout number of every schedule and domain, from the recorded model run again."""

import numpy as np
import pytest
import torch

import tolerances
from golden.dcp_llama import FITS, RECORDED, SCHEDULES, TENSORS, document_sums, head, scored
from looplab.audit.probes.affine import AffineProblem
from looplab.audit.probes.descent import Descent
from looplab.audit.probes.gradient import TokenIds
from looplab.audit.probes.scores import token_nll, token_scores
from looplab.audit.probes.temperature import fit_temperature
from looplab.intervals import expected_calibration_error

OTHER = {"math": "web", "web": "math"}
CASES = [(domain, schedule) for domain in OTHER for schedule in SCHEDULES]
each = pytest.mark.parametrize(("domain", "schedule"), CASES)


def close(found, expected, tolerance=tolerances.RECORDED):
    torch.testing.assert_close(float(found), float(expected), **tolerance)


def same_sums(found, domain, readout, schedule, tolerance=tolerances.RECORDED):
    expected = RECORDED[f"doc_nll_sum.{domain}.{readout}.{schedule}"].numpy()
    np.testing.assert_allclose(found, expected, **tolerance)


def affine_at(hidden, targets, strength):
    """Our minimum at one penalty, with s = 1."""
    problem = AffineProblem(hidden, head, TokenIds(targets), 1.0, 2**22)
    search = Descent(problem.loss_and_gradient, problem.identity())
    start = search.at(problem.identity())
    minimum = search.solve(strength, start, problem.curvature(start.x))
    assert minimum.converged
    return minimum.point.x.float().view(2, -1)


@each
def test_losses_and_scores_of_every_schedule_are_the_recorded_ones(domain, schedule):
    _, hidden, targets, documents = scored(domain, "eval", schedule)
    expected = FITS["readouts"][schedule][domain]
    scores = token_scores(hidden, head, targets, documents, beta=1 / expected["T"])
    assert len(targets) == expected["n_tokens"]
    assert scores.sums.tokens.tolist() == RECORDED[f"doc_tokens.{domain}"].tolist()
    same_sums(document_sums(scores.raw.nll, documents), domain, "raw", schedule)
    same_sums(scores.sums.loss, domain, "T", schedule)
    numbers = {
        "nll": scores.raw.nll, "nll_T": scores.temperature.nll, "acc": scores.correct, "brier": scores.raw.brier,
        "brier_T": scores.temperature.brier, "entropy": scores.raw.entropy, "conf": scores.raw.confidence,
        "logit_norm": scores.logit_norm,
    }  # fmt: skip
    for name, values in numbers.items():
        close(values.mean(), expected[name])
    for name, readout in (("ece", scores.raw), ("ece_T", scores.temperature)):
        close(expected_calibration_error(readout.confidence, scores.correct), expected[name])
    rounded = token_nll(hidden.bfloat16().float(), head, targets).mean()
    close(rounded, expected["nll_if_stored_bf16"])


@each
def test_temperatures_of_every_schedule_are_the_minimisers(domain, schedule):
    expected = FITS["readouts"][schedule][domain]
    _, hidden, targets, _ = scored(domain, "cal", schedule)
    close(fit_temperature([head(hidden)], targets).temperature, expected["T_float64"])
    _, hidden, targets, documents = scored(domain, "eval", schedule)
    inside = fit_temperature([head(hidden)], targets)
    # Stricter: the recorded float32 search stops up to 3e-3 from the minimum, in loss up to 1e-5.
    close(inside.temperature, expected["T_insample"], {"rtol": 3e-3, "atol": 0.0})
    assert -1e-5 <= inside.loss - expected["nll_T_insample"] <= 1e-6
    crossed = FITS["readouts"][schedule][OTHER[domain]]["T"]
    for readout, name, temperature in (
        ("Tx", "nll_T_cross", crossed),
        ("Tin", "nll_T_insample", expected["T_insample"]),
    ):
        losses = token_nll(hidden, lambda h, t=temperature: head(h) / t, targets)
        close(losses.mean(), expected[name])
        same_sums(document_sums(losses, documents), domain, readout, schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_recorded_affine_maps_have_the_recorded_losses(schedule):
    _, hidden, targets, documents = scored("math", "eval", schedule)
    mapped = hidden * TENSORS[f"affine_a.{schedule}"] + TENSORS[f"affine_b.{schedule}"]
    scores = token_scores(mapped, head, targets, documents, beta=1.0)
    expected = FITS["readouts"][schedule]["math"]
    same_sums(document_sums(scores.raw.nll, documents), "math", "aff", schedule)
    close(scores.raw.nll.mean(), expected["nll_affine"])
    close(expected_calibration_error(scores.raw.confidence, scores.correct), expected["ece_affine"])


@each
def test_affine_fits_at_the_recorded_penalty_lose_what_is_recorded(domain, schedule):
    # The recorded searches stop after 20 iterations, within 2e-4 nats of the minimum; ours are at it.
    expected = FITS["readouts"][schedule][domain]
    _, hidden, targets, _ = scored(domain, "cal", schedule)
    gain, shift = affine_at(hidden, targets, expected["affine_lambda"])
    _, hidden, targets, documents = scored(domain, "eval", schedule)
    scores = token_scores(gain * hidden + shift, head, targets, documents, beta=1.0)
    assert scores.raw.nll.mean() == pytest.approx(expected["nll_affine"], abs=2e-4)
    sums = RECORDED[f"doc_nll_sum.{domain}.aff.{schedule}"].numpy()
    assert np.abs(document_sums(scores.raw.nll, documents) - sums).max() <= 0.2
    assert abs(expected_calibration_error(scores.raw.confidence, scores.correct) - expected["ece_affine"]) <= 5e-3


@each
def test_held_out_losses_of_the_recorded_penalties(domain, schedule):
    expected = FITS["readouts"][schedule][domain]
    _, hidden, targets, _ = scored(domain, "cal", schedule)
    fitted = int(0.8 * len(targets))
    losses = {}
    for strength, recorded in expected["affine_lambda_heldout_nll"].items():
        gain, shift = affine_at(hidden[:fitted], targets[:fitted], float(strength))
        losses[strength] = token_nll(gain * hidden[fitted:] + shift, head, targets[fitted:]).mean()
        assert losses[strength] == pytest.approx(recorded, abs=1e-3)
    assert float(min(losses, key=losses.get)) == expected["affine_lambda"]


@pytest.mark.parametrize("domain", sorted(OTHER))
def test_terciles_of_full_depth_loss_are_the_recorded_ones(domain):
    tokens = RECORDED[f"doc_tokens.{domain}"].numpy()
    sums = {
        (readout, schedule): RECORDED[f"doc_nll_sum.{domain}.{readout}.{schedule}"].numpy()
        for readout in ("raw", "T")
        for schedule in ("prefix1", "full")
    }
    order = np.argsort(sums["raw", "full"] / tokens, kind="stable")
    for part, expected in zip(np.array_split(order, 3), FITS["terciles"][domain], strict=True):
        loss = {key: values[part].sum() / tokens[part].sum() for key, values in sums.items()}
        gap = loss["raw", "prefix1"] - loss["raw", "full"]
        calibrated = loss["T", "prefix1"] - loss["T", "full"]
        assert sorted(part.tolist()) == expected["docs"]
        close(loss["raw", "full"], expected["full_nll"])
        close(gap, expected["gap"])
        close((gap - calibrated) / gap, expected["calib_share"])
