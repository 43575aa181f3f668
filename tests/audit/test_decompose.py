import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from looplab.audit.bootstrap import DocumentSums, ScheduleSums, TemperatureReplicates, TemperatureSums, bootstrap_losses
from looplab.audit.config import AuditConfig
from looplab.audit.decompose import (
    combine,
    contrasts,
    decompositions,
    equivalence_margin,
    gap_findings,
    identify,
    probe_gains,
)
from looplab.audit.result import ScheduleEntry
from looplab.audit.schedules import FullPlan, default_schedules, schedule_map
from looplab.intervals import document_draws
from looplab.records import dump_json
from looplab.recurrence.plan import ModelLoop
from looplab.recurrence.spec import same_function

CONFIG = AuditConfig(replicates=2000)
DOCUMENTS = 40
TOKENS = np.random.default_rng(0).integers(20, 200, size=DOCUMENTS).astype(float)
LEVELS = {"prefix(1)": 3.0, "repeat(1)": 2.65, "repeat(4)": 2.64, "full": 2.0, "prefix(4)": 2.6, "suffix(1)": 2.9}


def table(level, *, affine=None, seed=0, noise=0.1):
    """Sums of one schedule: a mean loss per token, documents that share their difficulty."""
    difficulty = np.random.default_rng(5).normal(size=DOCUMENTS) * 0.3
    own = np.random.default_rng([seed, int(level * 1000)]).normal(size=DOCUMENTS) * noise
    own -= (own * TOKENS).sum() / TOKENS.sum()
    raw = TOKENS * (level + difficulty - (difficulty * TOKENS).sum() / TOKENS.sum() + own)
    return ScheduleSums(raw=raw, fixed={} if affine is None else {"affine": raw - affine * TOKENS})


def losses(levels=LEVELS, affine=None, **options):
    tables = {name: table(level, affine=(affine or {}).get(name), **options) for name, level in levels.items()}
    draws = document_draws(DOCUMENTS, CONFIG.replicates, seed=0, domain="math", split="evaluation")
    return bootstrap_losses(tables, draws, tokens=TOKENS, num_bytes=int(TOKENS.sum() * 4))


def row(name, word, *, reason=None, family=None, k=None):
    inside = name.partition("(")[2].rstrip(")")
    return ScheduleEntry(
        name=name,
        family=family or name.partition("(")[0],
        k=k if k is not None else int(inside) if inside.isdecimal() else None,
        plan="[]",
        word=word,
        applications=1,
        units=1,
        distinct=1,
        same_as=None,
        reason=reason,
    )


def split(found=None, *, units=8, kmid=4, reasons=None, unmeasured=None, config=CONFIG):
    return decompositions(
        losses() if found is None else found,
        units=units,
        kmid=kmid,
        reasons=reasons or {},
        unmeasured=unmeasured or {},
        config=config,
    )


def test_the_parts_add_up_to_the_gap():
    (raw,) = split()
    assert abs(sum(part.nats.value for part in raw.parts) - raw.gap.value) < 1e-12
    assert abs(sum(part.share.value for part in raw.parts) - 1) < 1e-12
    assert [part.name for part in raw.parts] == ["application", "distinct", "composition"]
    assert raw.gap.value == pytest.approx(1.0)
    assert raw.part("application").nats.value == pytest.approx(0.35)


@given(st.lists(st.floats(0.5, 5.0), min_size=4, max_size=4))
def test_the_parts_add_up_whatever_the_losses(values):
    names = ("prefix(1)", "repeat(1)", "repeat(4)", "full")
    (raw,) = split(losses(dict(zip(names, values, strict=True))))
    assert abs(sum(part.nats.value for part in raw.parts) - raw.gap.value) < 1e-12


def test_every_probe_has_its_own_decomposition():
    gains = {"prefix(1)": 0.5, "repeat(1)": 0.3, "repeat(4)": 0.3, "full": 0.1, "prefix(4)": 0.2, "suffix(1)": 0.4}
    raw, affine = split(losses(affine=gains))
    assert (raw.probe, affine.probe) == ("raw", "affine")
    assert affine.gap.value == pytest.approx(raw.gap.value - 0.4)
    assert affine.part("application").nats.value == pytest.approx(0.35 - 0.2)


