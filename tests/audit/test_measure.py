"""Measuring a case: shards, token tables, fits that survive the journal."""

import dataclasses

import numpy as np
import pytest
import torch

import tolerances
from looplab.audit.case import CALIBRATION, EVALUATION, FULL, MODEL, Case, Subject, owned
from looplab.audit.config import AuditConfig
from looplab.audit.documents import Split, prepare
from looplab.audit.measure import counting_head, pack_fits, unpack_fits, walk_shard
from looplab.audit.protocol import plan_audit
from looplab.audit.runner import Runner
from looplab.audit.schedules import default_schedules, full_plan, schedule_map
from looplab.journal import Journal
from looplab.models.base import PRESETS, build
from looplab.recurrence.ledger import Ledger
from tiny import LetterTokenizer, Mixing, letters

CONFIG = AuditConfig(replicates=1000, probes=("temperature",), grid=(2,), controls=(), init_seeds=2)


@pytest.fixture(scope="module")
def domain():
    return prepare("text", letters(70), LetterTokenizer())


def measurement(model, folder, config=CONFIG, **more):
    plan = plan_audit(model.eval(), letters(70), config, tokenizer=LetterTokenizer(), batch_tokens=500)
    return plan.measure(Journal(folder), **more)


def case_of(subject, domain, batch_tokens=10_000):
    return Case(role=MODEL, subject=subject, domain=domain, config=CONFIG, batch_tokens=batch_tokens)


def test_the_head_is_counted_by_the_token():
    ledger = Ledger()
    head = counting_head(Runner(Mixing()), ledger)
    hidden = torch.randn(7, 12)
    torch.testing.assert_close(head(hidden), Mixing().head(hidden))
    assert ledger.head_tokens == 7
    assert ledger.flops_backward == 0
    head(hidden.requires_grad_())
    assert ledger.flops_backward > 0


def test_with_several_seeds_a_document_sums_over_all_of_them(domain, tmp_path):
    found = measurement(Mixing(noise=True), tmp_path)
    part = found.measured[MODEL, "text"]
    sums, tokens = part.losses.tables[FULL], part.domain.evaluation.counts
    np.testing.assert_allclose(sums.temperature.at_fit.tokens, 2 * tokens)
    np.testing.assert_allclose(sums.raw.sum() / (2 * tokens.sum()), np.mean(sums.seeds["raw"]))
    fit = part.fits[FULL]
    assert fit.temperature.sums.tokens.sum() == 2 * part.domain.calibration.tokens
    assert sums.temperature.exact.shape == (len(tokens), len(fit.replicates.exact))


def test_a_part_holds_every_scored_token_once(domain, tmp_path):
    found = measurement(Mixing(), tmp_path, keep_tokens=True)
    name = (MODEL, "text")
    case = found.plan.cases[name]
    split = case.split(EVALUATION)
    for schedule in case.subject.words:
        parts = [found.journal.get((*name, EVALUATION, shard, schedule)).arrays for shard in case.shards(EVALUATION)]
        assert len(parts) > 1
        column = {key: np.concatenate([part[f"token.{key}"] for part in parts]) for key in ("document", "position")}
        places = sorted(zip(column["document"].tolist(), column["position"].tolist(), strict=True))
        assert places == list(zip(split.owners.tolist(), split.positions.tolist(), strict=True))
        total = sum(part["token.nll_raw"].sum(dtype=np.float64) for part in parts)
        kept = found.collected[name].scores[schedule].losses["raw"].sum()
        np.testing.assert_allclose(total, kept, **tolerances.LOSS32)
        if schedule == FULL:
            assert all(np.all(part["token.kl_to_full"] == 0.0) for part in parts)


@pytest.mark.nightly
def test_fits_survive_the_journal_bit_by_bit(tmp_path):
    config = dataclasses.replace(CONFIG, probes=("temperature", "affine", "full_rank"))
    found = measurement(Mixing(), tmp_path / "a", config)
    journal = Journal(tmp_path / "b")
    for fits in found.collected[MODEL, "text"].fits.values():
        part = pack_fits(fits)
        journal.put(("fit",), part)
        again = unpack_fits(journal.get(("fit",)))
        assert pack_fits(again).facts == part.facts
        for name, array in part.arrays.items():
            np.testing.assert_array_equal(pack_fits(again).arrays[name], array)
        assert again.temperature.beta == fits.temperature.beta
        assert again.affine.strength == fits.affine.strength
        np.testing.assert_array_equal(again.full_rank.matrix, fits.full_rank.matrix)


def test_the_ledger_of_a_walk_is_what_its_schedules_own(domain):
    full = full_plan(Mixing().spec)
    subject = Subject(Runner(Mixing().eval()), full, schedule_map(full, default_schedules(full)), 1)
    shard = next(iter(case_of(subject, domain).shards(CALIBRATION).values()))
    ran, total = Ledger(), Ledger()
    walk_shard(subject, shard, subject.tree(), lambda *_: None, ledger=ran)
    for ledger in owned(subject, shard, tuple(subject.words), ()).values():
        total.add(ledger)
    assert ran.to_dict(times=False) == total.to_dict(times=False)


EXPECTED_UNITS = {
    "tiny-blocks": (8, 4),
    "tiny-core": (4, 4),
    "tiny-dcp": (8, 4),
    "tiny-dense": (3, 1),
    "tiny-huginn": (4, 4),
    "tiny-ifm-ouro": (3, 3),
    "tiny-ifm-split-hl": (2, 2),
    "tiny-isodepth": (4, 4),
    "tiny-layer-loop": (6, 2),
    "tiny-loopformer": (8, 8),
    "tiny-no-envelope": (4, 4),
    "tiny-ouro": (4, 4),
    "tiny-parcae": (4, 4),
    "tiny-retrofit-llama": (4, 4),
    "tiny-retrofit-olmo": (4, 4),
    "tiny-two-level": (2, 2),
    "tiny-vera": (6, 3),
}
"""Units and kmid of every tiny preset, counted by hand from its order."""
GRIDS = ("tiny-hrm", "tiny-trm-attn", "tiny-trm-mlp")
"""Presets that read grids and take no padding."""


def test_every_tiny_preset_is_counted():
    assert {name for name in PRESETS if name.startswith("tiny-")} == {*EXPECTED_UNITS, *GRIDS}


@pytest.mark.parametrize("preset", EXPECTED_UNITS)
def test_every_schedule_of_the_shared_walk_equals_a_run_of_its_own(preset):
    """float64, ragged documents in one padded batch, against each document alone through a plain loop."""
    model = build(PRESETS[preset](), dtype=torch.float64)
    full = full_plan(model.spec)
    assert (full.M, full.kmid) == EXPECTED_UNITS[preset]
    whole = Subject(Runner(model), full, schedule_map(full, default_schedules(full)), 1)
    domain = prepare("text", letters(70), LetterTokenizer(), max_tokens=32)  # what the shortest context takes
    split = Split(domain.evaluation.documents[:3])
    (shard,) = case_of(whole, dataclasses.replace(domain, evaluation=split)).shards(EVALUATION).values()
    batch = shard.batch
    assert batch.valid is not None
    shared = {}
    walk_shard(whole, shard, whole.tree(), lambda name, hidden, state: shared.__setitem__(name, hidden))
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
