import dataclasses

import numpy as np
import pytest
import torch

import tolerances
from looplab.audit.bootstrap import (
    EXACT_ONLY,
    DocumentSums,
    ScheduleSums,
    TemperatureReplicates,
    TemperatureSums,
    bootstrap_losses,
    halley_steps,
    refit_replicates,
)
from looplab.audit.config import AuditConfig
from looplab.audit.decompose import probe_gains
from looplab.audit.probes.scores import token_scores
from looplab.audit.probes.temperature import exact_refit, fit_temperature
from looplab.intervals import document_draws
from reference import temperature as twin


def tokens_of(documents, *, temperature, seed, per_document=30, wild=0.0):
    """Logits, targets and documents whose temperatures differ by document, by a log-normal factor `wild`."""
    generator = torch.Generator().manual_seed(seed)
    count = documents * per_document
    logits = torch.randn(count, 12, generator=generator, dtype=torch.float64) * 3
    ids = torch.arange(count) // per_document
    factors = torch.exp(wild * torch.randn(documents, generator=generator, dtype=torch.float64))[ids, None]
    targets = torch.multinomial(torch.softmax(logits / (temperature * factors), dim=1), 1, generator=generator)[:, 0]
    return logits, targets, ids


def measured(*, temperature=1.8, seed=0, documents=100, replicates=1000, wild=0.0, name="text"):
    """One schedule through fit, refits and evaluation, with both sets of logits."""
    calibration = tokens_of(documents, temperature=temperature, seed=seed, wild=wild)
    evaluation = tokens_of(documents, temperature=temperature, seed=seed + 1, wild=wild)
    logits, targets, ids = calibration
    fit = fit_temperature([logits], targets, ids)
    draws = document_draws(documents, replicates, seed=0, domain=name, split="calibration")
    refits = refit_replicates(fit, draws, exact_refit([logits], targets, ids))
    scores = token_scores(
        evaluation[0], lambda h: h, *evaluation[1:], beta=fit.beta, extra_betas=refits.exact_betas.tolist()
    )
    raw = np.bincount(evaluation[2].numpy(), weights=scores.raw.nll)
    sums = TemperatureSums(at_fit=scores.sums, exact=scores.extra, replicates=refits)
    return ScheduleSums(raw=raw, temperature=sums), draws, calibration, evaluation


def evaluation_draws(documents=100, replicates=1000):
    return document_draws(documents, replicates, seed=0, domain="text", split="evaluation")


def document_tokens(table):
    return table.temperature.at_fit.tokens


@pytest.mark.slow
def test_refits_by_expansion_equal_exact_refits():
    table, calibration_draws, (logits, targets, ids), (new, new_targets, new_ids) = measured()
    draws = evaluation_draws()
    losses = bootstrap_losses({"full": table}, draws, tokens=document_tokens(table))
    assert len(table.temperature.replicates.betas) == 1000
    for row in range(0, 1000, 50):
        weights = calibration_draws.counts[row].astype(float)[ids.numpy()]
        beta, _ = twin.fit(logits, targets, weights=weights)
        nll = torch.nn.functional.cross_entropy(beta * new, new_targets, reduction="none").numpy()
        drawn = draws.counts[row].astype(float)[new_ids.numpy()]
        exact = (drawn * nll).sum() / drawn.sum()
        assert abs(losses.replicates["temperature", "full"][row] - exact) <= tolerances.REFIT_NATS


def test_the_five_largest_steps_are_always_refitted_exactly():
    table, draws, (logits, targets, ids), _ = measured(replicates=300)
    refits = table.temperature.replicates
    assert len(refits.exact) == 5
    fit = fit_temperature([logits], targets, ids)
    steps = np.abs(halley_steps(draws.sums(fit.sums.columns())))
    assert set(refits.exact) == set(np.argsort(-steps)[:5])
    for row in refits.exact:
        beta, _ = twin.fit(logits, targets, weights=draws.counts[row].astype(float)[ids.numpy()])
        torch.testing.assert_close(refits.betas[row], beta, **tolerances.TEMPERATURE)
    assert 0 < refits.difference < tolerances.REFIT_NATS


def test_steps_that_are_not_safe_are_refitted_exactly():
    # A few documents of very different temperatures move the fit by more than a fifth in many replicates.
    table, draws, (logits, targets, ids), _ = measured(documents=10, replicates=120, wild=1.0, seed=2)
    refits = table.temperature.replicates
    fit = fit_temperature([logits], targets, ids)
    steps = halley_steps(draws.sums(fit.sums.columns()))
    unsafe = np.flatnonzero(~(np.abs(steps) <= 0.2 * fit.beta))
    assert len(unsafe) > 0
    assert set(unsafe) <= set(refits.exact)
    for row in unsafe[:5]:
        beta, _ = twin.fit(logits, targets, weights=draws.counts[row].astype(float)[ids.numpy()])
        torch.testing.assert_close(refits.betas[row], beta, **tolerances.TEMPERATURE)