def test_shares_are_ratios_inside_each_replicate():
    found = losses()
    (raw,) = split(found)
    rows = {name: found.replicates["raw", name] for name in LEVELS}
    ratio = (rows["prefix(1)"] - rows["repeat(1)"]) / (rows["prefix(1)"] - rows["full"])
    share = raw.part("application").share
    assert (share.plain_low, share.plain_high) == pytest.approx(tuple(np.quantile(ratio, [0.025, 0.975])))
    assert share.low < share.plain_low


def test_words_follow_the_numbers():
    words = {part.name: part.word for part in split()[0].parts}
    assert words["application"] == "substantial"
    assert words["composition"] == "dominant"


def test_a_small_effect_is_negligible_only_inside_the_margin():
    tight = losses({**LEVELS, "repeat(4)": 2.645}, noise=0.01)
    part = split(tight)[0].part("distinct")
    assert part.equivalent
    assert part.word.startswith("negligible (equivalent to zero within 0.020 nats)")
    loose = split()[0].part("distinct")
    assert abs(loose.nats.value) < 0.02 < loose.nats.high90
    assert not loose.equivalent, "a small value with a wide interval is no evidence of zero"
    strict = dataclasses.replace(CONFIG, margin_nats=0.004)
    assert not split(tight, config=strict)[0].part("distinct").equivalent


def test_the_margin_is_the_smaller_of_nats_and_share():
    assert split()[0].margin == pytest.approx(0.02)
    small = losses({**LEVELS, "prefix(1)": 2.2})
    assert split(small)[0].margin == pytest.approx(0.05 * 0.2)


def test_shares_are_withheld_where_the_gap_is_small():
    small = split(losses({**LEVELS, "prefix(1)": 2.02}))
    assert not small[0].gap_measurable
    assert all(part.share is None and part.nats is not None for part in small[0].parts)
    assert {part.word for part in small[0].parts} == {"inconclusive"}
    (finding,) = gap_findings(small, "math", CONFIG)
    assert finding.kind == "audit.gap_too_small"
    assert finding.threshold == 0.01
    assert gap_findings(split(), "math", CONFIG) == ()


def test_the_gap_floor_is_read_at_its_lower_bound():
    gap = split()[0].gap
    above = dataclasses.replace(CONFIG, gap_floor=gap.low * 0.999)
    below = dataclasses.replace(CONFIG, gap_floor=gap.low * 1.001)
    assert split(config=above)[0].gap_measurable
    assert not split(config=below)[0].gap_measurable


def test_one_index_free_core_gets_three_reasons_and_no_number():
    words = {"full": "0000", "prefix(1)": "0"}
    rows = [
        row("full", "0000"),
        row("prefix(1)", "0"),
        row("repeat(1)", "0000", reason="the block has no iteration index"),
    ]
    reasons = identify(rows, units=4, kmid=4)
    found = losses({name: LEVELS[name] for name in words})
    (raw,) = split(found, units=4, kmid=4, reasons=reasons)
    assert [part.word for part in raw.parts] == [
        "not identifiable (takes the whole gap by construction)",
        "not identifiable (the block has no iteration index)",
        "not identifiable (only one kind of unit)",
    ]
    assert all(part.nats is None and part.share is None and part.equivalent is None for part in raw.parts)


def test_two_identifiable_parts_keep_their_numbers():
    (raw,) = split(reasons={("repeat(1)", "repeat(4)"): "the block has no iteration index"})
    assert raw.part("distinct").nats is None
    assert raw.part("application").share is not None
    assert raw.part("composition").share is not None


def test_a_first_block_that_runs_once_has_no_distinct_part():
    rows = [row("full", "0123"), row("prefix(1)", "0"), row("repeat(1)", "0000")]
    reasons = identify(rows, units=4, kmid=1)
    (raw,) = split(losses({n: LEVELS[n] for n in ("full", "prefix(1)", "repeat(1)")}), units=4, kmid=1, reasons=reasons)
    assert raw.part("distinct").word == "not identifiable (the first block runs once)"
    assert raw.part("composition").plus == "repeat(1)"


def test_one_kind_of_unit_has_no_composition():
    rows = [row("full", "0123"), row("prefix(1)", "0"), row("repeat(1)", "0000")]
    reasons = identify(rows, units=4, kmid=4)
    (raw,) = split(losses({n: LEVELS[n] for n in ("full", "prefix(1)", "repeat(1)")}), units=4, kmid=4, reasons=reasons)
    assert raw.part("composition").word == "not identifiable (only one kind of unit)"
    assert raw.part("distinct").minus == "full"
    assert raw.part("distinct").share is not None


