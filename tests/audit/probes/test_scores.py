import math

import numpy as np
import pytest
import torch

import tolerances
from looplab.audit.probes.scores import divergence, token_nll, token_scores
from reference import temperature as twin


def identity(hidden):
    return hidden


def data(*, tokens=40, vocab=9, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, vocab, dtype=torch.float64, generator=generator) * 4
    return logits.to(dtype), torch.randint(vocab, (tokens,), generator=generator), torch.arange(tokens) // 10


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, tolerances.SCORES), (torch.float32, tolerances.FLOAT32_SCORES)]
)
def test_scores_equal_their_definitions(dtype, tolerance):
    logits, targets, documents = data(dtype=dtype)
    beta = 0.37
    scores = token_scores(logits, identity, targets, documents, beta=beta, logit_bytes=9 * 8 * 7)
    for i, target in enumerate(targets.tolist()):
        raw = twin.token_statistics(logits[i].double(), target)
        tempered = twin.token_statistics(beta * logits[i].double(), target)
        for name in ("nll", "confidence", "entropy", "brier"):
            torch.testing.assert_close(getattr(scores.raw, name)[i].item(), raw[name], **tolerance)
            torch.testing.assert_close(getattr(scores.temperature, name)[i].item(), tempered[name], **tolerance)
        assert scores.correct[i] == raw["correct"]
        torch.testing.assert_close(scores.logit_norm[i].item(), raw["logit_norm"], **tolerance)
        torch.testing.assert_close(scores.centred_norm[i].item(), raw["centred_norm"], **tolerance)


def test_document_sums_add_the_token_losses():
    logits, targets, documents = data()
    scores = token_scores(logits, identity, targets, documents, beta=0.5, extra_betas=[1.0, 0.25])
    np.testing.assert_allclose(scores.sums.loss, np.add.reduceat(scores.temperature.nll, [0, 10, 20, 30]), rtol=1e-12)
    np.testing.assert_allclose(scores.extra[:, 0], np.add.reduceat(scores.raw.nll, [0, 10, 20, 30]), rtol=1e-12)
    other = token_scores(logits, identity, targets, documents, beta=0.25)
    np.testing.assert_allclose(scores.extra[:, 1], other.sums.loss, rtol=1e-12)


def test_infinite_temperature_is_uniform():
    logits, targets, documents = data()
    at_zero = token_scores(logits, identity, targets, documents, beta=0.0).temperature
    np.testing.assert_allclose(at_zero.confidence, 1 / 9)
    np.testing.assert_allclose(at_zero.entropy, math.log(9))
    np.testing.assert_allclose(at_zero.nll, math.log(9))
    np.testing.assert_allclose(at_zero.brier, 1 - 1 / 9)


def test_ties_count_for_the_lowest_index_only():
    logits = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]])
    scores = token_scores(logits, identity, torch.tensor([0, 1]), torch.tensor([0, 0]), beta=1.0)
    assert scores.correct.tolist() == [True, False]


def test_a_certain_token_has_no_entropy():
    logits = torch.tensor([[200.0, 0.0, 0.0]])
    scores = token_scores(logits, identity, torch.tensor([1]), torch.tensor([0]), beta=1.0)
    assert scores.raw.entropy[0] == 0.0
    assert scores.raw.nll[0] == 200.0
    assert scores.raw.brier[0] == 2.0


def test_adding_a_constant_changes_only_the_plain_norm():
    logits, targets, documents = data()
    first = token_scores(logits, identity, targets, documents, beta=0.8)
    second = token_scores(logits + 50, identity, targets, documents, beta=0.8)
    np.testing.assert_allclose(first.centred_norm, second.centred_norm, rtol=1e-10)
    np.testing.assert_allclose(first.temperature.nll, second.temperature.nll, rtol=1e-10)
    assert (np.abs(first.logit_norm - second.logit_norm) > 1).all()


def test_losses_alone_equal_the_scores():
    logits, targets, documents = data()
    scores = token_scores(logits, identity, targets, documents, beta=1.0)
    found = token_nll(logits, identity, targets, logit_bytes=500)
    np.testing.assert_allclose(found, scores.raw.nll, rtol=1e-13)


def test_divergence_is_the_sum_over_the_vocabulary():
    full, _, _ = data(seed=1)
    logits, _, _ = data(seed=2)
    found, agree = divergence(logits, full, identity, logit_bytes=9 * 8 * 6)
    p, q = torch.softmax(full, dim=1), torch.softmax(logits, dim=1)
    np.testing.assert_allclose(found, (p * (p.log() - q.log())).sum(dim=1).numpy(), rtol=1e-10, atol=1e-12)
    assert agree.tolist() == (full.argmax(1) == logits.argmax(1)).tolist()
    same, everywhere = divergence(full, full, identity)
    assert (same == 0).all()
    assert everywhere.all()


def test_one_head_pass_serves_all_scores():
    logits, targets, documents = data()
    rows = []

    def head(hidden):
        rows.append(len(hidden))
        return hidden

    token_scores(logits, head, targets, documents, beta=0.8, extra_betas=[0.5, 0.6])
    assert sum(rows) == len(logits)
