"""Gain against cost: planted losses per document, hand-made costs."""

import dataclasses

import numpy as np
import pytest

from looplab._config import from_dict
from looplab.audit.bootstrap import ScheduleSums, bootstrap_losses
from looplab.audit.config import AuditConfig
from looplab.audit.depth_value import depth_value, documents_needed, more_documents_text, step_word
from looplab.audit.result import DepthValue, Estimate, ScheduleEntry
from looplab.audit.schedules import full_plan
from looplab.cli.describe import description
from looplab.intervals import document_draws
from looplab.models.base import PRESETS, build
from looplab.nn.cost import CostSpec, Group
from looplab.records import encode_json
from looplab.recurrence.depth import FixedDepth, PrefixDepth, UniformDepth, Unknown
from looplab.recurrence.kv import DepthIndexed, Single
from looplab.recurrence.plan import Blocks, ModelLoop, Plan, Sequential, TwoLevel
from tiny import tiny_spec

CONFIG = AuditConfig(replicates=2000)
DOCUMENTS = 60
COST = CostSpec(
    prelude=Group(matmul=10, attention_width=3, kv_width=7),
    blocks=(Group(matmul=100, attention_width=5, kv_width=11), Group(matmul=40, attention_width=2, kv_width=13)),
    coda=Group(matmul=20, attention_width=1, kv_width=5),
    head=Group(matmul=1000),
)
CONTEXT = 32
BESIDE = 2 * (10 + 20 + 1000) + 2 * (3 + 1) * (CONTEXT + 1)
"""FLOPs per token of prelude, coda and head: 2 matmul, and 4 width T (T + 1) / 2 over T tokens."""
FIRST, SECOND = (2 * matmul + 2 * width * (CONTEXT + 1) for matmul, width in ((100, 5), (40, 2)))


def core(steps=8, **more):
    return tiny_spec(
        ModelLoop(num_steps=steps), 1, 4, **{"trained_depth": FixedDepth(num_steps=8), "cost": COST, **more}
    )


def entry(name, plan, units, **more):
    family, _, inside = name.partition("(")
    fields = {"word": str(plan), "distinct": len(set(plan)), "same_as": None, "reason": None, **more}
    k = int(inside[:-1]) if inside else None
    return ScheduleEntry(name=name, family=family, k=k, plan=str(plan), applications=len(plan), units=units, **fields)


def schedule_rows(spec, ks, extend=()):
    """Rows of full, prefix(k) and extend_last(a)."""
    full = full_plan(spec)
    size = len(full.plan) // full.M
    rows = [entry("full", full.plan, full.M)]
    rows += [entry(f"prefix({k})", full.plan[: k * size], k) for k in ks]
    rows += [
        entry(f"extend_last({a})", Plan(full.plan.applications + full.units[-1].applications * (a - full.M)), a)
        for a in extend
    ]
    return tuple(rows)


def planted(levels, *, noise=0.001, documents=DOCUMENTS, affine=None, seed=0):
    """Losses whose per-document spread around each level is `noise`, a number or one per schedule."""
    random = np.random.default_rng(seed)
    tokens = random.integers(20, 200, size=documents).astype(float)
    tables = {}
    for name, level in levels.items():
        wide = noise[name] if isinstance(noise, dict) else noise
        own = random.normal(size=documents)
        own = (own - (own * tokens).sum() / tokens.sum()) * wide
        raw = tokens * (level + own)
        tables[name] = ScheduleSums(raw=raw, fixed={"affine": raw - tokens * affine[name]} if affine else {})
    draws = document_draws(documents, CONFIG.replicates, seed=0, domain="text", split="evaluation")
    return bootstrap_losses(tables, draws, tokens=tokens)


def value(levels, spec=None, *, ks=(1, 2, 4), extend=(), unmeasured=None, trained=(8, 8), config=CONFIG, **options):
    spec = spec or core()
    more = {"context_tokens": CONTEXT, "itemsize": 2, "milliseconds": options.pop("milliseconds", None)}
    losses = levels if not isinstance(levels, dict) else planted(levels, **options)
    return depth_value(
        losses,
        schedule_rows(spec, ks, extend),
        domain="text",
        full=full_plan(spec),
        spec=spec,
        unmeasured=unmeasured or {},
        trained_units=trained,
        config=config,
        **more,
    )


