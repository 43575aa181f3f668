import functools
import math

import numpy as np
import pytest
import torch

from engine.carrier import OUTPUT, PROMPT, STEPS, Carrier, contracting, texts, written_late
from looplab.engine.reuse import (
    Arms,
    assess,
    audit_rule,
    check_auditable,
    cut_windows,
    delayed,
    free_run,
    measure,
    reference,
)
from looplab.engine.verdict import ReuseResult, sentence
from looplab.models.base import build
from looplab.models.huginn import tiny_huginn
from looplab.models.ouro import tiny_ouro
from looplab.recurrence.exit import FullExit, HazardExit, LatentExit, forward_until
from looplab.recurrence.kv import Anchor, CopyLast, DepthIndexed, First, Single
from looplab.recurrence.loop import forward

LAST_EXITED = DepthIndexed(missing=CopyLast())
RULE = HazardExit(threshold=0.5)


@functools.cache
def audited(carrier, kv, windows=8):
    model, text = Carrier(carrier), texts(windows)
    base = reference(model, text, prompt=PROMPT)
    return audit_rule(model, text, RULE, kv, base, prompt=PROMPT, replicates=200)


@pytest.mark.parametrize("kv", [LAST_EXITED, Single()])
def test_a_carrier_that_is_written_at_step_3_is_refused_until_tokens_run_two_steps_more(kv):
    verdicts = audited(written_late, kv)
    assert [(v.delay, v.word) for v in verdicts] == [(0, "not reusable"), (1, "not reusable"), (2, "reusable")]
    first, last = verdicts[0], verdicts[-1]
    # A quarter of the tokens is odd and follows an even one: each loses about log 8 nats and its top token.
    assert first.reuse.low > 0.1 and first.flips.low > 0.05
    assert last.reuse.estimate == 0.0 and last.mean_depth < STEPS
    assert first.past.estimate == pytest.approx(first.reuse.estimate) and last.past.estimate == 0.0
    deep = [s.reuse for s in first.by_depth if s.name == str(STEPS)]
    shallow = [s.reuse for s in first.by_depth if s.name == "1"]
    assert deep == [0.0] and shallow[0] > 0.2
    assert first.by_distance[0].name == "1" and first.by_distance[0].reuse > 0.2
    assert all(s.reuse == 0.0 for s in first.by_distance[1:])


def test_a_contracting_core_passes():
    for kv in (LAST_EXITED, Single()):
        (verdict,) = audited(contracting, kv)
        assert verdict.word == "reusable" and verdict.delay == 0 and verdict.mean_depth < STEPS
        assert 0 < abs(verdict.reuse.estimate) < 0.005


def test_the_cost_of_sharing_a_slot_is_no_cost_of_exits():
    """`first` never has the carrier: full depth loses it as well, and exits lose nothing more."""
    (verdict,) = audited(written_late, First())
    assert verdict.rule.low > 0.1 and verdict.reuse.estimate == 0.0 and verdict.word == "reusable"


def test_terms_telescope():
    for verdict in audited(written_late, Single()):
        parts = verdict.rule.estimate + verdict.read.estimate + verdict.reuse.estimate
        assert verdict.total.estimate == pytest.approx(parts, abs=1e-9)


def tiny(kind=tiny_ouro):
    text = torch.randint(64, (8, 10), generator=torch.Generator().manual_seed(1))
    return build(kind(), seed=2), text


@pytest.mark.parametrize("kv", [LAST_EXITED, Single(), First(), Anchor(n=1)])
def test_identical_arms_give_exactly_nothing(kv):
    model, text = tiny()
    arms = measure(model, text, FullExit(), kv, prompt=7, rows=5)
    assert np.array_equal(arms.exit, arms.read) and np.array_equal(arms.full, arms.past)
    assert np.array_equal(arms.exit, arms.full)
    assert not arms.flipped.any() and not arms.kl.any() and (arms.depths == 4).all()
    if kv == LAST_EXITED:
        assert np.array_equal(arms.full, reference(model, text, prompt=7, rows=5))


def test_arms_with_a_deep_past_equal_runs_without_a_cache():
    """Reading the past as deep as the reader is what a model does that sees the whole text at once."""
    model, text = tiny()
    rule = HazardExit(threshold=0.6)
    arms = measure(model, text, rule, LAST_EXITED, prompt=6)
    labels = text[:, 7:, None]
    with torch.no_grad():
        alone = forward_until(model, text[:, :-1], rule)
        whole = forward(model, text[:, :-1])
    for values, out in ((arms.read, alone), (arms.full, whole)):
        nll = -out.logits[:, 6:].double().log_softmax(-1).gather(-1, labels)[..., 0]
        np.testing.assert_allclose(values, nll.numpy(), atol=2e-5)
    assert len(set(alone.steps[:, 6:].flatten().tolist())) > 1
    # The first token that may exit has a past of prompt alone, which is deep in every arm.
    assert np.array_equal(arms.exit[:, 0], arms.read[:, 0])
    assert (arms.exit[:, 1:] != arms.read[:, 1:]).any()


def test_a_model_that_starts_from_noise_is_measured_as_an_engine_starts_it():
    model, text = tiny(tiny_huginn)
    rule = LatentExit(threshold=0.9)
    text = text[:3, :8]
    arms = measure(model, text, rule, LAST_EXITED, prompt=6, seed=3)
    again = measure(model, text, rule, LAST_EXITED, prompt=6, seed=3, rows=2)
    other = measure(model, text, rule, LAST_EXITED, prompt=6, seed=4)
    np.testing.assert_allclose(arms.exit, again.exit, atol=1e-5)
    assert not np.allclose(arms.exit, other.exit, atol=1e-5)


