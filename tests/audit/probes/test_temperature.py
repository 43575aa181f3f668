import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tolerances
from looplab.audit.probes import stream
from looplab.audit.probes.stream import LogitChunks
from looplab.audit.probes.temperature import NUMBERS, _Search, _taylor_root, exact_refit, fit_temperature
from looplab.training.live_bytes import LiveBytes
from reference import temperature as twin


def planted(temperature, *, tokens=400, vocab=20, seed=0, dtype=torch.float64, scale=3.0):
    """Logits and soft labels that `temperature` calibrates exactly."""
    logits = torch.randn(tokens, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * scale
    return logits.to(dtype), torch.softmax(logits / temperature, dim=1).to(dtype)


def sampled(temperature, *, tokens=2000, vocab=20, seed=0, dtype=torch.float64, scale=3.0):
    logits, labels = planted(temperature, tokens=tokens, vocab=vocab, seed=seed, scale=scale)
    targets = torch.multinomial(labels, 1, generator=torch.Generator().manual_seed(seed + 1))[:, 0]
    return logits.to(dtype), targets


class Counting(list):
    """A list of chunks that counts how often it is read."""

    reads = 0

    def __iter__(self):
        self.reads += 1
        return super().__iter__()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.2])
def test_the_fit_is_the_minimum_that_golden_section_finds(temperature, dtype):
    logits, targets = sampled(temperature, dtype=dtype)
    fit = fit_temperature([logits[:700], logits[700:]], targets)
    beta, loss = twin.fit(logits, targets)
    assert fit.status == "converged"
    torch.testing.assert_close(fit.beta, beta, **tolerances.TEMPERATURE)
    if dtype == torch.float64:
        torch.testing.assert_close(fit.loss, loss, **tolerances.TEMPERATURE_LOSS)


@pytest.mark.parametrize("temperature", [0.5, 0.6, 1.0, 1.7, 2.5, 4.0])
def test_soft_labels_give_back_the_planted_temperature(temperature):
    logits, labels = planted(temperature)
    assert abs(fit_temperature([logits], labels).temperature / temperature - 1) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.5, 0.6, 1.0, 1.7, 2.5, 4.0])
def test_two_hundred_thousand_sampled_tokens_give_the_planted_temperature_within_one_percent(temperature):
    logits, targets = sampled(temperature, tokens=200_000, vocab=16, dtype=torch.float32)
    assert abs(fit_temperature(list(logits.split(50_000)), targets).temperature / temperature - 1) <= 0.01


@pytest.mark.parametrize("factor", [0.1, 3.0])
def test_scaling_the_logits_scales_the_temperature(factor):
    logits, targets = sampled(1.4)
    plain = fit_temperature([logits], targets).temperature
    assert abs(fit_temperature([factor * logits], targets).temperature / (factor * plain) - 1) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("temperature", [0.3, 0.45, 0.7, 1.0, 1.8, 3.0])
def test_ordinary_temperatures_take_at_most_ten_passes(temperature, dtype):
    logits, targets = sampled(temperature, dtype=dtype)
    chunks = Counting([logits])
    fit = fit_temperature(chunks, targets)
    assert fit.passes == chunks.reads <= 10


@pytest.mark.parametrize("beta", [1e-3, 900.0])
def test_extreme_minima_are_found(beta):
    logits, labels = planted(1 / beta, vocab=5, scale=3.0 if beta < 1 else 3e-3)
    fit = fit_temperature([logits], labels)
    assert fit.status == "converged"
    torch.testing.assert_close(fit.beta, beta, **tolerances.TEMPERATURE)


def test_two_classes_suffice():
    logits, targets = sampled(1.3, vocab=2)
    torch.testing.assert_close(
        fit_temperature([logits], targets).beta, twin.fit(logits, targets)[0], **tolerances.TEMPERATURE
    )


def test_huge_logits_do_not_overflow():
    logits, labels = planted(5000.0, scale=1e4)
    assert abs(fit_temperature([logits], labels).temperature / 5000.0 - 1) < 1e-6
    shifted = fit_temperature([logits.float() + 1e4], labels.float())
    assert abs(shifted.temperature / 5000.0 - 1) < 1e-3


@pytest.mark.parametrize("block", [1, 3, 7, 20])
def test_vocabulary_blocks_do_not_change_the_fit(block):
    logits, targets = sampled(1.7)
    whole, parts = fit_temperature([logits], targets), fit_temperature([logits], targets, vocab_block=block)
    assert (parts.status, parts.passes) == (whole.status, whole.passes)
    torch.testing.assert_close(parts.beta, whole.beta, rtol=1e-10, atol=0.0)


def test_flat_logits_keep_temperature_one():
    fit = fit_temperature([torch.full((5, 4), 3.0)], torch.tensor([0, 1, 2, 3, 0]))
    assert (fit.beta, fit.status, fit.passes) == (1.0, "flat", 1)
    assert fit.loss == pytest.approx(math.log(4))