def test_a_diverged_schedule_leaves_its_parts_unmeasured():
    levels = {name: level for name, level in LEVELS.items() if name != "repeat(4)"}
    (raw,) = split(losses(levels), unmeasured={"repeat(4)": "diverged at application 5"})
    assert raw.part("distinct").word == "not measured (diverged at application 5)"
    assert raw.part("composition").reason == "not measured: diverged at application 5"
    assert raw.part("application").share is not None
    assert split(losses(levels), unmeasured={"prefix(1)": "diverged at application 1"}) == ()


def test_equal_words_are_found_in_both_directions_with_their_reason():
    rows = [
        row("full", "0011"),
        row("repeat(1)", "0000"),
        row("repeat(2)", "0000", reason="the block has no iteration index"),
        row("pass_major", "0011", reason="same plan as full"),
        row("[0.0]", "0", reason="readout component not written", family="explicit"),
    ]
    reasons = identify(rows, units=4, kmid=2)
    assert reasons["repeat(1)", "repeat(2)"] == reasons["repeat(2)", "repeat(1)"] == "the block has no iteration index"
    assert reasons["pass_major", "full"] == "same plan as full"
    assert reasons["[0.0]", "full"] == "readout component not written"
    assert ("repeat(1)", "full") not in reasons
    assert ("full", "full") not in reasons


def rows_of(*names, **words):
    return [row(name, words.get(name, name)) for name in names]


def contrast_table(found, rows, **options):
    options = {"reasons": {}, "unmeasured": {}, "config": CONFIG, **options}
    return {(c.name, c.probe): c for c in contrasts(found, rows, **options)}


def test_every_schedule_meets_full_and_prefix_meets_repeat_and_suffix():
    found = contrast_table(losses(), rows_of("full", *(n for n in LEVELS if n != "full")))
    assert {(c.family, c.k) for c in found.values()} == {
        ("prefix-full", 1),
        ("prefix-full", 4),
        ("prefix-repeat", 1),
        ("prefix-repeat", 4),
        ("prefix-suffix", 1),
        ("repeat-full", 1),
        ("repeat-full", 4),
        ("suffix-full", 1),
    }
    effect = found["prefix(4) - repeat(4)", "raw"].effect
    assert effect.value == pytest.approx(-0.04)


def test_contrasts_without_information_have_a_reason_instead_of_a_number():
    rows = rows_of("full", *(n for n in LEVELS if n != "full"))
    found = contrast_table(losses(), rows, reasons={("repeat(4)", "full"): "same plan as full"})
    bare = found["repeat(4) - full", "raw"]
    assert bare.reason == "not identifiable: same plan as full"
    assert (bare.effect, bare.equivalent, bare.spread) == (None, None, None)
    found = contrast_table(
        losses({n: v for n, v in LEVELS.items() if n != "suffix(1)"}),
        rows,
        unmeasured={"suffix(1)": "diverged at application 2"},
    )
    assert found["prefix(1) - suffix(1)", "raw"].reason == "not measured: diverged at application 2"


def test_permutes_are_reported_as_mean_with_spread():
    levels = {**LEVELS, "permute(0)": 2.1, "permute(1)": 2.3}
    found = contrast_table(losses(levels), rows_of(*levels))
    both = found["permute - full", "raw"]
    assert both.effect.value == pytest.approx(0.2)
    assert both.spread == pytest.approx((0.1, 0.3))
    assert not any(name.startswith("permute(") for name, _ in found)


def test_a_permute_that_is_full_keeps_its_reason():
    rows = [*rows_of("full", "prefix(1)"), row("permute(0)", "full", reason="the block has no iteration index")]
    found = contrast_table(losses(), rows, reasons={("permute(0)", "full"): "the block has no iteration index"})
    assert found["permute(0) - full", "raw"].reason == "not identifiable: the block has no iteration index"


def test_orders_and_explicit_plans_have_their_families():
    levels = {**LEVELS, "pass_major": 2.2, "[0.0 0.1]": 2.4}
    rows = [*rows_of("full", "pass_major"), row("[0.0 0.1]", "x", family="explicit")]
    found = contrast_table(losses(levels), rows)
    assert {c.family for c in found.values()} == {"order-full", "explicit-full"}