def wrong_curvature(fit):
    return dataclasses.replace(fit, sums=dataclasses.replace(fit.sums, second=fit.sums.second * 1.6))


def test_an_expansion_that_is_off_falls_back_to_two_hundred_exact_refits():
    logits, targets, ids = tokens_of(60, temperature=1.8, seed=0)
    fit = wrong_curvature(fit_temperature([logits], targets, ids))
    draws = document_draws(60, 1000, seed=0, domain="text", split="calibration")
    refits = refit_replicates(fit, draws, exact_refit([logits], targets, ids))
    assert refits.difference > tolerances.REFIT_NATS
    assert len(refits.betas) == EXACT_ONLY
    assert refits.exact.tolist() == list(range(EXACT_ONLY))
    for row in (0, 77, 199):
        beta, _ = twin.fit(logits, targets, weights=draws.counts[row].astype(float)[ids.numpy()])
        torch.testing.assert_close(refits.betas[row], beta, **tolerances.TEMPERATURE)


def test_mostly_unsafe_steps_fall_back_as_well():
    logits, targets, ids = tokens_of(60, temperature=1.8, seed=0)
    fit = fit_temperature([logits], targets, ids)
    zero = dataclasses.replace(fit.sums, second=np.zeros(60), third=np.zeros(60))
    draws = document_draws(60, 400, seed=0, domain="text", split="calibration")
    refits = refit_replicates(dataclasses.replace(fit, sums=zero), draws, exact_refit([logits], targets, ids))
    assert len(refits.betas) == EXACT_ONLY


def test_fewer_exact_replicates_are_shared_by_what_is_compared_with_them():
    table, _, _, evaluation = measured(replicates=300)
    short = dataclasses.replace(
        table.temperature.replicates, betas=table.temperature.replicates.betas[:200], exact=np.arange(200)
    )
    exact = token_scores(evaluation[0], lambda h: h, *evaluation[1:], beta=1.0, extra_betas=short.betas.tolist()).extra
    few = dataclasses.replace(table, temperature=dataclasses.replace(table.temperature, replicates=short, exact=exact))
    draws = evaluation_draws(replicates=300)
    losses = bootstrap_losses({"full": table, "prefix(1)": few}, draws, tokens=document_tokens(table))
    gap = {("temperature", "prefix(1)"): 1.0, ("temperature", "full"): -1.0}
    assert len(losses.rows(gap)) == 200
    assert np.abs(losses.rows(gap)).max() < tolerances.REFIT_NATS
    assert len(losses.rows({("raw", "full"): 1.0})) == 300
    assert [f.kind for f in losses.findings] == ["audit.exact_refits"]


def test_a_fit_at_a_boundary_stays_fixed_and_says_so():
    logits, _, ids = tokens_of(20, temperature=1.0, seed=0)
    worst = logits.argmin(dim=1)
    fit = fit_temperature([logits], worst, ids)
    draws = document_draws(20, 100, seed=0, domain="text", split="calibration")
    refits = refit_replicates(fit, draws, exact_refit([logits], worst, ids))
    assert (refits.betas == 0).all()
    assert len(refits.exact) == 0
    scores = token_scores(logits, lambda h: h, worst, ids, beta=0.0)
    table = ScheduleSums(
        raw=np.bincount(ids.numpy(), weights=scores.raw.nll),
        temperature=TemperatureSums(at_fit=scores.sums, exact=scores.extra, replicates=refits),
    )
    losses = bootstrap_losses({"full": table}, evaluation_draws(20, 100), tokens=document_tokens(table))
    np.testing.assert_allclose(losses.replicates["temperature", "full"], np.log(12))
    assert [f.kind for f in losses.findings] == ["audit.temperature_boundary"]


def test_an_expansion_that_is_off_on_evaluation_documents_is_reported():
    table, _, _, _ = measured(replicates=300)
    off = dataclasses.replace(table.temperature, exact=table.temperature.exact + 0.1 * 30)
    table = dataclasses.replace(table, temperature=off)
    losses = bootstrap_losses({"full": table}, evaluation_draws(replicates=300), tokens=document_tokens(table))
    assert [f.kind for f in losses.findings] == ["audit.refit_expansion"]
    assert losses.findings[0].value > tolerances.REFIT_NATS