FLAT_AFTER_FOUR = {"prefix(1)": 3.0, "prefix(2)": 2.5, "prefix(4)": 2.005, "full": 2.0}
EXTENDED = {**FLAT_AFTER_FOUR, "extend_last(10)": 2.003, "extend_last(12)": 2.004, "extend_last(16)": 2.2}


def steps(found):
    return {step.after: step for step in found.steps}


def estimate(low, value, high, *, narrow=0.84):
    below, above = value - narrow * (value - low), value + narrow * (high - value)
    return Estimate(value=value, low=low, high=high, low90=below, high90=above, plain_low=low, plain_high=high)


def test_steps_run_from_prefix_to_full_and_past_it_in_order_of_depth():
    found = value(EXTENDED, extend=(16, 10, 12))
    assert found.start.schedule == "prefix(1)"
    assert [(s.before, s.after) for s in found.steps] == [
        ("prefix(1)", "prefix(2)"),
        ("prefix(2)", "prefix(4)"),
        ("prefix(4)", "full"),
        ("full", "extend_last(10)"),
        ("extend_last(10)", "extend_last(12)"),
        ("extend_last(12)", "extend_last(16)"),
    ]
    assert [s.beyond for s in found.steps] == [False, False, False, True, True, True]
    assert [(s.units, s.applications, s.added) for s in found.steps][1:4] == [(4, 4, 2), (8, 8, 4), (10, 10, 2)]


def test_gains_add_up_to_the_gap_and_are_differences_of_the_losses():
    found = value(FLAT_AFTER_FOUR)
    assert sum(s.gain.value for s in found.steps) == pytest.approx(1.0, abs=1e-12)
    before = found.start.loss.value
    for step in found.steps:
        assert step.gain.value == pytest.approx(before - step.loss.value, abs=1e-12)
        before = step.loss.value


def test_the_net_gain_has_the_readout_refitted_at_both_depths():
    probe = {"prefix(1)": 0.4, "prefix(2)": 0.1, "prefix(4)": 0.03, "full": 0.03}
    found = value(FLAT_AFTER_FOUR, affine=probe)
    assert steps(found)["prefix(2)"].net["affine"].value == pytest.approx(0.5 - 0.3, abs=1e-12)
    assert steps(found)["full"].net["affine"].value == pytest.approx(steps(found)["full"].gain.value, abs=1e-12)
    assert set(steps(found)["full"].net) == {"affine"}


@pytest.mark.parametrize(
    ("low", "middle", "high", "word"),
    [
        (0.03, 0.05, 0.07, "gains"),
        (-0.07, -0.05, -0.03, "harms"),
        (-0.01, 0.02, 0.05, "undecided"),
        (0.001, 0.005, 0.009, "equivalent to zero"),
        (-0.009, -0.005, -0.001, "equivalent to zero"),
        (0.0, 0.05, 0.1, "undecided"),
        (0.0, 0.0, 0.0, "equivalent to zero"),
    ],
)
def test_the_word_of_a_step_follows_the_interval_and_equivalence_wins(low, middle, high, word):
    assert step_word(estimate(low, middle, high), 0.02) == word


def test_a_gain_whose_narrow_interval_touches_the_margin_is_not_equivalent():
    assert step_word(estimate(-0.01, 0.0, 0.02, narrow=1.0), 0.02) == "undecided"


def test_flops_and_kv_bytes_are_exact():
    found = value(EXTENDED, extend=(12,))
    assert found.start.flops == BESIDE + FIRST
    assert found.start.kv_bytes == 2 * (7 + 11 + 5)
    for name, applications in (("prefix(4)", 4), ("full", 8), ("extend_last(12)", 12)):
        step = steps(found)[name]
        assert step.flops == BESIDE + applications * FIRST
        assert step.kv_bytes == 2 * (7 + applications * 11 + 5)
        assert step.added_flops == step.added * FIRST


