import math

import numpy as np
import pytest
import torch

import tolerances
from looplab.audit.probes import stream
from looplab.audit.probes.scores import cells_right, divergence, token_nll, token_scores
from looplab.training.live_bytes import LiveBytes
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


def test_many_temperatures_hold_a_piece_of_the_tokens_at_once_and_change_no_bit(monkeypatch):
    logits, targets, documents = data(tokens=2000, vocab=2)
    betas = np.linspace(0.5, 1.5, 20)

    def scored(piece):
        monkeypatch.setattr(stream, "PIECE_BYTES", piece)
        with LiveBytes([logits, targets, documents]) as live:
            return token_scores(logits, identity, targets, documents, beta=0.8, extra_betas=betas).extra, live.most

    (extra, most), (same, all_at_once) = scored(2**18), scored(2**30)
    assert (extra == same).all()
    assert all_at_once - most > 2 * len(betas) * len(logits) * 8


def cells(*, tokens=12, count=3, symbols=4):
    """Logits with the cells of a token side by side, targets cell by cell, and a head that stacks the cells."""
    logits, _, documents = data(tokens=tokens, vocab=count * symbols)
    targets = torch.arange(tokens * count).remainder(5).remainder(symbols).view(tokens, count)
    return logits, targets, documents, lambda hidden: hidden.unflatten(1, (count, symbols)).flatten(0, 1)


def joint(logits, targets, *, beta=1.0, count=3):
    """Statistics of a token whose symbol is the tuple of its cells, from the law over all tuples."""
    law = torch.zeros((), dtype=torch.float64)
    for cell in logits.unflatten(0, (count, -1)):
        law = law[..., None] + torch.log_softmax(beta * cell, dim=0)
    size = law.shape[0]
    index = int(sum(int(t) * size**i for i, t in enumerate(reversed(targets.tolist()))))
    return twin.token_statistics(law.flatten(), index), law.flatten()


def test_a_token_of_several_cells_has_the_law_of_all_tuples():
    logits, targets, documents, head = cells()
    scores = token_scores(logits, head, targets, documents, beta=0.37, logit_bytes=5 * 12 * 8)
    for i in range(len(logits)):
        for part, beta in ((scores.raw, 1.0), (scores.temperature, 0.37)):
            statistics, _ = joint(logits[i], targets[i], beta=beta)
            for name in ("nll", "confidence", "entropy", "brier"):
                torch.testing.assert_close(getattr(part, name)[i].item(), statistics[name], **tolerances.SCORES)
        assert scores.correct[i] == joint(logits[i], targets[i])[0]["correct"]
        assert scores.cells_right[i] == (logits[i].view(3, 4).argmax(dim=1) == targets[i]).sum()
    assert 0 < scores.cells_right.sum() < targets.numel()
    np.testing.assert_allclose(scores.logit_norm, logits.norm(dim=1), rtol=1e-12)
    centred = logits.view(-1, 3, 4) - logits.view(-1, 3, 4).mean(dim=2, keepdim=True)
    np.testing.assert_allclose(scores.centred_norm, centred.flatten(1).norm(dim=1), rtol=1e-12)
    np.testing.assert_allclose(scores.sums.loss[0], scores.temperature.nll[:10].sum(), rtol=1e-12)
    assert scores.sums.tokens.tolist() == [10, 2]
    np.testing.assert_allclose(token_nll(logits, head, targets), scores.raw.nll, rtol=1e-12)
    np.testing.assert_array_equal(cells_right(logits, head, targets, logit_bytes=500), scores.cells_right)


def test_divergence_of_tokens_of_several_cells_is_that_of_the_tuples():
    logits, targets, _, head = cells()
    full = logits.roll(1, dims=0) + logits
    found, same = divergence(logits, full, head, logit_bytes=1000)
    for i in range(len(logits)):
        (_, law), (_, other) = joint(logits[i], targets[i]), joint(full[i], targets[i])
        np.testing.assert_allclose(found[i], float((other.exp() * (other - law)).sum()), rtol=1e-9)
        assert same[i] == (law.argmax() == other.argmax())