def test_coarser_grids_extensions_and_inner_runs_have_their_contrasts():
    levels = {
        **LEVELS,
        "regrid(1)": 2.8,
        "same(4)": 2.7,
        "extend_last(12)": 2.1,
        "extend_cycle(12)": 2.3,
        "inner(prefix(1))": 2.5,
    }
    found = contrast_table(losses(levels), rows_of("full", *(n for n in levels if n != "full")))
    families = {c.name: (c.family, c.k) for c in found.values()}
    assert families["prefix(1) - regrid(1)"] == ("prefix-regrid", 1)
    assert families["regrid(1) - full"] == ("regrid-full", 1)
    assert families["prefix(4) - same(4)"] == ("prefix-same", 4)
    assert families["extend_last(12) - full"] == families["extend_cycle(12) - full"] == ("extend-full", 12)
    assert families["inner(prefix(1)) - full"][0] == "inner-full"
    assert found["prefix(1) - regrid(1)", "raw"].effect.value == pytest.approx(0.2)
    assert found["extend_last(12) - full", "raw"].effect.value == pytest.approx(0.1)


def test_a_contrast_of_a_row_that_is_struck_out_has_its_reason():
    # One core without an index: repeat(1) is full, so prefix(1) - repeat(1) would be the depth curve again.
    anatomy = FullPlan.of(ModelLoop(num_steps=4).plan(4, 1), same_function)
    table = schedule_map(anatomy, default_schedules(anatomy, extend=(6,)))
    levels = {"full": 2.0, "prefix(1)": 3.0, "prefix(2)": 2.6, "prefix(3)": 2.3, "extend_last(6)": 2.1}
    found = contrast_table(losses(levels), table, reasons=identify(table, units=4, kmid=4))
    assert {name for (name, _), contrast in found.items() if contrast.effect is not None} == {
        "prefix(1) - full",
        "prefix(2) - full",
        "prefix(3) - full",
        "extend_last(6) - full",
    }
    reasons = {name: contrast.reason for (name, _), contrast in found.items() if contrast.effect is None}
    inert = "not identifiable: the block has no iteration index"
    assert reasons["prefix(1) - repeat(1)"] == reasons["repeat(1) - full"] == inert
    assert reasons["prefix(1) - suffix(1)"] == inert
    assert reasons["layer_major - full"] == "not identifiable: model offers no layer view"
    assert reasons["extend_cycle(6) - full"] == inert


def test_the_margin_needs_a_measurable_gap():
    assert equivalence_margin(losses(), "raw", CONFIG) == pytest.approx(0.02)
    assert equivalence_margin(losses({**LEVELS, "prefix(1)": 2.02}), "raw", CONFIG) is None
    bare = {name: level for name, level in LEVELS.items() if name != "prefix(1)"}
    assert equivalence_margin(losses(bare), "raw", CONFIG) is None


def test_losses_that_cancel_leave_a_linear_form():
    q = {name: {("raw", name): 1.0} for name in "abc"}
    form = combine((1.0, combine((1.0, q["a"]), (-1.0, q["b"]))), (0.5, combine((2.0, q["b"]), (-1.0, q["c"]))))
    assert form == {("raw", "a"): 1.0, ("raw", "c"): -0.5}


def test_equal_sums_are_bitwise_equal():
    same = losses({**LEVELS, "repeat(4)": 2.65})
    (raw,) = split(same)
    assert raw.part("distinct").bitwise_equal
    assert raw.part("distinct").nats.value == 0.0
    assert raw.part("distinct").nats.high == 0.0
    assert not raw.part("application").bitwise_equal


AFFINE = {"prefix(1)": 0.5, "repeat(1)": 0.3, "repeat(4)": 0.3, "full": 0.1, "prefix(4)": 0.2, "suffix(1)": 0.4}


def gains_of(found, grid=(1, 4, 8), reasons=None):
    return probe_gains(found, grid=grid, units=8, reasons=reasons or {}, config=CONFIG)


