"""Audits of grids, of masked models and of long texts in windows, against plain loops over single rows."""

import dataclasses
import re

import numpy as np
import pytest
import torch

import tolerances
from looplab.audit.case import FULL, MODEL
from looplab.audit.config import AuditConfig
from looplab.audit.documents import prepare
from looplab.audit.geometry import chosen_tokens
from looplab.audit.protocol import CannotAudit, plan_audit
from looplab.audit.result import AuditResult
from looplab.audit.self_tests import SelfTestError
from looplab.data.documents import DataError
from looplab.journal import Journal
from looplab.recurrence.state import standard_noise
from looplab.report import write_report
from tiny import LETTERS, Around, LetterTokenizer, Mixing, TinyDense, letters, squares

CONFIG = AuditConfig(replicates=1000, grid=(1, 2), controls=(), init_seeds=2)
MASKED = {"vocab": LETTERS + 1, "mask_token": LETTERS, "padding": frozenset({"left", "right"})}


def planned(model, documents, config=CONFIG, *, batch_tokens=200, **options):
    return plan_audit(
        model.eval(), documents, config, tokenizer=LetterTokenizer(), batch_tokens=batch_tokens, **options
    )


def losses_of_rows(model, rows, plan, noise_seed=0):
    """Loss sum of every row, run alone without padding through a plain loop."""
    found = []
    for row in rows:
        tokens = torch.from_numpy(row.tokens).long()[None]
        extras = None if row.puzzle_id is None else {"puzzle_ids": torch.tensor([row.puzzle_id])}
        with torch.no_grad():
            context = model.encode(tokens, extras=extras)
            width = model.spec.noise_width
            noise = standard_noise(0, [row.item(noise_seed)], context.positions, width) if width else None
            state = model.init_state(context, noise)
            for block, iteration in plan:
                state = model.step(state, context, block, torch.tensor([iteration]))
            logs = torch.log_softmax(model.head(model.coda(state, context))[0].double(), dim=1)
        found.append(-sum(float(logs[p, t]) for p, t in zip(row.read, row.targets, strict=True)))
    return np.array(found)


def check_sums(plan, folder, noise_seeds=(0,)):
    """Every loss sum of every document, schedule and noise seed against the plain loop; returns the measurement."""
    found = plan.measure(Journal(folder), keep_tokens=True)
    case = plan.cases[MODEL, "text"]
    split = case.domain.evaluation
    for name, (words, _) in case.subject.words.items():
        for j in noise_seeds:
            alone = losses_of_rows(plan.opened.model, split.rows, words, j)
            expected = [
                sum(alone[i] for i, row in enumerate(split.rows) if row.content_key == document.content_key)
                for document in split.documents
            ]
            kept = found.collected[MODEL, "text"].scores[name]
            np.testing.assert_allclose(kept.losses["raw"][j], expected, **tolerances.BATCHED32)
            np.testing.assert_allclose(kept.buckets["raw"].sum(), sum(kept.losses["raw"].sum(axis=0)))
    return found


@pytest.mark.parametrize("puzzles", [0, 5])
def test_a_model_of_grids_is_audited_without_a_tokenizer(puzzles, tmp_path):
    plan = planned(Around(puzzles=puzzles), squares(60, puzzles=5))
    result = check_sums(plan, tmp_path).result()
    (domain,) = result.domains
    assert [test.name for test in result.self_tests if test.passed] == [f"T{i}" for i in range(1, 10)]
    notes = {test.name: test.note for test in result.self_tests}
    assert (notes["T3"], notes["T7"]) == ("only documents of equal length share a launch", "not causal")
    assert "audit.byte_tokens" not in {finding.kind for finding in result.findings}
    assert result.model.tokenizer == "none: grids of token ids"
    assert domain.documents.evaluation_tokens < 9 * domain.documents.evaluation
    result.save(tmp_path)
    assert AuditResult.load(tmp_path) == result