def one_readout(logits, targets, ids, evaluation, draws):
    """Fit on some tokens, score on others: the table of one schedule."""
    fit = fit_temperature([logits], targets, ids)
    refits = refit_replicates(fit, draws, exact_refit([logits], targets, ids))
    scores = token_scores(
        evaluation[0], lambda h: h, *evaluation[1:], beta=fit.beta, extra_betas=refits.exact_betas.tolist()
    )
    return ScheduleSums(
        raw=np.bincount(evaluation[2].numpy(), weights=scores.raw.nll),
        temperature=TemperatureSums(at_fit=scores.sums, exact=scores.extra, replicates=refits),
    )


@pytest.mark.parametrize("factor", [0.5, 0.6, 1.7, 2.5, 4.0])
def test_a_truncated_readout_that_is_only_scaled_has_a_temperature_share_of_one(factor):
    calibration = tokens_of(100, temperature=1.0, seed=0)
    evaluation = tokens_of(100, temperature=1.0, seed=1)
    draws = document_draws(100, 1000, seed=0, domain="text", split="calibration")
    tables = {
        name: one_readout(calibration[0] * scale, *calibration[1:], (evaluation[0] * scale, *evaluation[1:]), draws)
        for name, scale in (("full", 1.0), ("prefix(1)", 1 / factor))
    }
    losses = bootstrap_losses(tables, evaluation_draws(), tokens=document_tokens(tables["full"]))
    (gain,) = probe_gains(losses, grid=(1,), units=8, reasons={}, config=AuditConfig(replicates=1000))
    assert abs(gain.share.value - 1) <= 0.01
    assert gain.share.low <= 1 <= gain.share.high
    assert gain.word == "present"


def fixed_table(seed, documents=8):
    return ScheduleSums(raw=np.random.default_rng(seed).uniform(1, 9, size=documents))


def test_a_contrast_of_a_schedule_with_itself_is_zero_in_every_replicate():
    tables = {"full": fixed_table(0), "prefix(1)": fixed_table(1), "twin": fixed_table(0)}
    losses = bootstrap_losses(tables, evaluation_draws(8, 400), tokens=np.arange(1.0, 9.0))
    assert (losses.rows({("raw", "full"): 1.0, ("raw", "twin"): -1.0}) == 0).all()
    assert losses.bitwise_equal("raw", "full", "twin")
    assert not losses.bitwise_equal("raw", "full", "prefix(1)")


def test_a_schedule_given_twice_costs_nothing_and_has_the_same_replicates():
    table = fixed_table(0)
    losses = bootstrap_losses({"full": table, "repeat(2)": table}, evaluation_draws(8, 50), tokens=np.ones(8))
    assert losses.replicates["raw", "repeat(2)"] is losses.replicates["raw", "full"]
    assert losses.points["raw", "repeat(2)"] == losses.points["raw", "full"]


def test_losses_are_weighted_by_tokens_or_by_documents():
    table = ScheduleSums(raw=np.array([2.0, 30.0]), fixed={"affine": np.array([1.0, 10.0])})
    tokens = np.array([1.0, 10.0])
    draws = evaluation_draws(2, 200)
    token = bootstrap_losses({"full": table}, draws, tokens=tokens)
    document = bootstrap_losses({"full": table}, draws, tokens=tokens, weighting="document")
    assert token.points["raw", "full"] == pytest.approx(32 / 11)
    assert document.points["raw", "full"] == pytest.approx(2.5)
    assert document.points["affine", "full"] == pytest.approx(1.0)
    counts = draws.counts.astype(float)
    expected = counts @ table.raw / (counts @ tokens)
    np.testing.assert_allclose(token.replicates["raw", "full"], expected, rtol=1e-13)
    np.testing.assert_allclose(document.replicates["raw", "full"], counts @ [2.0, 3.0] / 2, rtol=1e-13)


def test_document_weighting_reaches_the_temperature():
    table, _, _, _ = measured(replicates=100, documents=20)
    draws = evaluation_draws(20, 100)
    tokens = document_tokens(table)
    losses = bootstrap_losses({"full": table}, draws, tokens=tokens, weighting="document")
    by_hand = (table.temperature.at_fit.loss / tokens).mean()
    assert losses.points["temperature", "full"] == pytest.approx(by_hand, rel=1e-13)


