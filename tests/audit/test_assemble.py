"""Metrics and fits of a result against their definitions, on a model whose logits are known."""

import numpy as np
import pytest
import torch

import tolerances
from looplab.audit.config import AuditConfig
from looplab.audit.probes import fit_temperature
from looplab.audit.protocol import plan_audit
from looplab.intervals import expected_calibration_error
from tiny import LetterTokenizer, Planted, letters, transitions

CONFIG = AuditConfig(replicates=1000, grid=(1,), controls=())
SCALE = 0.6


def halfway(state, truth, block, iteration):
    return truth * torch.where(iteration == 1, SCALE, 0.3)


@pytest.fixture(scope="module")
def plan():
    return plan_audit(Planted(halfway, steps=2).eval(), letters(90), CONFIG, tokenizer=LetterTokenizer())


@pytest.fixture(scope="module")
def domain(plan):
    return plan.run().domains[0]


@pytest.fixture(scope="module")
def truth(plan):
    """Logits of the full plan and targets, from the chain itself."""
    split = plan.domains["text"].evaluation
    before = np.concatenate([d.tokens[d.first - 1 : -1] for d in split.documents]).astype(int)
    return transitions().float()[torch.from_numpy(before)] * SCALE, split.targets


def test_token_metrics_are_their_definitions(domain, truth):
    logits, targets = truth
    p = torch.softmax(logits.double(), dim=1).numpy()
    chosen, correct = p[np.arange(len(p)), targets], p.argmax(axis=1) == targets.numpy()
    metrics = {m.probe: m for m in domain.schedule("full").metrics}["raw"]
    assert metrics.accuracy == correct.mean()
    expected = {
        "confidence": p.max(axis=1).mean(),
        "ece": expected_calibration_error(p.max(axis=1), correct),
        "entropy": -(p * np.log(p)).sum(axis=1).mean(),
        "brier": (1 - 2 * chosen + (p**2).sum(axis=1)).mean(),
        "logit_norm": logits.double().norm(dim=1).mean(),
        "logit_norm_centred": (logits - logits.mean(dim=1, keepdim=True)).double().norm(dim=1).mean(),
        "kl_to_full": 0.0,
        "agreement_to_full": 1.0,
    }
    for name, value in expected.items():
        assert getattr(metrics, name) == pytest.approx(float(value), rel=1e-5, abs=1e-9), name


def test_reliability_bins_hold_every_token_once_and_make_up_the_ece(domain, truth):
    for metrics in domain.schedule("prefix(1)").metrics:
        total = sum(b.count for b in metrics.bins)
        assert total == len(truth[1])
        assert len(metrics.bins) == 15
        ece = sum(b.count / total * abs(b.accuracy - b.confidence) for b in metrics.bins)
        assert ece == pytest.approx(metrics.ece, **_approx(tolerances.LOSS32))


def _approx(tolerance):
    return {"rel": tolerance["rtol"], "abs": 1e-9}


def test_the_in_sample_temperature_is_that_of_the_evaluation_tokens(domain, truth):
    exact = fit_temperature([truth[0]], truth[1]).temperature
    assert domain.schedule("full").temperature.in_sample == pytest.approx(exact, rel=2e-3)


def test_the_temperature_interval_holds_its_fit_and_the_truth(domain):
    fit = domain.schedule("full").temperature
    assert fit.status == "converged"
    assert fit.low < fit.temperature < fit.high
    assert fit.low < SCALE < fit.high
    assert domain.schedule("prefix(1)").temperature.temperature == pytest.approx(fit.temperature / 2, rel=1e-4)


def test_nats_per_byte_follow_from_the_tokens(domain):
    documents = domain.documents
    for loss in domain.schedule("full").losses:
        per_byte = loss.loss.value * documents.evaluation_tokens / documents.evaluation_bytes
        assert loss.per_byte == pytest.approx(per_byte, rel=1e-12)


def test_document_counts_are_those_of_the_split(plan, domain):
    split, counts = plan.domains["text"], domain.documents
    assert (counts.read, counts.evaluation) == (90, len(split.evaluation.documents))
    assert counts.evaluation_tokens == split.evaluation.tokens
    assert counts.longest == max(len(d.tokens) for d in (*split.evaluation.documents, *split.calibration.documents))
    assert counts.affine_tokens == split.calibration.tokens
    assert 0 < counts.padding < 1
    assert counts.cut == 0


def test_the_affine_fit_is_reported(domain):
    fit = domain.schedule("prefix(1)").affine
    assert fit.convex
    assert fit.penalty is None or fit.penalty <= 1.0