@pytest.mark.parametrize("preset", ["tiny-core", "tiny-blocks", "tiny-layer-loop", "tiny-two-level", "tiny-dense"])
def test_full_depth_costs_what_describe_says(preset):
    spec = build(PRESETS[preset](), device="meta").spec
    found = value({"prefix(1)": 3.0, "full": 2.0}, spec, ks=(1,))
    cost = description(spec, spec.plan(), tokens=CONTEXT, kv_dtype="bfloat16")["cost"]
    step = steps(found)["full"]
    assert (step.flops, step.kv_bytes) == (cost["forward_flops_per_token"], cost["kv_bytes_per_token"])


def test_kv_bytes_follow_the_models_own_rule():
    found = value(FLAT_AFTER_FOUR, core(kv_rule=Single(), kv_rules=(Single(),)))
    assert {s.kv_bytes for s in found.steps} == {2 * (7 + 11 + 5)}


def test_two_blocks_cost_what_each_application_costs():
    spec = tiny_spec(Blocks(num_steps=(4, 4)), 2, 4, cost=COST, trained_depth=FixedDepth(num_steps=4))
    found = value({"prefix(1)": 3.0, "prefix(4)": 2.2, "prefix(6)": 2.1, "full": 2.0}, spec, ks=(1, 4, 6))
    assert steps(found)["prefix(6)"].flops == BESIDE + 4 * FIRST + 2 * SECOND
    assert steps(found)["prefix(6)"].kv_bytes == 2 * (7 + 4 * 11 + 2 * 13 + 5)


def test_a_cycle_of_a_two_level_model_is_one_unit():
    spec = tiny_spec(TwoLevel(h=4, l=2), 2, 4, cost=COST, trained_depth=FixedDepth(num_steps=4))
    found = value({"prefix(1)": 3.0, "prefix(2)": 2.2, "full": 2.0}, spec, ks=(1, 2))
    step = steps(found)["prefix(2)"]
    assert (step.units, step.applications, step.added) == (2, 6, 3)
    assert step.flops == BESIDE + 4 * FIRST + 2 * SECOND
    assert found.sentence.startswith("On text, pay for all 4 units: stopping at 2 costs 0.200 nats [")


def test_a_model_without_causal_order_has_no_cache_and_pairs_every_token_with_every_other():
    found = value(FLAT_AFTER_FOUR, core(causal=False, kv_rule=DepthIndexed()))
    assert {s.kv_bytes for s in found.steps} == {0}
    square = 2 * (10 + 20 + 1000 + 100) + 4 * (3 + 1 + 5) * CONTEXT
    assert found.start.flops == square


def test_measured_times_are_copied_and_absent_ones_stay_absent():
    found = value(FLAT_AFTER_FOUR, milliseconds={"prefix(1)": 0.5, "full": 2.5})
    assert (found.start.milliseconds, steps(found)["full"].milliseconds) == (0.5, 2.5)
    assert steps(found)["prefix(2)"].milliseconds is None
    assert value(FLAT_AFTER_FOUR).start.milliseconds is None


def test_the_margin_is_the_smaller_of_nats_and_share_of_the_whole_gap():
    assert value(FLAT_AFTER_FOUR).steps[0].margin == pytest.approx(0.02)
    assert value({**FLAT_AFTER_FOUR, "prefix(1)": 2.2}).steps[0].margin == pytest.approx(0.05 * 0.2)


def test_without_a_measurable_gap_the_margin_is_that_in_nats():
    assert value({"prefix(2)": 2.5, "full": 2.0}, ks=(2,)).steps[0].margin == 0.02
    found = value({"prefix(1)": 2.002, "prefix(2)": 2.001, "full": 2.0}, ks=(1, 2))
    assert found.steps[0].margin == 0.02
    assert found.enough == 1


def test_enough_is_the_fewest_units_after_which_nothing_more_than_the_margin_is_gained():
    found = value(FLAT_AFTER_FOUR)
    assert found.enough == 4
    assert found.sentence == (
        "On text, pay for 4 of 8 units: going on to any measured depth up to 8 gains less than 0.020 nats. "
        "Nothing beyond the trained depth was run (--extend)."
    )