def test_grids_have_no_numbers_per_byte_and_no_common_words(tmp_path):
    result = planned(Around(), squares(60)).run()
    (domain,) = result.domains
    assert domain.gaps_per_byte == {}
    assert {loss.per_byte for row in domain.schedules for loss in row.losses} == {None}
    assert (domain.documents.evaluation_bytes, domain.documents.overlap) == (None, None)
    write_report(result, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert re.search(r"scored evaluation bytes</td><td[^>]*><span[^>]*>–</span>", page)


def test_the_puzzle_of_a_grid_reaches_the_model(tmp_path):
    documents = squares(60, puzzles=5)
    swapped = dataclasses.replace(
        documents,
        documents=tuple(dataclasses.replace(d, puzzle_id=(d.puzzle_id + 1) % 5) for d in documents.documents),
    )
    one, other = (planned(Around(puzzles=5), found).run().domains[0] for found in (documents, swapped))
    assert one.schedules[0].losses[0].loss.value != other.schedules[0].losses[0].loss.value


def test_positions_before_the_tokens_take_no_part_in_geometry_and_updates():
    one, other = (planned(Around(prefix=prefix), squares(60)).run().domains[0] for prefix in (0, 4))
    for row, same in zip(one.schedules, other.schedules, strict=True):
        assert (row.geometry, row.updates) == (same.geometry, same.updates)
        assert {update.component for update in row.updates} <= {"state"}


def test_grids_of_several_lengths_are_launched_by_length_where_padding_is_not_taken(tmp_path):
    mixed = (*squares(40, length=9).documents, *squares(40, length=12, seed=1).documents)
    documents = dataclasses.replace(squares(40), documents=mixed)
    plan = planned(Around(), documents, batch_tokens=1000)
    check_sums(plan, tmp_path)
    assert lengths_of_launches(plan) == {(9, False), (12, False)}
    padding = planned(Around(padding=frozenset({"left", "right"})), documents, batch_tokens=1000)
    assert (12, True) in lengths_of_launches(padding)


def lengths_of_launches(plan):
    batches = [shard.batch for shard in plan.cases[MODEL, "text"].shards("evaluation").values()]
    return {(batch.tokens.shape[1], batch.valid is not None) for batch in batches}


def test_a_masked_model_is_scored_on_what_was_masked(tmp_path):
    plan = planned(Around(**MASKED), letters(60))
    split = plan.domains["text"].evaluation
    assert all(LETTERS in row.tokens for row in split.rows)
    assert int(split.targets.max()) < LETTERS
    assert split.counts.tolist() == [4] * len(split.documents)
    result = check_sums(plan, tmp_path).result()
    assert [test.name for test in result.self_tests if test.passed] == [f"T{i}" for i in range(1, 10)]
    assert {test.name: test.note for test in result.self_tests}["T3"].startswith("right ")
    assert result.counts.applications == result.counts.minimal_applications * result.counts.documents
    assert result.domains[0].documents.evaluation_bytes == 4 * len(split.documents)
    assert split.lengths.tolist() == [len(document.tokens) for document in split.documents]


def test_self_test_t3_finds_a_masked_model_that_reads_padding():
    class Reads(Around):
        def step(self, state, context, block, iteration, cache=None, *, record=None):
            return super().step(state, context._replace(valid=None), block, iteration)

    with pytest.raises(SelfTestError, match="^self-test T3 failed"):
        planned(Reads(**MASKED), letters(60)).run()


@pytest.mark.parametrize("noise", [False, True])
def test_windows_of_a_document_are_one_unit(noise, tmp_path):
    config = dataclasses.replace(CONFIG, max_tokens=16, windows=3)
    plan = planned(Mixing(noise=noise), letters(60), config)
    one = planned(Mixing(noise=noise), letters(60), dataclasses.replace(config, windows=1))
    split, single = plan.domains["text"].evaluation, one.domains["text"].evaluation
    assert [d.content_key for d in split.documents] == [d.content_key for d in single.documents]
    assert max(np.bincount(split.row_owners)) == 3
    measurement = check_sums(plan, tmp_path, (0, 1) if noise else (0,))
    result = measurement.result()
    assert result.domains[0].documents.evaluation == len(split.documents) < len(split.rows)
    assert result.domains[0].documents.longest == max(len(d.text) for d in split.documents)
    assert measurement.measured[MODEL, "text"].losses.documents == len(split.documents)
    seeds = 2 if noise else 1
    assert result.counts.applications == result.counts.minimal_applications * result.counts.documents * seeds
    updates = measurement.collected[MODEL, "text"].scores[FULL].updates
    assert updates[..., 0, 0, 1].sum(axis=0).max() == seeds * split.tokens


def test_the_derivatives_of_a_document_are_those_of_all_its_windows(tmp_path):
    """The slope of the loss in beta, per document, against a difference of losses at two betas."""

    class Scaled(Mixing):
        beta = 1.0

        def head(self, hidden):
            return super().head(hidden) * self.beta

    config = dataclasses.replace(CONFIG, max_tokens=16, windows=3)
    found = planned(Mixing(), letters(60), config).measure(Journal(tmp_path))
    part, split = found.collected[MODEL, "text"], found.plan.domains["text"].evaluation
    losses, step = [], 1e-3
    for beta in (part.fits[FULL].temperature.beta - step, part.fits[FULL].temperature.beta + step):
        Scaled.beta = beta
        losses.append(losses_of_rows(Scaled(), split.rows, found.plan.subject.words[FULL][0]))
    slopes = np.bincount(split.row_owners, weights=(losses[1] - losses[0]) / (2 * step))
    np.testing.assert_allclose(part.scores[FULL].derivatives[0], slopes, **tolerances.SLOPES)


def test_a_split_keeps_the_windows_of_a_document_together():
    domain = prepare("text", letters(60), LetterTokenizer(), max_tokens=16, windows=3, evaluation=25)
    split = domain.evaluation
    assert len(split.documents) == len(split.counts) == 25 < len(split.rows)
    assert split.counts.sum() == split.tokens == len(split.targets) == len(split.owners)
    assert split.owners.tolist() == sorted(split.owners.tolist())
    for i, document in enumerate(split.documents):
        own = [row for row in split.rows if row.content_key == document.content_key]
        assert [row.window for row in own] == list(range(len(own)))
        assert split.counts[i] == sum(row.scored for row in own)
        assert split.lengths[i] == sum(len(row.tokens) for row in own)
        assert split.text_bytes[i] == split.counts[i]
    assert len(split.take(7).documents) == 7
    half = split.head(int(split.counts[:9].sum()) + 1)
    assert [d.content_key for d in half.documents] == [d.content_key for d in split.documents[:9]]
    assert half.tokens == split.counts[:9].sum()


@pytest.mark.parametrize("batch_tokens", [1, 100, 10_000])
def test_batches_put_every_window_in_its_place_of_the_table(batch_tokens):
    split = prepare("text", letters(60), LetterTokenizer(), max_tokens=16, windows=3).evaluation
    targets = torch.full((split.tokens,), -1)
    windows = torch.full((split.tokens,), -1)
    for batch in split.batches(batch_tokens):
        rows, positions = batch.read
        targets[batch.place] = batch.tokens[rows, positions + 1]
        windows[batch.place] = torch.tensor([row.window for row in batch.documents])[rows]
    torch.testing.assert_close(targets, split.targets)
    torch.testing.assert_close(windows, split.windows)


def test_geometry_takes_each_window_of_a_document_by_its_own_hash():
    split = prepare("text", letters(60), LetterTokenizer(), max_tokens=16, windows=3).evaluation
    few, more = chosen_tokens(split, 50), chosen_tokens(split, 200)
    assert (int(few.sum()), int(more.sum())) == (50, 200)
    assert bool(more[few].all())
    names = [(row.name, p) for row in split.rows for p in row.positions.tolist()]
    assert len(names) == len(set(names))


def test_a_control_must_predict_the_same_things():
    with pytest.raises(CannotAudit, match="--control compares gaps in nats per byte. Got tiny, a model of grids"):
        planned(Around(), squares(60), control=TinyDense())
    with pytest.raises(
        CannotAudit, match="--control must predict masked tokens, as tiny does. Got tiny, which predicts next"
    ):
        planned(Around(**MASKED), letters(60), control=TinyDense())


def test_texts_for_a_model_of_grids_and_grids_for_one_of_texts_are_refused():
    with pytest.raises(DataError, match=r"must hold grids for this model.* Got a text \(line 1\)"):
        planned(Around(), letters(60))
    with pytest.raises(DataError, match=r"must hold texts for this model. Got tokens and labels \(line 1\)"):
        planned(Mixing(), squares(60))


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "/", "a\0b"])
def test_a_domain_of_which_no_file_can_be_named_is_refused(name):
    with pytest.raises(ValueError, match="a domain's name must be a plain file name. Got"):
        planned(Mixing(), {name: letters(60)})


def test_grids_can_be_given_as_a_list():
    assert planned(Around(), list(squares(60).documents)).domains["text"].read == 60
