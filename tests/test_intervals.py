import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from looplab.intervals import (
    Draws,
    auroc,
    brier,
    document_draws,
    equivalence,
    expanded_tail,
    expected_calibration_error,
    holm,
    mcnemar_exact,
    mean_interval,
    paired_difference,
    percentile_interval,
    wilson,
)
from reference.temperature import calibration_error


def draws(documents=20, replicates=500, *, seed=0, domain="text", split="evaluation"):
    return document_draws(documents, replicates, seed=seed, domain=domain, split=split)


def test_draws_repeat_and_depend_on_seed_domain_and_split():
    same = draws().counts
    np.testing.assert_array_equal(same, draws().counts)
    for other in (draws(seed=1), draws(domain="math"), draws(split="calibration")):
        assert (other.counts != same).any()


def test_every_replicate_draws_as_many_documents_as_there_are():
    assert (draws().counts.sum(axis=1, dtype=np.int64) == 20).all()


def test_draws_have_the_mean_and_variance_of_resampling_with_replacement():
    counts = draws(10, 20_000).counts.astype(float)
    assert abs(counts.mean() - 1) < 1e-12
    assert abs(counts[:, 3].var() - 0.9) < 0.03


def test_sums_in_row_chunks_equal_the_whole_product():
    w = draws(7, 5000)
    values = np.random.default_rng(0).normal(size=(7, 3))
    np.testing.assert_allclose(w.sums(values), w.counts.astype(float) @ values, rtol=1e-13)


def test_leading_replicates_are_the_same_rows():
    np.testing.assert_array_equal(draws().first(10).counts, draws().counts[:10])


def test_recorded_indices_become_counts():
    assert Draws.from_indices(np.array([[0, 0, 2], [1, 2, 2]]), 3).counts.tolist() == [[2, 0, 1], [0, 1, 2]]


def test_a_single_document_cannot_be_resampled():
    with pytest.raises(ValueError, match="num_documents must be from 2"):
        draws(1)


def test_no_replicates_are_refused():
    with pytest.raises(ValueError, match="replicates must be at least 1"):
        draws(5, 0)


def test_the_expanded_tail_is_wider_for_fewer_documents_and_plain_in_the_limit():
    tails = [expanded_tail(n, 0.95) for n in (5, 20, 200, 10**6)]
    assert tails == sorted(tails)
    assert abs(tails[-1] - 0.025) < 1e-6
    assert abs(tails[1] - stats.norm.cdf(math.sqrt(20 / 19) * stats.t.ppf(0.025, 19))) < 1e-15


@pytest.mark.parametrize(("units", "level"), [(1, 0.95), (20, 1.0)])
def test_impossible_intervals_are_refused(units, level):
    with pytest.raises(ValueError, match="expanded_tail"):
        expanded_tail(units, level)


def test_percentile_interval_holds_both_forms():
    rows = np.linspace(0, 1, 1001)
    interval = percentile_interval(0.5, rows, units=20)
    assert (interval.plain_low, interval.plain_high) == pytest.approx((0.025, 0.975))
    assert interval.low == pytest.approx(expanded_tail(20, 0.95))
    assert interval.low < interval.plain_low
    assert interval.excludes_zero()
    assert not percentile_interval(0.0, rows - 0.5, units=20).excludes_zero()


def test_a_ratio_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="must be finite"):
        percentile_interval(0.0, np.array([1.0, np.inf]), units=5)


def test_equivalence_needs_the_whole_interval_inside_the_margin():
    rows = np.linspace(-0.01, 0.015, 1001)
    # Ends of the 90 % interval: -0.00875 and 0.01375; the 95 % one would reach 0.014375.
    assert equivalence(rows, margin=0.014, units=10**6).equivalent
    assert not equivalence(rows, margin=0.0137, units=10**6).equivalent
    assert not equivalence(-rows, margin=0.0137, units=10**6).equivalent
    with pytest.raises(ValueError, match="margin must be above 0"):
        equivalence(rows, margin=0.0, units=50)