def test_small_steps_that_add_up_are_not_free():
    levels = {"prefix(1)": 3.0, "prefix(5)": 2.03, "prefix(6)": 2.02, "prefix(7)": 2.01, "full": 2.0}
    found = value(levels, ks=(1, 5, 6, 7))
    assert all(step.gain.high90 < 0.02 for step in found.steps[1:]), "each step alone is below the margin"
    assert found.enough == 7


def test_a_gain_in_between_counts_even_if_full_depth_gives_it_back():
    levels = {"prefix(1)": 3.0, "prefix(2)": 2.0, "prefix(4)": 1.9, "full": 2.0}
    found = value(levels)
    assert found.enough == 4, "stopping at 2 costs nothing against full, but 0.1 against 4"


def test_a_step_that_pays_behind_a_loss_keeps_the_shallower_depth_from_being_enough():
    levels = {"prefix(1)": 2.0, "prefix(2)": 2.1, "prefix(4)": 2.0, "full": 2.0}
    assert value(levels, config=dataclasses.replace(CONFIG, margin_share=1.0)).enough == 4


def test_all_units_are_paid_for_where_the_last_step_is_shown_to_exceed_the_margin():
    found = value({"prefix(1)": 3.0, "prefix(4)": 2.3, "full": 2.0}, ks=(1, 4))
    assert found.enough == 8
    assert found.sentence.startswith("On text, pay for all 8 units: stopping at 4 costs 0.300 nats [")


def test_an_undecided_last_step_leaves_enough_open_and_says_how_many_documents_would_help():
    found = value({"prefix(1)": 3.0, "prefix(4)": 2.015, "full": 2.0}, ks=(1, 4), noise=0.04)
    assert found.enough is None
    assert found.sentence.startswith("On text, it is undecided whether fewer than 8 units are enough: stopping at 4")
    assert "more documents would decide" in found.sentence


def test_a_depth_that_is_enough_is_named_though_a_shallower_one_is_undecided():
    levels = {"prefix(1)": 3.0, "prefix(2)": 2.02, "prefix(4)": 2.0, "full": 2.0}
    found = value(levels, noise={"prefix(1)": 0.05, "prefix(2)": 0.1, "prefix(4)": 0.001, "full": 0.001})
    assert found.enough == 4
    assert "On text, 4 of 8 units are enough: " in found.sentence
    assert "Whether 2 would be is undecided." in found.sentence


def test_the_safe_range_ends_before_the_first_depth_that_is_worse_by_the_margin():
    found = value(EXTENDED, extend=(10, 12, 16))
    assert found.safe_until == 12
    assert "Running past the trained depth is safe up to 12 units; at 16 the loss is 0.200 nats [" in found.sentence


def test_a_depth_behind_an_unsafe_one_is_not_reached():
    found = value({**EXTENDED, "extend_last(10)": 2.3}, extend=(10, 12))
    assert found.safe_until == 8
    assert "Running past the trained depth is not safe: at 10 units the loss is 0.300 nats [" in found.sentence


def test_everything_that_was_run_past_full_may_be_safe():
    found = value({**EXTENDED, "extend_last(12)": 1.9}, extend=(10, 12))
    assert found.safe_until == 12
    assert "safe up to 12 units and lowers the loss by 0.100 nats [" in found.sentence
    assert found.sentence.endswith("; nothing deeper was run.")


@pytest.mark.parametrize("level", [2.003, 2.03], ids=["inside the margin", "outside it"])
def test_an_undecided_extension_is_called_neither_safe_nor_unsafe(level):
    noise = {**dict.fromkeys(EXTENDED, 0.001), "extend_last(10)": 0.3}
    found = value({**EXTENDED, "extend_last(10)": level}, extend=(10,), noise=noise)
    assert found.safe_until == 8
    assert "Whether running past the trained depth is safe is undecided: at 10 units the loss is" in found.sentence