@pytest.mark.parametrize("weighting", ["token", "document"])
def test_replicates_follow_the_expansion_but_where_they_were_refitted(weighting):
    random = np.random.default_rng(0)
    documents, replicates = 6, 5
    tokens = random.integers(3, 40, size=documents).astype(float)
    loss, first, second, third = random.uniform(1, 2, size=(4, documents)) * tokens
    refits = TemperatureReplicates(
        beta=1.0,
        status="converged",
        betas=1 + random.uniform(-0.1, 0.1, size=replicates),
        exact=np.array([0, 3]),
        difference=0.0,
    )
    exact = random.uniform(1, 2, size=(documents, 2)) * tokens[:, None]
    at_fit = DocumentSums(loss=loss, first=first, second=second, third=third, tokens=tokens)
    table = ScheduleSums(raw=loss, temperature=TemperatureSums(at_fit=at_fit, exact=exact, replicates=refits))
    draws = evaluation_draws(documents, replicates)
    found = bootstrap_losses({"full": table}, draws, tokens=tokens, weighting=weighting)
    size = tokens if weighting == "document" else np.ones(documents)
    for row, step in enumerate(refits.betas - 1):
        value = loss + step * first + step**2 / 2 * second + step**3 / 6 * third
        if row in (0, 3):
            value = exact[:, [0, 3].index(row)]
        weights = draws.counts[row] / size
        expected = (weights * value).sum() / (weights * tokens).sum()
        assert found.replicates["temperature", "full"][row] == pytest.approx(expected, rel=1e-12)


def test_seed_values_follow_the_same_combination():
    tables = {
        "full": dataclasses.replace(fixed_table(0), seeds={"raw": (1.0, 1.2)}),
        "prefix(1)": dataclasses.replace(fixed_table(1), seeds={"raw": (2.0, 2.5)}),
        "one": fixed_table(2),
    }
    losses = bootstrap_losses(tables, evaluation_draws(8, 50), tokens=np.ones(8))
    assert losses.seeds({("raw", "prefix(1)"): 1.0, ("raw", "full"): -1.0}) == pytest.approx([1.0, 1.3])
    assert losses.seeds({("raw", "one"): 1.0}) is None


def test_shards_join_in_order():
    part = DocumentSums(**{name: np.arange(2.0) for name in ("loss", "first", "second", "third", "tokens")})
    assert DocumentSums.join([part, part]).loss.tolist() == [0.0, 1.0, 0.0, 1.0]


def test_draws_of_other_documents_are_refused():
    with pytest.raises(ValueError, match="Got 5 in the draws, 8 in full"):
        bootstrap_losses({"full": fixed_table(0)}, evaluation_draws(5, 50), tokens=np.ones(8))
    logits, targets, ids = tokens_of(6, temperature=1.0, seed=0)
    with pytest.raises(ValueError, match="draws must be of the 6 documents"):
        refit_replicates(
            fit_temperature([logits], targets, ids), evaluation_draws(5, 50), exact_refit([logits], targets, ids)
        )


def statistics_tables(documents=200, schedules=30):
    """Tables of the size of the acceptance figure, with refits that need no logits."""
    random = np.random.default_rng(0)
    tokens = random.integers(50, 900, size=documents).astype(float)
    tables = {}
    for index in range(schedules):
        name = "full" if index == 0 else f"prefix({index})"
        loss = tokens * random.uniform(2, 3 + index, size=documents)
        sums = DocumentSums(
            loss=loss, first=0.1 * random.normal(size=documents) * tokens, second=tokens, third=tokens, tokens=tokens
        )
        betas = random.uniform(0.95, 1.05, size=10_000)
        refits = TemperatureReplicates(beta=1.0, status="converged", betas=betas, exact=np.arange(5), difference=0.0)
        exact = loss[:, None] + sums.first[:, None] * (betas[:5] - 1) + tokens[:, None] * (betas[:5] - 1) ** 2 / 2
        tables[name] = ScheduleSums(
            raw=loss * 1.1,
            fixed={"affine": loss * 0.9},
            temperature=TemperatureSums(at_fit=sums, exact=exact, replicates=refits),
        )
    return tables, tokens


def test_ten_thousand_replicates_of_thirty_schedules_hold_one_vector_per_loss():
    tables, tokens = statistics_tables()
    draws = evaluation_draws(200, 10_000)
    losses = bootstrap_losses(tables, draws, tokens=tokens)
    assert len(losses.replicates) == 90
    assert {rows.shape for rows in losses.replicates.values()} == {(10_000,)}
    held = draws.counts.nbytes + sum(rows.nbytes for rows in losses.replicates.values())
    assert held < 2**24, "draws and replicates together stay below 16 MiB"