def test_a_delayed_rule_runs_so_many_steps_more():
    model, text = tiny()
    rule = HazardExit(threshold=0.5, min_steps=2)
    with torch.no_grad():
        steps = forward_until(model, text, rule).steps
        for delay in (1, 2):
            later = forward_until(model, text, delayed(rule, delay)).steps
            assert torch.equal(later, (steps + delay).clamp(max=4))
    assert int(steps.min()) >= 2 and delayed(rule, 0) is rule


def test_free_runs_diverge_where_entries_are_missing_and_only_there():
    model, text = Carrier(written_late), texts(8)
    lost = free_run(model, text, RULE, Single(), prompt=PROMPT, output=5)
    assert lost.diverged > 0 and len(lost.first) == lost.diverged and lost.first == tuple(sorted(lost.first))
    # The second generated token is the first that can read an exited one.
    assert min(lost.first) >= 2
    kept = free_run(model, text, RULE, Single(), prompt=PROMPT, output=5, delay=2)
    assert kept.diverged == 0 and kept.windows == 8
    split = free_run(model, text, RULE, Single(), prompt=PROMPT, output=5, rows=5)
    assert split == lost


def planted(cost, seed, windows=40, tokens=20):
    make = np.random.default_rng(seed)
    noise = make.normal(0, 0.05, (windows, 1)) + make.normal(0, 0.2, (windows, tokens))
    flat = np.zeros((windows, tokens))
    depths = make.integers(1, 5, (windows, tokens))
    arms = Arms(flat, flat, flat, cost + noise, flat, flat.astype(bool), depths)
    return assess(arms, flat, kv_rule="single", delay=0, steps=4, kv_bytes=8, seed=seed, replicates=400)


def covered(seeds):
    return sum(v.reuse.low <= 0.03 <= v.reuse.high for v in (planted(0.03, seed) for seed in seeds)) / len(seeds)


def test_the_interval_covers_a_planted_cost():
    # 95 % of 40 are 38; fewer than 33 come once in 400 times.
    assert covered(range(40)) >= 33 / 40


@pytest.mark.nightly
def test_the_interval_covers_a_planted_cost_at_its_level():
    assert 0.9 <= covered(range(100)) <= 1.0


def test_a_cost_that_grows_with_exits_has_a_slope():
    make = np.random.default_rng(0)
    depths = make.integers(1, 3, (30, 20))
    earlier = np.concatenate([np.zeros((30, 1)), (depths < 2).cumsum(1)[:, :-1]], 1)
    flat = np.zeros((30, 20))
    arms = Arms(flat, flat, flat, 0.02 * earlier, flat, flat.astype(bool), depths)
    verdict = assess(arms, flat, kv_rule="single", delay=0, steps=2, kv_bytes=8, replicates=200)
    assert verdict.slope.estimate == pytest.approx(0.02) and verdict.slope.low == pytest.approx(0.02)
    never = Arms(flat, flat, flat, flat, flat, flat.astype(bool), np.full((30, 20), 2))
    assert assess(never, flat, kv_rule="single", delay=0, steps=2, kv_bytes=8, replicates=20).slope is None


def test_windows_come_from_all_documents_before_any_gives_a_second():
    documents = [list(range(10)), list(range(100, 109)), [1, 2]] + [list(range(20, 24))] * 5
    windows = cut_windows(documents, length=4, windows=9)
    assert windows.shape == (9, 4)
    assert windows[:2].tolist() == [[0, 1, 2, 3], [100, 101, 102, 103]]
    assert windows[7].tolist() == [4, 5, 6, 7] and windows[8].tolist() == [104, 105, 106, 107]
    with pytest.raises(ValueError, match="at least 8 windows of 9 tokens. Got 2 in 8 documents, the longest of 10 tok"):
        cut_windows(documents, length=9, windows=9)


def test_what_no_verdict_can_be_about_is_refused():
    model, _ = tiny()
    with pytest.raises(ValueError, match="the exit rule must stop tokens early. Got full"):
        check_auditable(model, FullExit(), Single())
    with pytest.raises(ValueError, match="depth_indexed forbids exits; use last_exited"):
        check_auditable(model, RULE, DepthIndexed())
    with pytest.raises(ValueError, match=r"first_then_shared\(3\) needs min_steps of at least 3. Got 1. Raise"):
        check_auditable(model, RULE, Anchor(n=2))
    with pytest.raises(ValueError, match="no trained gate"):
        check_auditable(build(tiny_huginn()), RULE, Single())
    with pytest.raises(ValueError, match="delay must be at least 0. Got -1"):
        delayed(RULE, -1)


def test_a_result_says_what_to_do():
    verdicts = audited(written_late, Single())
    result = ReuseResult(
        model="m",
        weights="w",
        exit_rule=str(RULE),
        steps=STEPS,
        prompt=PROMPT,
        output=OUTPUT,
        windows=8,
        text="t",
        text_hash="h",
        seed=0,
        replicates=200,
        verdicts=verdicts,
    )
    assert result.settle("single") == 2
    said = sentence(result, "single")
    assert said.startswith("single: not reusable (reuse ") and "Passes with exit_delay=2 (mean depth " in said
    assert math.isclose(result.of("single").kv_bytes, 2 * 8 * 8)