def test_an_extension_that_diverged_ends_the_safe_range():
    levels = {name: level for name, level in EXTENDED.items() if name != "extend_last(12)"}
    found = value(levels, extend=(10, 12, 16), unmeasured={"extend_last(12)": "diverged at application 11"})
    assert found.safe_until == 10
    assert "safe up to 10 units; at 12: diverged at application 11." in found.sentence
    first = value(FLAT_AFTER_FOUR, extend=(10,), unmeasured={"extend_last(10)": "diverged at application 9"})
    assert first.safe_until == 8
    assert "is not shown to be safe: at 10 units, diverged at application 9." in first.sentence


def test_without_an_extension_the_safe_range_is_unknown():
    assert value(FLAT_AFTER_FOUR).safe_until is None


@pytest.mark.parametrize(
    ("law", "words"),
    [
        (FixedDepth(num_steps=8), "the trained depth"),
        (PrefixDepth(law=UniformDepth(low=1, high=8)), "the trained depth"),
        (UniformDepth(low=1, high=16), "full depth"),
        (FixedDepth(num_steps=4), "full depth"),
        (Unknown(), "full depth"),
    ],
)
def test_full_depth_is_called_the_trained_depth_only_where_it_is(law, words):
    found = value(FLAT_AFTER_FOUR, core(trained_depth=law))
    assert found.sentence.endswith(f"Nothing beyond {words} was run (--extend).")


@pytest.mark.parametrize(
    ("law", "words"),
    [
        (FixedDepth(num_steps=4), "the trained depth"),
        (FixedDepth(num_steps=8), "full depth"),
        (PrefixDepth(law=FixedDepth(num_steps=8)), "the trained depth"),
        (PrefixDepth(law=FixedDepth(num_steps=4)), "full depth"),
    ],
)
def test_the_trained_depth_of_several_blocks_counts_steps_or_the_prefix_as_the_law_does(law, words):
    spec = tiny_spec(Blocks(num_steps=(4, 4)), 2, 4, trained_depth=law)
    assert value(FLAT_AFTER_FOUR, spec).sentence.endswith(f"Nothing beyond {words} was run (--extend).")


def test_a_dense_model_gets_a_table_of_cut_layers():
    spec = tiny_spec(Sequential(), 6, 4, trained_depth=FixedDepth(num_steps=1))
    found = value({"prefix(2)": 3.0, "prefix(5)": 2.01, "full": 2.0}, spec, ks=(2, 5))
    assert (found.enough, found.safe_until) == (5, None)
    assert found.sentence == (
        "On text, pay for 5 of 6 layers: going on to any measured depth up to 6 gains less than 0.020 nats."
    )


def test_a_depth_without_a_number_is_stepped_over():
    found = value({"prefix(1)": 3.0, "prefix(4)": 2.0, "full": 2.0}, unmeasured={"prefix(2)": "diverged"})
    assert [s.before for s in found.steps] == ["prefix(1)", "prefix(4)"]


def test_without_a_measured_depth_below_full_nothing_is_said_about_enough():
    found = value({"full": 2.0, "extend_last(10)": 2.0}, ks=(1,), extend=(10,), unmeasured={"prefix(1)": "diverged"})
    assert (found.enough, found.start.schedule, found.safe_until) == (None, "full", 10)
    assert found.sentence.startswith("On text, no depth below all 8 units was measured. Running past")


def test_layers_repeated_past_a_dense_model_have_no_safe_range():
    spec = tiny_spec(Sequential(), 6, 4, trained_depth=FixedDepth(num_steps=1))
    found = value({"prefix(2)": 3.0, "full": 2.0, "extend_last(8)": 2.0}, spec, ks=(2,), extend=(8,))
    assert found.safe_until is None
    assert found.sentence.startswith("On text, pay for all 6 layers")


def test_other_schedules_are_passed_over():
    spec = core()
    rows = (*schedule_rows(spec, (1,)), entry("suffix(4)", Plan.of((0, i) for i in range(4)), 4))
    losses = planted({"prefix(1)": 3.0, "full": 2.0, "suffix(4)": 2.5})
    more = {"domain": "text", "full": full_plan(spec), "spec": spec, "unmeasured": {}, "trained_units": None}
    found = depth_value(losses, rows, config=CONFIG, context_tokens=CONTEXT, itemsize=2, **more)
    assert [s.after for s in found.steps] == ["full"]


