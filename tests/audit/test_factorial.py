"""The count by index square: effects, sums, orders, and why there is none."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from looplab.audit.bootstrap import ScheduleSums, bootstrap_losses
from looplab.audit.config import AuditConfig
from looplab.audit.decompose import decompositions, identify
from looplab.audit.factorial import factorials
from looplab.audit.schedules import FullPlan, default_schedules, schedule_map
from looplab.intervals import document_draws
from looplab.recurrence.plan import Blocks, ModelLoop, Sequential, TwoLevel
from looplab.recurrence.spec import own_function, same_function

CONFIG = AuditConfig(replicates=1000)
DOCUMENTS = 30
TOKENS = np.random.default_rng(0).integers(20, 200, size=DOCUMENTS).astype(float)
LEVELS = {
    "full": 2.0,
    "prefix(1)": 3.0,
    "prefix(4)": 2.5,
    "repeat(1)": 2.62,
    "repeat(4)": 2.55,
    "same(4)": 2.6,
    "cyclic(8)": 2.53,
    "repeat_first(8)": 2.56,
}


def rows(order=None, blocks=2, classes=own_function, **options):
    order = order or Blocks(num_steps=(4, 4))
    full = FullPlan.of(order.plan(order.default_steps, blocks), classes)
    return schedule_map(full, default_schedules(full, **options))


def losses(levels=LEVELS, probes=None, noise=0.1):
    """Ragged documents around the levels, which are met exactly; `probes` subtracts nats per token."""
    tables = {}
    for i, (name, level) in enumerate(levels.items()):
        own = np.random.default_rng([7, i]).normal(size=DOCUMENTS) * noise
        own -= (own * TOKENS).sum() / TOKENS.sum()
        raw = TOKENS * (level + own)
        fixed = {probe: raw - nats[name] * TOKENS for probe, nats in (probes or {}).items()}
        tables[name] = ScheduleSums(raw=raw, fixed=fixed)
    draws = document_draws(DOCUMENTS, CONFIG.replicates, seed=0, domain="math", split="evaluation")
    return bootstrap_losses(tables, draws, tokens=TOKENS)


def square(found=None, table=None, *, units=8, kmid=4, unmeasured=None, config=CONFIG, **more):
    table = rows() if table is None else table
    return factorials(
        losses() if found is None else found,
        table,
        units=units,
        kmid=kmid,
        reasons=identify(table, units=units, kmid=kmid),
        unmeasured=unmeasured or {},
        config=config,
        **more,
    )


def values(found):
    return {effect.name: effect.nats.value for effect in found.effects}


def test_the_effects_are_those_written_out():
    (raw,), reason = square()
    assert reason is None
    assert {name: cell.value for name, cell in raw.cells.items()} == pytest.approx(
        {"same(4)": 2.6, "prefix(4)": 2.5, "same(8)": 2.62, "repeat(4)": 2.55}
    )
    assert values(raw) == pytest.approx(
        {
            "index effect at 4": 0.10,
            "index effect at 8": 0.07,
            "count effect at one index": -0.02,
            "count effect at 4 indices": -0.05,
            "interaction": 0.03,
            "Shapley value of the count": -0.035,
            "Shapley value of the index": 0.085,
            "extra units at the start": 0.01,
            "extra units in a cycle": -0.02,
        }
    )


def test_the_formulas_name_the_schedules():
    (raw,), _ = square()
    assert {effect.name: effect.formula for effect in raw.effects} == {
        "index effect at 4": "same(4) - prefix(4)",
        "index effect at 8": "same(8) - repeat(4)",
        "count effect at one index": "same(4) - same(8)",
        "count effect at 4 indices": "prefix(4) - repeat(4)",
        "interaction": "(same(4) - prefix(4)) - (same(8) - repeat(4))",
        "Shapley value of the count": "mean of same(4) - same(8) and prefix(4) - repeat(4)",
        "Shapley value of the index": "mean of same(4) - prefix(4) and same(8) - repeat(4)",
        "extra units at the start": "repeat_first(8) - repeat(4)",
        "extra units in a cycle": "cyclic(8) - repeat(4)",
    }


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(0.5, 5.0), min_size=8, max_size=8))
def test_sums_are_exact_whatever_the_losses(levels):
    (raw,), _ = square(losses(dict(zip(LEVELS, levels, strict=True))))
    q00, q01, q10, q11 = (cell.value for cell in raw.cells.values())
    found = values(raw)
    assert abs(found["Shapley value of the count"] + found["Shapley value of the index"] - (q00 - q11)) < 1e-12
    assert abs(found["interaction"] - (found["index effect at 4"] - found["index effect at 8"])) < 1e-12
    # Shapley by enumeration: both orders of two factors on the corners (count, indices).
    corner = {(0, 0): q00, (0, 1): q01, (1, 0): q10, (1, 1): q11}
    credit = {0: 0.0, 1: 0.0}
    for order in itertools.permutations((0, 1)):
        at = [0, 0]
        for factor in order:
            before = corner[tuple(at)]
            at[factor] = 1
            credit[factor] += (before - corner[tuple(at)]) / 2
    assert found["Shapley value of the count"] == pytest.approx(credit[0], abs=1e-12)
    assert found["Shapley value of the index"] == pytest.approx(credit[1], abs=1e-12)
    gap = levels[1] - levels[0]
    for order in raw.orders:
        assert list(order.terms) == ["application", "distinct", "composition"]
        assert abs(sum(term.value for term in order.terms.values()) - gap) < 1e-12


def test_count_first_is_the_decomposition_and_index_first_is_written_out():
    (raw,), _ = square()
    assert [order.name for order in raw.orders] == ["count first", "index first"]
    (split,) = decompositions(losses(), units=8, kmid=4, reasons={}, unmeasured={}, config=CONFIG)
    assert raw.orders[0].terms == {part.name: part.nats for part in split.parts}
    assert {term: e.value for term, e in raw.orders[1].terms.items()} == pytest.approx(
        {"application": (3.0 - 2.6) + (2.5 - 2.55), "distinct": 0.1, "composition": 0.55}
    )


def test_intervals_are_those_of_the_linear_form_in_shared_draws():
    found = losses()
    (raw,), _ = square(found)
    interaction = next(effect for effect in raw.effects if effect.name == "interaction").nats
    q = {name: found.replicates["raw", name] for name in LEVELS}
    form = (q["same(4)"] - q["prefix(4)"]) - (q["repeat(1)"] - q["repeat(4)"])
    assert (interaction.plain_low, interaction.plain_high) == pytest.approx(tuple(np.quantile(form, [0.025, 0.975])))


def test_every_readout_has_its_square():
    gains = {name: 0.01 * i for i, name in enumerate(LEVELS)}
    found, _ = square(losses(probes={"affine": gains, "full_rank": gains}))
    assert [each.probe for each in found] == ["raw", "affine", "full_rank"]
    assert found[1].cells["same(4)"].value == pytest.approx(2.6 - 0.05)
    assert values(found[1])["index effect at 4"] == pytest.approx(0.10 - (0.05 - 0.02))


def test_equivalence_uses_the_margin_of_the_decomposition():
    (raw,), _ = square(losses(noise=0.002))
    verdicts = {effect.name: effect.equivalent for effect in raw.effects}
    assert verdicts["extra units at the start"] is True
    assert verdicts["index effect at 4"] is False
    (tight,), _ = square(losses(noise=0.002), config=dataclasses.replace(CONFIG, margin_nats=0.005))
    assert not any(effect.equivalent for effect in tight.effects)
    (small,), _ = square(losses({**LEVELS, "prefix(1)": 2.005}))
    assert {effect.equivalent for effect in small.effects} == {None}, "no margin without a measurable gap"


def test_an_inert_index_is_bitwise_zero():
    tables = losses().tables
    draws = document_draws(DOCUMENTS, CONFIG.replicates, seed=0, domain="math", split="evaluation")

    def bitwise(**equal):
        changed = {**tables, **{f"{family}(4)": tables[twin] for family, twin in equal.items()}}
        (raw,), _ = square(bootstrap_losses(changed, draws, tokens=TOKENS))
        return {effect.name for effect in raw.effects if effect.bitwise_equal}

    both = {"index effect at 4", "index effect at 8", "interaction", "Shapley value of the index"}
    assert bitwise(prefix="same(4)", repeat="repeat(1)") == both
    assert bitwise(prefix="same(4)") == {"index effect at 4"}, "one of two zero steps makes no zero effect"


@pytest.mark.parametrize(
    ("table", "units", "kmid", "reason"),
    [
        (rows(classes=same_function), 8, 4, "the block has no iteration index"),
        (rows(classes=same_function, controls=()), 8, 4, "the block has no iteration index"),
        (rows(ModelLoop(num_steps=8), 1), 8, 8, "only one kind of unit"),
        (rows(TwoLevel(h=3, l=2)), 3, 3, "only one kind of unit"),
        (rows(Sequential(), 6), 6, 1, "the first block runs once"),
    ],
    ids=["index-free", "index-free without the cells", "one core", "two levels", "dense"],
)
def test_a_model_without_the_square_gets_a_reason_and_no_number(table, units, kmid, reason):
    assert square(table=table, units=units, kmid=kmid) == ((), f"not identifiable: {reason}")


def test_cells_that_were_not_run_or_diverged_are_not_measured():
    assert square(table=rows(controls=())) == ((), "not measured: same(4) was not run")
    diverged = {"prefix(4)": "diverged at application 3"}
    assert square(unmeasured=diverged) == ((), "not measured: prefix(4) diverged at application 3")


def test_a_diverged_start_leaves_the_square_without_orders():
    levels = {name: level for name, level in LEVELS.items() if name not in ("prefix(1)", "cyclic(8)")}
    unmeasured = {name: "diverged at application 0" for name in ("prefix(1)", "cyclic(8)")}
    (raw,), reason = square(losses(levels), unmeasured=unmeasured)
    assert (raw.orders, reason) == ((), None)
    assert "extra units in a cycle" not in values(raw)
    assert "extra units at the start" in values(raw)