def test_a_mean_has_the_interval_of_the_t_test():
    values = np.array([0.1, 0.4, 0.35, 0.8, 0.2])
    for level in (0.9, 0.95):
        found, wanted = mean_interval(values, level=level), stats.ttest_1samp(values, 0).confidence_interval(level)
        assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high))
        assert found.estimate == pytest.approx(0.37)
        assert found.low < found.plain_low < found.estimate < found.plain_high < found.high
    with pytest.raises(ValueError, match="mean_interval: values must be of 2 items at least. Got 1"):
        mean_interval(values[:1])


def test_wilson_matches_the_published_example_and_keeps_its_ends():
    assert (wilson(81, 263).low, wilson(81, 263).high) == pytest.approx((0.2553, 0.3662), abs=5e-5)  # Newcombe 1998
    assert wilson(0, 10).low == 0.0
    assert wilson(10, 10).high == 1.0
    with pytest.raises(ValueError, match="successes"):
        wilson(3, 2)


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 0), (5, 1), (3, 3), (10, 2)])
def test_mcnemar_sums_the_binomial_tails(first, second):
    n = first + second
    chances = [math.comb(n, i) / 2**n for i in range(n + 1)]
    expected = sum(c for c in chances if c <= chances[first] * (1 + 1e-9))
    assert mcnemar_exact(first, second) == pytest.approx(expected, rel=1e-12)


def test_mcnemar_refuses_negative_counts():
    with pytest.raises(ValueError, match="must not be negative"):
        mcnemar_exact(-1, 2)


def test_holm_steps_down_and_never_decreases():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.9]) == [1.0, 1.0]


@given(st.lists(st.tuples(st.floats(0.001, 1.0), st.booleans()), min_size=1, max_size=60), st.integers(1, 15))
def test_calibration_error_equals_the_plain_loop(items, bins):
    confidence = np.array([c for c, _ in items])
    correct = np.array([k for _, k in items])
    on_an_edge = any(abs(c * bins - round(c * bins)) < 1e-9 for c in confidence)
    if not on_an_edge:
        found = expected_calibration_error(confidence, correct, bins=bins)
        assert found == pytest.approx(calibration_error(confidence, correct, bins), abs=1e-12)


def test_bins_are_open_below_and_closed_above_but_for_the_first():
    confidence = np.array([0.0, 0.5, 0.5, 1.0])
    correct = np.array([False, True, True, False])
    # (0, 0.5] with 0: accuracy 2/3, confidence 1/3; (0.5, 1]: accuracy 0, confidence 1.
    assert expected_calibration_error(confidence, correct, bins=2) == pytest.approx(3 / 4 / 3 + 1 / 4)


def test_equal_mass_bins_keep_ties_together_whatever_the_order():
    confidence = np.array([0.2, 0.2, 0.2, 0.2, 0.9, 0.95])
    correct = np.array([True, False, False, False, True, True])
    found = {
        round(expected_calibration_error(confidence[list(p)], correct[list(p)], bins=2, mass=True), 12)
        for p in itertools.permutations(range(6))
    }
    assert found == {round(4 / 6 * 0.05 + 2 / 6 * 0.075, 12)}


def test_calibration_error_of_nothing_is_refused():
    with pytest.raises(ValueError, match="must not be empty"):
        expected_calibration_error(np.zeros(0), np.zeros(0, dtype=bool))


def test_brier_counts_every_class():
    p = np.array([[0.7, 0.2, 0.1], [0.0, 0.0, 1.0]])
    assert brier(p, np.array([0, 1])) == pytest.approx((0.09 + 0.04 + 0.01 + 2.0) / 2)