def test_one_depth_alone_has_no_value():
    assert value({"full": 2.0}, ks=()) is None
    assert value({"prefix(1)": 3.0, "prefix(2)": 2.0}, ks=(1, 2), unmeasured={"full": "diverged"}) is None


def test_decided_steps_need_no_more_documents():
    found = value(FLAT_AFTER_FOUR)
    assert all(step.word != "undecided" and step.more_documents is None for step in found.steps)


@pytest.mark.parametrize(
    ("gain", "more"),
    [
        (estimate(-0.1, 0.1, 0.3), 300),  # twice the half width is twice the distance to zero: four times as many
        (estimate(-0.3, -0.1, 0.1), 300),
        (estimate(-0.3, 0.02, 0.34), None),  # (0.32 / 0.02)^2 = 256 times
    ],
)
def test_documents_that_would_decide_follow_from_the_width(gain, more):
    assert documents_needed(gain, 0.02, 100) == more


def test_equivalence_of_nothing_needs_the_interval_well_inside_the_margin():
    none, some = (documents_needed(estimate(v - 0.04, v, v + 0.04), 0.02, 100) for v in (0.0, 0.008))
    width = 0.84 * 0.04
    assert none > 100 * (width / 0.02) ** 2 - 100, "just as wide as the margin it would decide almost never"
    assert some > none
    assert documents_needed(estimate(-0.04, 0.0, 0.04), 0.03, 100) < none


def test_what_no_reasonable_sample_decides_says_so():
    assert more_documents_text(None) == "More than 100 times as many documents would be needed to decide."
    assert more_documents_text(1234) == "About 1,234 more documents would decide."
    assert more_documents_text(1) == "About 1 more document would decide."


def bootstrapped(sample, random, replicates):
    """The mean with its percentile intervals, without the audit's own code."""
    means = sample[random.integers(len(sample), size=(replicates, len(sample)))].mean(axis=1)
    low, low90, high90, high = np.quantile(means, (0.025, 0.05, 0.95, 0.975))
    ends = {"low": low, "high": high, "low90": low90, "high90": high90, "plain_low": low, "plain_high": high}
    return Estimate(value=float(sample.mean()), **{name: float(end) for name, end in ends.items()})


def decided(gains, documents, random, samples=300):
    """Share of fresh samples of `documents` in which the step's word is not undecided."""
    drawn = (random.choice(gains, size=documents) for _ in range(samples))
    return sum(step_word(bootstrapped(sample, random, 400), 0.02) != "undecided" for sample in drawn) / samples


@pytest.mark.parametrize(
    ("mean", "spread"),
    [(0.03, 0.2), (0.0, 0.12), (0.006, 0.12), (-0.03, 0.25)],
    ids=["clear of zero", "nothing", "inside the margin", "below zero"],
)
def test_the_predicted_number_of_documents_decides_about_half_the_time(mean, spread):
    documents = 60
    gains = np.random.default_rng(3).normal(size=documents)
    gains = mean + spread * (gains - gains.mean()) / gains.std()
    now = bootstrapped(gains, np.random.default_rng(4), 4000)
    assert step_word(now, 0.02) == "undecided"
    enough = documents + documents_needed(now, 0.02, documents)
    random = np.random.default_rng(5)
    assert decided(gains, enough, random) == pytest.approx(0.5, abs=0.1)
    assert decided(gains, enough // 3, random) < 0.3
    assert decided(gains, 3 * enough, random) > 0.8


def test_the_value_round_trips_as_data():
    found = value(EXTENDED, extend=(12,), affine={**dict.fromkeys(EXTENDED, 0.1)})
    assert from_dict(DepthValue, encode_json(found)) == found


@pytest.mark.parametrize("noise", [0.001, 0.05, 0.5])
def test_forbidden_words_never_appear(noise):
    found = value(EXTENDED, extend=(10, 12, 16), noise=noise)
    assert not [word for word in ("useless", "reasoning", "share") if word in found.sentence]