def test_gains_are_net_of_full_depth():
    first, fourth = gains_of(losses(affine=AFFINE))
    assert (first.k, fourth.k) == (1, 4)
    assert first.gross.value == pytest.approx(0.5)
    assert first.gross_full.value == pytest.approx(0.1)
    assert first.net.value == pytest.approx(0.4)
    assert first.share.value == pytest.approx(0.4 / 1.0)
    assert fourth.share.value == pytest.approx(0.1 / 0.6)
    assert first.word == "present"


def test_the_net_gain_at_one_is_the_raw_gap_minus_the_probed_gap():
    found = losses(affine=AFFINE)
    raw, affine = split(found)
    assert gains_of(found)[0].net.value == pytest.approx(raw.gap.value - affine.gap.value, abs=1e-12)


def test_gains_of_a_small_gap_have_no_share():
    small = losses({**LEVELS, "prefix(1)": 2.02}, affine=AFFINE)
    assert gains_of(small)[0].share is None
    assert gains_of(small)[0].word == "inconclusive (gap too small)"


def test_gains_skip_what_equals_full():
    assert [g.k for g in gains_of(losses(affine=AFFINE), reasons={("prefix(4)", "full"): "same plan as full"})] == [1]


def at_temperature(level, loss, status="converged"):
    """A table whose temperature has no spread: the loss at the fit in every replicate."""
    sums = DocumentSums(loss=loss * TOKENS, first=0 * TOKENS, second=TOKENS, third=0 * TOKENS, tokens=TOKENS)
    refits = TemperatureReplicates(
        beta=0.0 if status == "uniform" else 1.0,
        status=status,
        betas=np.full(CONFIG.replicates, 0.0 if status == "uniform" else 1.0),
        exact=np.empty(0, dtype=np.int64),
        difference=0.0,
    )
    temperature = TemperatureSums(at_fit=sums, exact=np.empty((DOCUMENTS, 0)), replicates=refits)
    return dataclasses.replace(table(level), temperature=temperature)


@pytest.mark.parametrize("status", ["uniform", "converged"])
def test_a_gain_by_an_infinite_temperature_is_marked(status):
    tables = {"full": at_temperature(2.0, 1.9), "prefix(1)": at_temperature(3.0, 2.5, status)}
    draws = document_draws(DOCUMENTS, CONFIG.replicates, seed=0, domain="math", split="evaluation")
    (gain,) = gains_of(bootstrap_losses(tables, draws, tokens=TOKENS))
    assert gain.flattening == (status == "uniform")
    assert gain.probe == "temperature"
    assert gain.share.value == pytest.approx((0.5 - 0.1) / 1.0)


def test_the_spread_over_noise_seeds_is_that_of_the_share():
    tables = {name: table(level) for name, level in LEVELS.items()}
    values = {"prefix(1)": (3.0, 3.1), "repeat(1)": (2.6, 2.7), "repeat(4)": (2.5, 2.5), "full": (2.0, 2.0)}
    tables |= {name: dataclasses.replace(tables[name], seeds={"raw": pair}) for name, pair in values.items()}
    draws = document_draws(DOCUMENTS, CONFIG.replicates, seed=0, domain="math", split="evaluation")
    (raw,) = split(bootstrap_losses(tables, draws, tokens=TOKENS))
    assert raw.part("application").seed_deviation == pytest.approx(np.std([0.4 / 1.0, 0.4 / 1.1], ddof=1))
    assert split()[0].part("application").seed_deviation is None


def test_the_same_input_gives_the_same_text():
    first, second = (
        dump_json([*split(), *contrasts(losses(), rows_of(*LEVELS), reasons={}, unmeasured={}, config=CONFIG)])
        for _ in range(2)
    )
    assert first == second
    assert "NaN" not in first
    assert json.loads(first)[0]["parts"][0]["word"] == "substantial"


def test_a_split_of_the_published_size_gets_its_words():
    # The public checkpoint on math text: 0.996 nats, 35.2 / 0.8 / 64.0 %.
    gap, shares = 0.996, (35.2, 0.8, 64.0)
    falling = 2.0 - gap * np.cumsum([0.0, *shares]) / 100
    (raw,) = split(losses(dict(zip(("prefix(1)", "repeat(1)", "repeat(4)", "full"), falling, strict=True)), noise=0.01))
    assert [round(100 * part.share.value, 1) for part in raw.parts] == list(shares)
    assert [part.word.partition(" (")[0] for part in raw.parts] == ["substantial", "negligible", "dominant"]