def test_logits_worse_than_chance_end_at_infinite_temperature():
    fit = fit_temperature([torch.tensor([[5.0, 0.0, 0.0], [0.0, 5.0, 0.0]])], torch.tensor([1, 2]))
    assert (fit.beta, fit.temperature, fit.status, fit.passes) == (0.0, None, "uniform", 1)
    assert fit.loss == pytest.approx(math.log(3))


def test_separable_targets_end_at_the_largest_beta():
    fit = fit_temperature([torch.tensor([[2.0, 0.0], [0.0, 0.5]])], torch.tensor([0, 1]))
    assert (fit.beta, fit.temperature, fit.status) == (1000.0, 0.001, "separable")


def test_a_minimum_beyond_the_largest_beta_is_called_sharp():
    logits, labels = planted(1 / 5000, vocab=4, scale=1e-4)
    fit = fit_temperature([logits], labels)
    assert (fit.beta, fit.status) == (1000.0, "sharp")
    assert fit.boundary


def test_one_mistake_among_confident_tokens_is_not_separable():
    logits = torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 2.0]])
    fit = fit_temperature([logits], torch.tensor([0, 1, 0]))
    assert fit.status == "converged"
    # p(right) = 2/3 at every token
    assert fit.beta == pytest.approx(math.log(2) / 2, rel=1e-5)


def test_a_newton_step_that_helps_too_little_is_replaced_by_bisection():
    search = _Search(1.0)
    mean = np.ones(1)

    def advance(first, second):
        search.advance(np.array([[0.0], [first], [second], [0.0], [0.0]]), mean, 1e-10)
        return search.beta

    assert advance(1.0, 4.0) == 0.75  # inside (0, 1), first step
    assert advance(-1.0, 8.0) == pytest.approx(math.sqrt(0.75))  # 0.75 did not halve |beta f'|: between 0.75 and 1
    assert advance(0.1, 1.0) == pytest.approx(math.sqrt(0.75) - 0.1)  # it did now


def test_without_an_upper_end_beta_grows_at_most_fourfold():
    search = _Search(1.0)
    for expected in (4.0, 16.0, 64.0, 256.0, 1000.0):
        search.advance(np.array([[0.0], [-1.0], [0.0], [0.0], [0.0]]), np.ones(1), 1e-10)
        assert search.beta == expected


@given(st.integers(1, 30), st.integers(2, 9), st.floats(0.01, 30.0), st.integers(0, 10**6))
def test_the_fit_is_never_worse_than_temperature_one_and_always_ends(tokens, vocab, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, vocab, generator=generator, dtype=torch.float64) * scale
    targets = torch.randint(vocab, (tokens,), generator=generator)
    fit = fit_temperature([logits], targets)
    assert fit.passes <= 60
    assert fit.loss <= torch.nn.functional.cross_entropy(logits, targets).item() + 1e-12


def test_document_sums_are_the_derivatives_of_each_documents_loss():
    logits, targets = sampled(1.6, tokens=60)
    documents = torch.arange(60) // 20
    fit = fit_temperature([logits[:25], logits[25:]], targets, documents)
    beta = torch.tensor(fit.beta, dtype=torch.float64, requires_grad=True)
    for d in range(3):
        inside = documents == d
        value = torch.nn.functional.cross_entropy(beta * logits[inside], targets[inside], reduction="sum")
        for found in (fit.sums.loss, fit.sums.first, fit.sums.second, fit.sums.third):
            torch.testing.assert_close(found[d], value.item(), rtol=1e-8, atol=1e-9)
            (value,) = torch.autograd.grad(value, beta, create_graph=True)
    assert fit.sums.tokens.tolist() == [20.0, 20.0, 20.0]
    assert abs(fit.sums.first.sum()) < 1e-7


def test_exact_refits_weigh_documents():
    logits, targets = sampled(1.6, tokens=300)
    documents = torch.arange(300) // 30
    weights = np.random.default_rng(0).multinomial(10, [0.1] * 10, size=4).astype(float)
    betas, losses = exact_refit([logits], targets, documents)(weights, np.ones(4))
    for row, beta, loss in zip(weights, betas, (weights * losses.T).sum(axis=1) / 300, strict=True):
        expected, least = twin.fit(logits, targets, weights=row[documents.numpy()])
        torch.testing.assert_close(beta, expected, **tolerances.TEMPERATURE)
        torch.testing.assert_close(loss, least, **tolerances.TEMPERATURE_LOSS)


