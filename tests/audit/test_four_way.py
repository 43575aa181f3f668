"""Four-way view: every path adds up, mean and range are over the paths, terms merge where parts are not told apart."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from looplab.audit.bootstrap import ScheduleSums, bootstrap_losses
from looplab.audit.config import AuditConfig
from looplab.audit.decompose import decompositions, identify
from looplab.audit.four_way import four_ways
from looplab.audit.schedules import FullPlan, default_schedules, schedule_map
from looplab.intervals import document_draws
from looplab.recurrence.plan import Blocks, ModelLoop
from looplab.recurrence.spec import own_function, same_function

CONFIG = AuditConfig(replicates=1000)
DOCUMENTS = 30
TOKENS = np.random.default_rng(0).integers(20, 200, size=DOCUMENTS).astype(float)
LEVELS = {
    "full": (2.0, 1.9),
    "prefix(1)": (3.0, 2.6),
    "prefix(4)": (2.5, 2.3),
    "repeat(1)": (2.62, 2.4),
    "repeat(4)": (2.55, 2.38),
    "same(4)": (2.6, 2.35),
}
"""Raw and refitted loss."""


def losses(levels=LEVELS, aliases=None):
    tables = {}
    for i, (name, (raw, affine)) in enumerate(levels.items()):
        own = np.random.default_rng([7, i]).normal(size=DOCUMENTS) * 0.1
        own -= (own * TOKENS).sum() / TOKENS.sum()
        tables[name] = ScheduleSums(raw=TOKENS * (raw + own), fixed={"affine": TOKENS * (affine + own)})
    tables |= {alias: tables[name] for alias, name in (aliases or {}).items()}
    draws = document_draws(DOCUMENTS, CONFIG.replicates, seed=0, domain="math", split="evaluation")
    return bootstrap_losses(tables, draws, tokens=TOKENS)


def views(found=None, *, order=None, blocks=2, classes=own_function, unmeasured=None, **options):
    order = order or Blocks(num_steps=(4, 4))
    full = FullPlan.of(order.plan(order.default_steps, blocks), classes)
    table = schedule_map(full, default_schedules(full, **options))
    return four_ways(
        losses() if found is None else found,
        table,
        units=full.M,
        kmid=full.kmid,
        reasons=identify(table, units=full.M, kmid=full.kmid),
        unmeasured=unmeasured or {},
        config=CONFIG,
    )


def numbers(terms):
    return {name: e.value for name, e in terms.items()}


def test_four_paths_are_those_written_out():
    (view,) = views()
    assert view.probe == "affine"
    assert view.whole.value == pytest.approx(3.0 - 1.9)
    assert {path.name: numbers(path.terms) for path in view.paths} == {
        "count first, probe last": pytest.approx(
            {"application": 0.38, "distinct": 0.07, "composition": 0.55, "calibration": 0.1}
        ),
        "count first, probe first": pytest.approx(
            {"application": 0.2, "distinct": 0.02, "composition": 0.48, "calibration": 0.4}
        ),
        "index first, probe last": pytest.approx(
            {"application": 0.35, "distinct": 0.1, "composition": 0.55, "calibration": 0.1}
        ),
        "index first, probe first": pytest.approx(
            {"application": 0.17, "distinct": 0.05, "composition": 0.48, "calibration": 0.4}
        ),
    }
    assert numbers(view.mean) == pytest.approx(
        {"application": 0.275, "distinct": 0.06, "composition": 0.515, "calibration": 0.25}
    )
    assert view.spread["application"] == pytest.approx((0.17, 0.38))
    assert view.spread["calibration"] == pytest.approx((0.1, 0.4))


def test_without_the_square_two_paths_and_the_average_of_the_spec():
    (view,) = views(controls=())
    assert [path.name for path in view.paths] == ["structure first", "probe first"]
    raw, refitted = decompositions(losses(), units=8, kmid=4, reasons={}, unmeasured={}, config=CONFIG)
    for part in ("application", "distinct", "composition"):
        both = (raw.part(part).nats.value + refitted.part(part).nats.value) / 2
        assert view.mean[part].value == pytest.approx(both, abs=1e-12)
    assert view.mean["calibration"].value == pytest.approx((0.4 + 0.1) / 2)


LOSS = st.floats(0.5, 5.0)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(LOSS, LOSS), min_size=6, max_size=6), st.booleans())
def test_every_path_and_the_mean_add_up_to_the_whole(levels, square):
    found = losses(dict(zip(LEVELS, levels, strict=True)))
    (view,) = views(found, controls=("factorial",) if square else ())
    assert len(view.paths) == (4 if square else 2)
    for terms in (*(path.terms for path in view.paths), view.mean):
        assert abs(sum(numbers(terms).values()) - view.whole.value) < 1e-12
    for term, (low, high) in view.spread.items():
        points = [path.terms[term].value for path in view.paths]
        assert (low, high) == (min(points), max(points))


def test_intervals_of_the_mean_are_those_of_its_linear_form():
    found = losses()
    (view,) = views(found)
    q = found.replicates
    start = q["raw", "prefix(1)"] - q["affine", "prefix(1)"]
    end = q["raw", "full"] - q["affine", "full"]
    expected = np.quantile((start + end) / 2, [0.025, 0.975])
    assert (view.mean["calibration"].plain_low, view.mean["calibration"].plain_high) == pytest.approx(tuple(expected))


def test_a_part_that_is_zero_by_its_words_is_left_out():
    levels = {name: LEVELS[name] for name in ("full", "prefix(1)", "prefix(4)", "repeat(1)")}
    (view,) = views(losses(levels, {"repeat(4)": "repeat(1)"}), classes=same_function)
    assert [path.name for path in view.paths] == ["structure first", "probe first"]
    assert set(view.mean) == set(view.spread) == {"application", "composition", "calibration"}
    for path in view.paths:
        assert abs(sum(numbers(path.terms).values()) - view.whole.value) < 1e-12


def test_one_core_with_an_index_has_no_composition():
    levels = {"full": (2.0, 1.9), "prefix(1)": (3.0, 2.6), "repeat(1)": (2.62, 2.4)}
    (view,) = views(losses(levels), order=ModelLoop(num_steps=8), blocks=1)
    assert list(view.mean) == ["application", "distinct", "calibration"]
    assert abs(sum(numbers(view.mean).values()) - view.whole.value) < 1e-12


def test_one_core_without_an_index_has_one_structural_term():
    levels = {"full": (2.0, 1.9), "prefix(1)": (3.0, 2.6)}
    found = losses(levels, {"repeat(1)": "full"})
    (view,) = views(found, order=ModelLoop(num_steps=8), blocks=1, classes=same_function)
    assert {path.name: numbers(path.terms) for path in view.paths} == {
        "structure first": pytest.approx({"structure": 1.0, "calibration": 0.1}),
        "probe first": pytest.approx({"structure": 0.7, "calibration": 0.4}),
    }


def test_a_part_that_was_not_measured_merges_the_structure():
    levels = {name: level for name, level in LEVELS.items() if name != "repeat(4)"}
    (view,) = views(losses(levels), unmeasured={"repeat(4)": "diverged at application 5"})
    assert list(view.mean) == ["structure", "calibration"]
    assert view.mean["structure"].value == pytest.approx((1.0 + 0.7) / 2)


def test_without_both_ends_there_is_no_view():
    levels = {name: level for name, level in LEVELS.items() if name != "prefix(1)"}
    assert views(losses(levels), unmeasured={"prefix(1)": "diverged at application 0"}) == ()


def test_the_raw_readout_alone_has_no_view():
    tables = {name: ScheduleSums(raw=TOKENS * raw) for name, (raw, _) in LEVELS.items()}
    draws = document_draws(DOCUMENTS, CONFIG.replicates, seed=0, domain="math", split="evaluation")
    assert views(bootstrap_losses(tables, draws, tokens=TOKENS)) == ()
