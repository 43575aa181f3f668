import hashlib
import math

import numpy as np
import pytest
import torch

import tolerances
from looplab.audit.probes.affine import AffineProblem, fit_affine
from looplab.audit.probes.descent import Descent
from looplab.audit.probes.gradient import TokenIds
from looplab.audit.probes.penalty import STRENGTHS
from looplab.audit.probes.scores import token_nll
from looplab.audit.probes.temperature import fit_temperature

KEYS = [hashlib.sha256(str(d).encode()).hexdigest() for d in range(40)]


def planted(*, tokens=2000, dim=8, vocab=12, seed=0, identity=False, noise=False, dtype=torch.float32):
    """Hidden states that a smooth gain and a shift bring back to what the head wants; or targets without signal."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(dim, vocab, generator=generator)
    wanted = torch.randn(tokens, dim, generator=generator)
    gain = 1.25 + 0.75 * torch.sin(torch.arange(dim) * 1.3)
    shift = 0.4 * torch.cos(torch.arange(dim) * 0.7)
    logits = torch.zeros(tokens, vocab) if noise else 2 * wanted @ weight
    targets = torch.multinomial(torch.softmax(logits, dim=1), 1, generator=generator)[:, 0]
    hidden = wanted if identity or noise else (wanted - shift) / gain
    documents = torch.arange(tokens) * 40 // tokens
    return hidden.to(dtype), lambda h: 2 * h @ weight.to(h.dtype), targets, documents, gain, shift


def problem_of(hidden, head, targets, *, scale=1.0, logit_bytes=10**6):
    return AffineProblem(hidden, head, TokenIds(targets), scale, logit_bytes)


def solved(problem, strength):
    search = Descent(problem.loss_and_gradient, problem.identity())
    start = search.at(problem.identity())
    return search.solve(strength, start, problem.curvature(start.x))


def penalised_gradient(problem, x, strength):
    return problem.loss_and_gradient(x)[1] + 2 * strength * (x - problem.identity())


def test_a_planted_map_is_found():
    hidden, head, targets, documents, gain, shift = planted()
    fit = fit_affine(hidden, head, targets, documents, KEYS)
    assert fit.converged
    np.testing.assert_allclose(fit.gain, gain, atol=0.15)
    np.testing.assert_allclose(fit.scale * fit.shift, shift, atol=0.15)
    wanted = head(gain * hidden + shift)
    best = torch.nn.functional.cross_entropy(wanted, targets).item()
    assert token_nll(fit.apply(hidden), head, targets).mean() <= best + 0.003


def test_scale_is_the_root_mean_square_unless_given():
    hidden, head, targets, documents, _, _ = planted(tokens=300)
    rms = hidden.double().square().mean().sqrt().item()
    assert fit_affine(hidden, head, targets, documents, KEYS).scale == pytest.approx(rms)
    assert fit_affine(hidden, head, targets, documents, KEYS, scale=1.0).scale == 1.0


def test_pure_noise_keeps_the_identity():
    hidden, _, targets, documents, _, _ = planted(noise=True)
    fit = fit_affine(hidden, lambda h: 0.01 * h @ torch.ones(8, 12), targets, documents, KEYS)
    assert fit.strength == math.inf
    assert (fit.gain == 1).all()
    assert (fit.shift == 0).all()
    assert torch.equal(fit.apply(hidden), hidden)


@pytest.mark.parametrize("seed", range(3))
def test_the_choice_never_loses_to_the_identity_on_held_out_documents(seed):
    hidden, head, targets, documents, _, _ = planted(seed=seed, identity=True, tokens=400)
    fit = fit_affine(hidden, head, targets, documents, KEYS)
    losses = dict(fit.heldout)
    assert tuple(losses) == STRENGTHS
    assert losses[fit.strength] <= losses[math.inf] + 1e-6
    assert losses[fit.strength] == min(losses.values())


def test_the_gradient_is_that_of_the_whole_loss():
    hidden, head, targets, _, _, _ = planted(tokens=60, dtype=torch.float64)
    problem = problem_of(hidden, head, targets, scale=1.7, logit_bytes=2 * 12 * 8 * 7)
    x = problem.identity() + 0.1 * torch.randn(16).double()
    loss, gradient = problem.loss_and_gradient(x)
    x.requires_grad_()
    gain, shift = x.view(2, 8)
    whole = torch.nn.functional.cross_entropy(head(gain * hidden + 1.7 * shift), targets)
    (expected,) = torch.autograd.grad(whole, x)
    torch.testing.assert_close(gradient, expected, **tolerances.GRADIENTS)
    assert loss == pytest.approx(whole.item(), rel=1e-12)
    assert problem.loss(x.detach()) == pytest.approx(whole.item(), rel=1e-12)


@pytest.mark.parametrize("strength", [1.0, 1e-2, 1e-4])
def test_the_solution_is_a_stationary_point_of_the_penalised_loss(strength):
    hidden, head, targets, _, _, _ = planted()
    problem = problem_of(hidden, head, targets)
    minimum = solved(problem, strength)
    assert minimum.converged
    assert penalised_gradient(problem, minimum.point.x, strength).abs().max() <= 1e-5


def test_features_beyond_the_widest_are_fitted_without_a_matrix_of_their_square(monkeypatch):
    monkeypatch.setattr("looplab.audit.probes.affine._WIDEST", 4)
    monkeypatch.delattr("looplab.audit.probes.affine.Dense")
    hidden, head, targets, _, _, _ = planted(dtype=torch.float64)
    problem = problem_of(hidden, head, targets)
    minimum = solved(problem, 1e-2)
    assert minimum.converged
    assert penalised_gradient(problem, minimum.point.x, 1e-2).abs().max() <= 1e-5


def test_the_curvature_is_the_hessian_of_the_loss(monkeypatch):
    monkeypatch.setattr("looplab.audit.probes.affine._SAMPLE", 40_000)
    hidden, head, targets, _, _, _ = planted(tokens=40_000, dtype=torch.float64)
    found = problem_of(hidden, head, targets).curvature(problem_of(hidden, head, targets).identity()).matrix

    def loss(x):
        return torch.nn.functional.cross_entropy(head(x[:8] * hidden + x[8:]), targets)

    expected = torch.autograd.functional.hessian(loss, problem_of(hidden, head, targets).identity())
    assert (found - expected).abs().max() <= 0.1 * expected.abs().max()


def test_the_smallest_penalty_is_reported_as_an_edge():
    hidden, head, targets, documents, _, _ = planted(tokens=6000)
    fit = fit_affine(hidden, head, targets, documents, KEYS)
    kinds = [finding.kind for finding in fit.findings]
    assert (fit.strength == STRENGTHS[-1]) == ("audit.lambda_at_edge" in kinds)
    assert "audit.affine_underdetermined" not in kinds
    forced = fit_affine(hidden[:, :8], lambda h: 1e-3 * head(h), targets, documents, KEYS)
    assert forced.strength == STRENGTHS[-1]
    assert [f.kind for f in forced.findings] == ["audit.lambda_at_edge"]


def test_too_few_tokens_are_reported():
    hidden, head, targets, _, _, _ = planted(tokens=30)
    fit = fit_affine(hidden, head, targets, torch.arange(30) // 3, KEYS[:10])
    assert "audit.affine_underdetermined" in [finding.kind for finding in fit.findings]


def test_chunks_do_not_change_the_fit():
    hidden, head, targets, documents, _, _ = planted(tokens=300, dtype=torch.float64)
    whole = fit_affine(hidden, head, targets, documents, KEYS)
    parts = fit_affine(hidden, head, targets, documents, KEYS, logit_bytes=2 * 12 * 8 * 11)
    assert parts.strength == whole.strength
    np.testing.assert_allclose(parts.gain, whole.gain, rtol=1e-4)


def test_keys_must_name_the_documents():
    hidden, head, targets, documents, _, _ = planted(tokens=300)
    with pytest.raises(ValueError, match="one key each. Got 39 keys for 40"):
        fit_affine(hidden, head, targets, documents, KEYS[:39])


def test_a_planted_readout_is_found_by_the_affine_probe_and_not_by_temperature():
    hidden, head, targets, documents, gain, shift = planted(tokens=6000)
    half = len(hidden) // 2
    keys = KEYS[:20]
    affine = fit_affine(hidden[:half], head, targets[:half], documents[:half], keys)
    temperature = fit_temperature([head(hidden[:half])], targets[:half])
    evaluation, labels = hidden[half:], targets[half:]
    full = token_nll(gain * evaluation + shift, head, labels).mean()
    raw = token_nll(evaluation, head, labels).mean()
    affine_share = (raw - token_nll(affine.apply(evaluation), head, labels).mean()) / (raw - full)
    tempered = token_nll(evaluation, lambda h: temperature.beta * head(h), labels).mean()
    assert affine_share >= 0.95
    assert (raw - tempered) / (raw - full) < affine_share


def by_cells(hidden, weight):
    """A head of three cells of four symbols."""
    return (hidden @ weight.to(hidden.dtype)).unflatten(1, (3, 4)).flatten(0, 1)


def test_the_loss_of_a_token_is_the_sum_of_its_cells_and_so_is_its_slope():
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(40, 8, generator=generator, dtype=torch.float64)
    weight = torch.randn(8, 12, generator=generator, dtype=torch.float64)
    targets = torch.randint(4, (40, 3), generator=generator)
    head = lambda h: by_cells(h, weight)  # noqa: E731
    together = problem_of(hidden, head, targets, logit_bytes=1000)
    x = together.identity() + 0.1
    alone = [
        problem_of(hidden, lambda h, c=c: (h @ weight)[:, 4 * c : 4 * c + 4], targets[:, c]).loss_and_gradient(x)
        for c in range(3)
    ]
    loss, gradient = together.loss_and_gradient(x)
    assert loss == pytest.approx(sum(each for each, _ in alone), rel=1e-12)
    torch.testing.assert_close(gradient, sum(slope for _, slope in alone))
    assert together.loss(x) == pytest.approx(loss, rel=1e-12)


def test_a_planted_map_of_tokens_with_cells_is_found():
    hidden, _, _, documents, gain, shift = planted()
    weight = 2 * torch.randn(8, 12, generator=torch.Generator().manual_seed(2))
    wanted = hidden * gain + shift
    law = torch.softmax(by_cells(wanted, weight), dim=1)
    targets = torch.multinomial(law, 1, generator=torch.Generator().manual_seed(3)).view(-1, 3)
    fit = fit_affine(hidden, lambda h: by_cells(h, weight), targets, documents, KEYS)
    assert fit.converged
    assert fit.tokens == len(hidden)
    found, best = (token_nll(h, lambda h: by_cells(h, weight), targets).mean() for h in (fit.apply(hidden), wanted))
    assert found == pytest.approx(best, abs=0.02)
    assert token_nll(hidden, lambda h: by_cells(h, weight), targets).mean() > best + 0.3
