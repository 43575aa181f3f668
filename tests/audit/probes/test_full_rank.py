import hashlib
import math

import numpy as np
import pytest
import torch

import tolerances
from looplab.audit.probes.affine import fit_affine
from looplab.audit.probes.descent import Descent
from looplab.audit.probes.full_rank import FullRankProblem, _objective, fit_full_rank
from looplab.audit.probes.penalty import STRENGTHS
from looplab.audit.probes.scores import divergence, token_nll
from reference import full_rank_probe as twin

KEYS = [hashlib.sha256(str(d).encode()).hexdigest() for d in range(20)]


def planted(*, tokens=2000, dim=6, vocab=12, seed=0, noise=False, dtype=torch.float32):
    """Hidden states that a linear map brings back to what the head wants; or targets without signal."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(dim, vocab, generator=generator)
    wanted = torch.randn(tokens, dim, generator=generator)
    mixed = torch.eye(dim) + 0.35 * torch.randn(dim, dim, generator=generator)
    logits = torch.zeros(tokens, vocab) if noise else 2 * wanted @ weight
    targets = torch.multinomial(torch.softmax(logits, dim=1), 1, generator=generator)[:, 0]
    hidden = wanted if noise else wanted @ mixed.T + 0.3
    documents = torch.arange(tokens) * 20 // tokens
    return hidden.to(dtype), lambda h: 2 * h @ weight.to(h.dtype), targets, documents, wanted.to(dtype)


def test_a_planted_map_is_found_where_an_affine_probe_cannot():
    hidden, head, targets, documents, wanted = planted(tokens=4000)
    half, keys = 2000, KEYS[:10]
    fit = fit_full_rank(hidden[:half], head, targets[:half], documents[:half], keys)
    affine = fit_affine(hidden[:half], head, targets[:half], documents[:half], keys)
    evaluation, labels = hidden[half:], targets[half:]
    raw, least, found, diagonal = (
        token_nll(h, head, labels).mean()
        for h in (evaluation, wanted[half:], fit.apply(evaluation), affine.apply(evaluation))
    )
    assert fit.converged
    assert (raw - found) / (raw - least) >= 0.95
    assert found < diagonal - 0.1


@pytest.mark.parametrize("objective", ["nll", "kl"])
def test_loss_and_gradient_are_those_of_the_plain_loops(objective):
    hidden, head, targets, _, wanted = planted(tokens=11, dim=3, vocab=5, dtype=torch.float64)
    weight = head(torch.eye(3, dtype=torch.float64)).T
    problem = FullRankProblem(hidden, head, _objective(objective, targets, wanted), 1.7, 5 * 8 * 5 * 4)
    x = 0.2 * torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    table = x.view(3, 4).numpy()
    rows = torch.nn.functional.one_hot(targets, 5).double() if objective == "nll" else torch.softmax(head(wanted), 1)
    loss, gradient = twin.objective(
        hidden.tolist(), weight.tolist(), rows.tolist(), table[:, :-1].tolist(), table[:, -1].tolist(), 1.7, 0.0
    )
    ours, found = problem.loss_and_gradient(x)
    torch.testing.assert_close(found.view(3, 4), torch.from_numpy(gradient), **tolerances.GRADIENTS)
    assert ours == pytest.approx(loss, rel=1e-12)
    assert problem.loss(x) == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("objective", ["nll", "kl"])
@pytest.mark.parametrize("strength", [1e-1, 1e-4])
def test_the_solution_is_a_stationary_point_of_the_penalised_loss(objective, strength):
    hidden, head, targets, _, wanted = planted(tokens=600)
    problem = FullRankProblem(hidden, head, _objective(objective, targets, wanted), 1.0, 10**6)
    search = Descent(problem.loss_and_gradient, problem.identity())
    start = search.at(problem.identity())
    minimum = search.solve(strength, start, problem.curvature(start.x))
    assert minimum.converged
    total = problem.loss_and_gradient(minimum.point.x)[1] + 2 * strength * minimum.point.x
    assert total.abs().max() <= 1e-5


def test_pure_noise_keeps_the_identity():
    hidden, _, targets, documents, _ = planted(noise=True)
    fit = fit_full_rank(hidden, lambda h: 0.01 * h @ torch.ones(6, 12), targets, documents, KEYS)
    assert fit.strength == math.inf
    assert not fit.matrix.any()
    assert not fit.shift.any()
    assert torch.equal(fit.apply(hidden), hidden)


@pytest.mark.parametrize("objective", ["nll", "kl"])
@pytest.mark.parametrize("seed", range(2))
def test_the_choice_never_loses_to_the_identity_on_held_out_documents(objective, seed):
    hidden, head, targets, documents, wanted = planted(seed=seed, tokens=300)
    fit = fit_full_rank(hidden, head, targets, documents, KEYS, objective=objective, full_hidden=wanted)
    losses = dict(fit.heldout)
    assert tuple(losses) == STRENGTHS
    assert losses[fit.strength] <= losses[math.inf] + 1e-6
    assert losses[fit.strength] == min(losses.values())


def test_kl_brings_the_output_to_that_of_the_full_depth():
    hidden, head, targets, documents, wanted = planted()
    fit = fit_full_rank(hidden, head, targets, documents, KEYS, objective="kl", full_hidden=wanted)
    before, after = (divergence(h, wanted, head)[0].mean() for h in (hidden, fit.apply(hidden)))
    assert fit.objective == "kl"
    assert after < 0.02 * before
    # The labels play no part.
    other = fit_full_rank(hidden, head, targets * 0, documents, KEYS, objective="kl", full_hidden=wanted)
    np.testing.assert_array_equal(other.matrix, fit.matrix)


def test_the_full_plan_keeps_the_identity_under_kl():
    hidden, head, targets, documents, _ = planted(tokens=400)
    fit = fit_full_rank(hidden, head, targets, documents, KEYS, objective="kl", full_hidden=hidden)
    assert fit.strength == math.inf
    assert dict(fit.heldout)[math.inf] == pytest.approx(0.0, abs=1e-7)
    assert torch.equal(fit.apply(hidden), hidden)


@pytest.mark.parametrize(("objective", "copies"), [("nll", 2), ("kl", 5)])
def test_logits_are_bounded_forward_and_backward(objective, copies):
    hidden, head, targets, _, wanted = planted(tokens=150, dtype=torch.float64)
    sizes = []

    def counting(h):
        logits = head(h)
        sizes.append(logits.nbytes)
        return logits

    def problem(head, bound):
        return FullRankProblem(hidden, head, _objective(objective, targets, wanted), 1.0, bound)

    bound = 12 * 8 * 35
    parts, whole = problem(counting, bound), problem(head, 2**28)
    x = 0.1 * torch.randn(42, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    loss, gradient = parts.loss_and_gradient(x)
    assert parts.loss(x) == pytest.approx(loss, rel=1e-12)
    assert 0 < copies * max(sizes) <= bound
    torch.testing.assert_close(gradient, whole.loss_and_gradient(x)[1], **tolerances.CHUNKED)
    sizes.clear()
    parts.curvature(x)
    assert 0 < 3 * max(sizes) <= bound  # logits, probabilities, their running sums


def test_too_few_tokens_keep_the_identity_and_say_so():
    hidden, head, targets, documents, _ = planted(tokens=23)
    fit = fit_full_rank(hidden, head, targets, documents, KEYS)
    assert [f.kind for f in fit.findings] == ["audit.full_rank_underdetermined"]
    assert (fit.strength, fit.passes) == (math.inf, 0)
    assert torch.equal(fit.apply(hidden), hidden)
    enough = planted(tokens=24)
    assert fit_full_rank(*enough[:4], KEYS).heldout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "mse"}, "objective must be nll or kl. Got 'mse'"),
        ({"objective": "kl"}, "the same 100 tokens for objective kl. Got none"),
        ({"objective": "kl", "full_hidden": torch.zeros(7, 6)}, "objective kl. Got 7 rows"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_bad_arguments_are_refused(options, message):
    hidden, head, targets, documents, _ = planted(tokens=100)
    with pytest.raises(ValueError, match=message):
        fit_full_rank(hidden, head, targets, documents, KEYS, **options)


def test_keys_must_name_the_documents():
    hidden, head, targets, documents, _ = planted(tokens=100)
    with pytest.raises(ValueError, match="one key each. Got 19 keys for 20"):
        fit_full_rank(hidden, head, targets, documents, KEYS[:19])