def test_many_refits_hold_a_piece_of_their_tokens_at_once_and_change_no_bit(monkeypatch):
    logits, targets = sampled(1.6, tokens=1000)
    documents, weights = torch.arange(1000) // 100, np.random.default_rng(0).multinomial(10, [0.1] * 10, size=8)

    def refitted(piece):
        monkeypatch.setattr(stream, "PIECE_BYTES", piece)
        with LiveBytes([logits, targets, documents]) as live:
            return *exact_refit([logits], targets, documents)(weights.astype(float), np.ones(8)), live.most

    (betas, losses, most), (same, equal, all_at_once) = refitted(2**19), refitted(2**30)
    assert (betas == same).all() and (losses == equal).all()
    assert most <= 1.2 * 2**19
    assert 0.8 < all_at_once / (9 * 1000 * NUMBERS * 8) <= 1.0


def test_refits_that_reach_a_boundary_end_there():
    logits = torch.tensor([[5.0, 0.0], [0.0, 5.0], [5.0, 0.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    targets = torch.tensor([1, 0, 0, 0, 0, 1])
    documents = torch.tensor([0, 0, 1, 2, 2, 2])
    weights = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    betas, losses = exact_refit([logits], targets, documents)(weights, np.full(3, 0.7))
    assert betas == pytest.approx([0.0, 1000.0, math.log(2)])
    assert losses[0, 0] == pytest.approx(2 * math.log(2))


def test_refits_share_their_passes():
    logits, targets = sampled(1.6, tokens=300)
    chunks = Counting([logits])
    exact_refit(chunks, targets, torch.arange(300) // 30)(np.ones((50, 10)), np.linspace(0.4, 0.9, 50))
    assert chunks.reads <= 8


def test_streamed_hidden_states_are_fitted_like_their_logits():
    hidden, weight = torch.randn(200, 6), torch.randn(6, 11)
    targets = torch.randint(11, (200,))
    streamed = fit_temperature(LogitChunks(hidden, lambda h: h @ weight, logit_bytes=11 * 4 * 17), targets)
    whole = fit_temperature([hidden @ weight], targets)
    torch.testing.assert_close(streamed.loss, whole.loss, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_a_start_from_an_eighth_of_the_tokens_leaves_two_passes_over_all(temperature):
    logits, targets = sampled(temperature, tokens=16_000, vocab=12, dtype=torch.float32)
    rows = 0

    def head(hidden):
        nonlocal rows
        rows += len(hidden)
        return hidden

    fit = fit_temperature(LogitChunks(logits, head), targets)
    assert fit.passes == 2
    assert rows <= 2.75 * len(targets)
    beta, loss = twin.fit(logits, targets)
    torch.testing.assert_close(fit.beta, beta, **tolerances.TEMPERATURE)
    at = torch.nn.functional.cross_entropy(fit.beta * logits.double(), targets)
    torch.testing.assert_close(at.item(), loss, **tolerances.TEMPERATURE_LOSS)


def test_steps_go_to_the_root_of_the_fourth_cumulants_polynomial():
    root = _taylor_root(-0.21, 1.0, 0.4, -0.3, limit=1.0)
    assert -0.21 + root + 0.2 * root**2 - 0.05 * root**3 == pytest.approx(0.0, abs=1e-14)
    assert _taylor_root(-0.21, 1.0, 0.4, -0.3, limit=0.1) == pytest.approx(0.21)
    assert _taylor_root(-1.0, 1.0, -5.0, 0.0, limit=2.0) == 1.0  # the polynomial turns before it reaches 0


@pytest.mark.parametrize(
    ("chunks", "targets", "message"),
    [
        (iter([torch.ones(2, 3)]), torch.tensor([0, 1]), "must be readable more than once"),
        ([torch.ones(2, 3)], torch.tensor([0, 3]), "token ids from 0 to 2. Got 0 to 3"),
        ([torch.ones(2, 3)], torch.tensor([0, -100]), "Drop unscored tokens"),
        ([torch.ones(2, 3)], torch.tensor([0]), "one entry per row of logits"),
        ([torch.ones(2, 3)], torch.ones(2, 4), "rows of target probabilities must be 3 numbers"),
        ([torch.tensor([[1.0, math.nan]])], torch.tensor([0]), "logits must be finite"),
    ],
)
def test_bad_input_is_refused(chunks, targets, message):
    with pytest.raises(ValueError, match=message):
        fit_temperature(chunks, targets)


def test_a_token_of_several_cells_is_fitted_as_so_many_tokens_and_its_sample_keeps_them_together():
    logits, targets = sampled(2.2, tokens=15_000, vocab=4)
    side_by_side = logits.view(5000, 12)
    chunks = LogitChunks(side_by_side, lambda hidden: hidden.unflatten(1, (3, 4)).flatten(0, 1), logit_bytes=10_000)
    fit = fit_temperature(chunks, targets)
    flat = fit_temperature([logits], targets)
    torch.testing.assert_close(fit.beta, flat.beta, **tolerances.TEMPERATURE)
    assert fit.sums.tokens.sum() == 15_000
    assert fit.passes <= 3 < flat.passes  # it began at the fit of every eighth token
