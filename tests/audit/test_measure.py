"""The token table of several noise seeds, and the tries a subject is walked by."""

import numpy as np
import pytest
import torch

import tolerances
from looplab.audit.config import AuditConfig
from looplab.audit.documents import Split, prepare
from looplab.audit.measure import (
    FULL,
    Subject,
    Table,
    Work,
    calibrate,
    counting_head,
    evaluate,
    schedule_sums,
    walk_batch,
)
from looplab.audit.runner import Runner
from looplab.audit.schedules import default_schedules, full_plan, schedule_map
from looplab.models.base import PRESETS, build
from looplab.recurrence.ledger import Ledger
from tiny import LetterTokenizer, Mixing, letters

CONFIG = AuditConfig(replicates=1000, probes=("temperature",), grid=(2,), controls=())


@pytest.fixture(scope="module")
def domain():
    return prepare("text", letters(70), LetterTokenizer())


def subject(model, seeds=1):
    full = full_plan(model.spec)
    rows = schedule_map(full, default_schedules(full, grid=(2,), controls=()))
    return Subject(Runner(model.eval()), full, rows, seeds)


def work(**more):
    return Work(
        CONFIG, **{"batch_tokens": 500, "spool_bytes": 10**9, "ledgers": {}, "advanced": lambda *_: None, **more}
    )


def test_rows_of_several_seeds_stand_together_in_their_document(domain):
    split = domain.calibration
    table = Table(split, 3)
    expected = [
        (d, j, p) for d, doc in enumerate(split.documents) for j in range(3) for p in range(doc.first, len(doc.tokens))
    ]
    rows = torch.full((3 * split.tokens, 3), -1)
    places = torch.arange(split.tokens)
    for j in range(3):
        entries = torch.stack([split.owners, torch.full_like(places, j), split.positions], dim=1)
        rows[table.place(places, j)] = entries
    assert [tuple(row) for row in rows.tolist()] == expected
    assert table.owners.tolist() == [d for d, _, _ in expected]
    assert table.targets.tolist() == [int(split.documents[d].tokens[p]) for d, _, p in expected]


def test_the_head_is_counted_by_the_token():
    ledger = Ledger()
    head = counting_head(Runner(Mixing()), ledger)
    hidden = torch.randn(7, 12)
    torch.testing.assert_close(head(hidden), Mixing().head(hidden))
    assert ledger.head_tokens == 7
    assert ledger.flops_backward == 0
    head(hidden.requires_grad_())
    assert ledger.flops_backward > 0


def test_with_several_seeds_a_document_sums_over_all_of_them(domain):
    noisy = subject(Mixing(noise=True), seeds=2)
    doing = work()
    fits, diverged = calibrate(noisy, domain, doing)
    scores = evaluate(noisy, domain, fits, diverged, doing)
    sums = schedule_sums(scores[FULL], fits[FULL], domain.evaluation, 2)
    tokens = domain.evaluation.counts
    np.testing.assert_allclose(sums.temperature.at_fit.tokens, 2 * tokens)
    np.testing.assert_allclose(sums.raw.sum() / (2 * tokens.sum()), np.mean(sums.seeds["raw"]))
    assert fits[FULL].temperature.sums.tokens.sum() == 2 * domain.calibration.tokens
    assert sums.temperature.exact.shape == (len(tokens), len(fits[FULL].replicates.exact))


def test_tables_receive_every_scored_token_once(domain):
    seen = {}

    def keep(name, schedule, columns):
        assert name == "text"
        seen.setdefault(schedule, []).append(columns)

    doing = work(keep_tokens=keep)
    plain = subject(Mixing())
    fits, diverged = calibrate(plain, domain, doing)
    scores = evaluate(plain, domain, fits, diverged, doing)
    assert set(seen) == set(plain.words)
    for schedule, parts in seen.items():
        columns = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
        places = sorted(zip(columns["document"].tolist(), columns["position"].tolist(), strict=True))
        split = domain.evaluation
        assert places == list(zip(split.owners.tolist(), split.positions.tolist(), strict=True))
        np.testing.assert_allclose(columns["nll_raw"].sum(), scores[schedule].losses["raw"].sum(), **tolerances.LOSS32)
    assert np.all(np.concatenate([part["kl_to_full"] for part in seen[FULL]]) == 0.0)


def test_betas_of_other_domains_are_scored_behind_the_exact_refits(domain):
    plain = subject(Mixing())
    doing = work()
    fits, diverged = calibrate(plain, domain, doing)
    own = fits[FULL].temperature.beta
    scores = evaluate(plain, domain, fits, diverged, doing, cross={FULL: [own, 1.0]})
    behind = scores[FULL].extra[:, len(fits[FULL].replicates.exact) :]
    np.testing.assert_allclose(behind[:, 0], scores[FULL].losses["temperature"].sum(axis=0), **tolerances.LOSS32)
    np.testing.assert_allclose(behind[:, 1], scores[FULL].losses["raw"].sum(axis=0), **tolerances.LOSS32)


def test_progress_ends_at_the_exact_total(domain):
    told = []
    doing = work(advanced=lambda phase, name, done, total, schedule: told.append((phase, done, total)))
    plain = subject(Mixing())
    fits, diverged = calibrate(plain, domain, doing)
    evaluate(plain, domain, fits, diverged, doing)
    for phase, documents in (("calibrate", domain.calibration.documents), ("evaluate", domain.evaluation.documents)):
        total = plain.minimal * len(documents)
        assert [t for p, _, t in told if p == phase] == [total] * sum(p == phase for p, _, _ in told)
        assert max(done for p, done, _ in told if p == phase) == total
    assert [entry for entry in told if entry[0] == "fit"][-1][1:] == (len(plain.words), len(plain.words))


EXPECTED_UNITS = {
    "tiny-blocks": (8, 4),
    "tiny-core": (4, 4),
    "tiny-dense": (3, 1),
    "tiny-layer-loop": (6, 2),
    "tiny-no-envelope": (4, 4),
    "tiny-two-level": (2, 2),
}
"""Units and kmid of every preset, counted by hand from its order."""


@pytest.mark.parametrize("preset", PRESETS)
def test_every_schedule_of_the_shared_walk_equals_a_run_of_its_own(domain, preset):
    """float64, ragged documents in one padded batch, against each document alone through a plain loop."""
    model = build(PRESETS[preset](), dtype=torch.float64)
    full = full_plan(model.spec)
    assert (full.M, full.kmid) == EXPECTED_UNITS[preset]
    whole = Subject(Runner(model), full, schedule_map(full, default_schedules(full)), 1)
    split = Split(domain.evaluation.documents[:3])
    (batch,) = split.batches(10_000)
    assert batch.valid is not None
    shared = {}
    walk_batch(whole, batch, 0, Ledger(), {}, shared.__setitem__)
    assert set(shared) == set(whole.words)
    for name, (plan, _) in whole.words.items():
        for row, document in enumerate(batch.documents):
            tokens = torch.from_numpy(document.tokens).long()[None]
            context, state = whole.runner.start(tokens, None, [document.item(0)])
            for block, iteration in plan:
                with torch.no_grad():
                    state = model.step(state, context, block, torch.tensor([iteration]))
            alone = whole.runner.hidden(state, context)[0, document.first - 1 : -1]
            torch.testing.assert_close(shared[name][batch.read[0] == row], alone, **tolerances.ROWS)