def test_auroc_counts_pairs_with_ties_as_half():
    scores = np.array([0.1, 0.4, 0.4, 0.8])
    positive = np.array([False, True, False, True])
    pairs = [(scores[i] > scores[j]) + 0.5 * (scores[i] == scores[j]) for i in (1, 3) for j in (0, 2)]
    assert auroc(scores, positive) == pytest.approx(np.mean(pairs))
    with pytest.raises(ValueError, match="both classes"):
        auroc(scores, np.ones(4, dtype=bool))


def ragged_share(generator, documents):
    """A share as the audit forms it: per-document sums of two correlated effects over ragged lengths."""
    tokens = generator.integers(20, 400, size=documents).astype(float)
    gap = 1.0 + 0.3 * generator.normal(size=documents)
    part = 0.3 * gap + 0.15 * generator.normal(size=documents)
    return np.stack([part * tokens, gap * tokens], axis=1)


def coverage(data_sets, documents, replicates):
    """Share of data sets whose expanded 95 % interval holds the true ratio, 0.3."""
    inside = 0
    for index in range(data_sets):
        values = ragged_share(np.random.default_rng([7, documents, index]), documents)
        rows = draws(documents, replicates, seed=index).sums(values)
        interval = percentile_interval(0.0, rows[:, 0] / rows[:, 1], units=documents)
        inside += interval.low <= 0.3 <= interval.high
    return inside / data_sets


def test_intervals_of_shares_cover_the_truth_about_as_often_as_they_say():
    # 300 data sets: four binomial standard errors about [0.92, 0.97] would be wider than this window.
    assert 0.90 <= coverage(300, 50, 600) <= 0.985


@pytest.mark.nightly
@pytest.mark.parametrize(("documents", "low", "high"), [(50, 0.92, 0.97), (200, 0.93, 0.97)])
def test_coverage_over_a_thousand_data_sets(documents, low, high):
    assert low <= coverage(1000, documents, 10_000) <= high


def wrong_claims(data_sets, documents, replicates):
    """How often zero is claimed within a margin that the true effect just reaches."""
    claims = 0
    for index in range(data_sets):
        generator = np.random.default_rng([11, index])
        tokens = generator.integers(20, 400, size=documents).astype(float)
        effect = 0.02 + 0.02 * generator.normal(size=documents)
        rows = draws(documents, replicates, seed=index).sums(np.stack([effect * tokens, tokens], axis=1))
        claims += equivalence(rows[:, 0] / rows[:, 1], margin=0.02, units=documents).equivalent
    return claims / data_sets


def test_equivalence_is_rarely_claimed_for_an_effect_at_the_margin():
    assert wrong_claims(300, 50, 600) <= 0.09


@pytest.mark.nightly
def test_wrong_claims_of_equivalence_over_a_thousand_data_sets():
    assert wrong_claims(1000, 200, 10_000) <= 0.06


def pairs(both, first, second, neither):
    one = np.array([1] * both + [1] * first + [0] * second + [0] * neither, bool)
    other = np.array([1] * both + [0] * first + [1] * second + [0] * neither, bool)
    return one, other


def test_a_paired_difference_is_that_of_newcombe():
    """36, 12, 2, 0 is an example of the paper; its method 10 gives 0.0569 to 0.3404."""
    found = paired_difference(*pairs(36, 12, 2, 0))
    assert (found.low, found.high) == pytest.approx((0.0569, 0.3404), abs=1e-4)
    assert found.estimate == pytest.approx(0.2)
    assert (found.plain_low + found.plain_high) / 2 == pytest.approx(0.2)


def test_items_that_all_agree_leave_a_width_and_swapping_swaps_the_ends():
    same = paired_difference(*pairs(50, 0, 0, 0))
    assert same.low == -same.high < 0 == same.estimate
    one, other = pairs(20, 5, 1, 9)
    there, back = paired_difference(one, other), paired_difference(other, one)
    assert (there.low, there.high) == pytest.approx((-back.high, -back.low))


def test_a_paired_difference_is_of_the_same_items():
    with pytest.raises(ValueError, match="about the same items. Got 2 and 3"):
        paired_difference(np.ones(2, bool), np.ones(3, bool))
