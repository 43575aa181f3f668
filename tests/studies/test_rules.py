"""Every rule against tables worked by hand, on both sides of its thresholds."""

import math
import random
import subprocess
import sys

import pytest

from looplab.records import Rule
from looplab.studies import rules
from looplab.studies.rules import Interval

YES, NO, OPEN = rules.SUPPORTED, rules.NOT_SUPPORTED, rules.UNDECIDED


def interval(low, high):
    """An interval whose 90 % form is the inner 80 % of it."""
    middle, half = (low + high) / 2, (high - low) / 2
    return Interval(middle, low, high, middle - 0.8 * half, middle + 0.8 * half)


@pytest.mark.parametrize(
    ("name", "numbers", "low", "high", "word"),
    [
        ("above", (0.05,), 0.06, 0.09, YES),
        ("above", (0.05,), 0.05, 0.09, OPEN),
        ("above", (0.05,), 0.01, 0.05, OPEN),
        ("above", (0.05,), 0.01, 0.04, NO),
        ("below", (0.05,), 0.01, 0.04, YES),
        ("below", (0.05,), 0.01, 0.06, OPEN),
        ("below", (0.05,), 0.06, 0.09, NO),
        ("between", (1.5, 2.5), 1.5, 2.5, YES),
        ("between", (1.5, 2.5), 1.4, 2.0, OPEN),
        ("between", (1.5, 2.5), 1.2, 2.6, OPEN),
        ("between", (1.5, 2.5), 1.2, 1.4, NO),
        ("between", (1.5, 2.5), 2.6, 3.0, NO),
        ("greater", (), 0.1, 0.2, YES),
        ("greater", (), -0.1, 0.2, OPEN),
        ("greater", (), -0.2, -0.1, NO),
        ("greater", (0.2,), 0.21, 0.3, YES),
        ("greater", (0.2,), 0.1, 0.3, OPEN),
        ("greater", (0.2,), 0.1, 0.19, NO),
        ("equivalent", (0.02,), -0.024, 0.024, YES),  # the 90 % interval is inside, the 95 % one is not
        ("equivalent", (0.02,), -0.026, 0.026, OPEN),
        ("equivalent", (0.02,), 0.001, 0.002, YES),  # not zero, yet equivalent to it
        ("equivalent", (0.02,), 0.03, 0.05, NO),
        ("equivalent", (0.02,), -0.05, -0.03, NO),
        ("two_sided", (0.02,), 0.01, 0.05, YES),
        ("two_sided", (0.02,), -0.05, -0.01, YES),
        ("two_sided", (0.02,), -0.01, 0.05, OPEN),
        ("two_sided", (0.02,), -0.024, 0.024, NO),  # the 90 % interval is inside
        ("two_sided", (0.02,), 0.001, 0.002, NO),  # clear of 0, yet none that counts
        ("law", (0.95,), 0.95, 0.95, YES),
        ("law", (0.95,), 0.94, 0.94, OPEN),
        ("law", (0.95,), 0.06, 0.06, OPEN),
        ("law", (0.95,), 0.05, 0.05, NO),
        ("exact", (1.0,), 1.0, 1.0, YES),
        ("exact", (1.0,), 0.0, 0.0, NO),
    ],
)
def test_a_rule_gives_the_word_of_its_table(name, numbers, low, high, word):
    assert rules.decide(Rule(name=name, numbers=numbers), interval(low, high)) == word


def test_an_equivalence_without_a_number_uses_the_margin_of_the_row():
    rule = Rule(name="equivalent")
    assert rules.decide(rule, interval(-0.01, 0.01), margin=0.02) == YES
    assert rules.decide(rule, interval(-0.01, 0.01), margin=0.005) == OPEN


def test_an_unknown_rule_is_refused():
    with pytest.raises(KeyError, match="Unknown rule 'abvoe'"):
        rules.decide(Rule(name="abvoe", numbers=(1.0,)), interval(0, 1))


def test_seeds_that_agree_keep_the_document_interval():
    found = rules.over_seeds([interval(0.04, 0.06)] * 3)
    assert (found.value, found.low, found.high) == pytest.approx((0.05, 0.04, 0.06))


def test_many_documents_do_not_hide_a_spread_of_seeds():
    narrow = [interval(x - 1e-6, x + 1e-6) for x in (0.0, 0.1, 0.2)]
    found = rules.over_seeds(narrow)
    half = 4.302652729911275 * 0.1 / math.sqrt(3)  # t(.975, 2) s / sqrt(n)
    assert (found.low, found.high) == pytest.approx((0.1 - half, 0.1 + half))
    half90 = 2.919985580355516 * 0.1 / math.sqrt(3)
    assert (found.low90, found.high90) == pytest.approx((0.1 - half90, 0.1 + half90))


def test_seeds_and_documents_add_in_squares_on_each_side():
    found = rules.over_seeds([interval(x - 0.3, x + 0.4) for x in (0.0, 0.1, 0.2)])
    half = 4.302652729911275 * 0.1 / math.sqrt(3)
    low, high = found.value - found.low, found.high - found.value
    assert found.value == pytest.approx(0.1 + 0.05)  # the middle of every interval
    assert (low, high) == pytest.approx((math.hypot(0.35, half), math.hypot(0.35, half)))


@pytest.mark.parametrize("seeds", [3, 10])
def test_a_true_null_is_rarely_supported_and_the_truth_is_covered(seeds):
    """1,000 synthetic studies: no effect, seeds spread by 1, documents by 0.3."""
    draw = random.Random(seeds)
    supported = covered = 0
    for _ in range(1000):
        shift = draw.gauss(0, 0.3)  # shared by all seeds, as documents are
        values = [draw.gauss(0, 1) + shift for _ in range(seeds)]
        found = rules.over_seeds([interval(v - 1.96 * 0.3, v + 1.96 * 0.3) for v in values])
        supported += rules.decide(Rule(name="above", numbers=(0.0,)), found) == YES
        covered += found.low <= 0 <= found.high
    assert supported <= 50
    assert covered >= 950


def test_a_difference_takes_the_worst_of_both_document_intervals():
    assert interval(0.1, 0.3) - interval(0.0, 0.1) == pytest.approx((0.15, 0.0, 0.3, 0.03, 0.27))


@pytest.mark.parametrize(
    ("words", "word"),
    [
        ([YES, YES], YES),
        ([YES, NO, OPEN], NO),
        ([OPEN, rules.UNIDENTIFIED, NO], NO),
        ([YES, OPEN, rules.UNIDENTIFIED], OPEN),
        ([rules.UNIDENTIFIED, OPEN], rules.UNIDENTIFIED),
    ],
)
def test_all_of_several_words(words, word):
    assert rules.all_of(words) == word


def test_a_spread_beyond_the_intervals_is_seen_and_one_inside_them_is_not():
    apart, word = rules.spread([interval(-0.1, 0.1), interval(0.9, 1.1)])
    assert word == YES
    assert 0 < apart.low < apart.value < apart.high
    assert apart.value == pytest.approx(math.sqrt(0.5 - (0.1 / 1.959963984540054) ** 2))  # method of moments of two
    same, word = rules.spread([interval(-0.1, 0.1), interval(-0.05, 0.15), interval(-0.1, 0.12)])
    assert (same.low, word) == (0.0, OPEN)
    assert rules.spread([interval(0, 1)]) == (None, OPEN)


def test_how_many_seeds_would_decide():
    assert rules.seeds_needed([0.0, 0.1, 0.2], 0.3) == "3"  # t(.975, 2) 0.1 / sqrt 3 = 0.248
    assert rules.seeds_needed([0.0, 0.1, 0.2], 0.2) == "4"  # t(.975, 3) 0.1 / sqrt 4 = 0.159
    assert rules.seeds_needed([0.0, 0.1, 0.2], 0.001) == "more than 50"
    assert rules.seeds_needed([0.1], 0.1) == "unknown"


def test_the_rules_need_no_pytorch():
    code = "import sys, looplab.studies.rules; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_rules_by_name_are_the_rules_of_their_functions():
    made = [
        rules.above(1.0), rules.below(1.0), rules.between(1.0, 2.0), rules.exact(1.0), rules.greater(0.2),
        rules.equivalent(0.1), rules.two_sided(0.1), rules.law(),
    ]  # fmt: skip
    assert [str(rule) for rule in made] == [
        "above(1)", "below(1)", "between(1, 2)", "exact(1)", "greater(0.2)", "equivalent(0.1)", "two_sided(0.1)",
        "law(0.95)",
    ]  # fmt: skip
    assert rules.greater() == Rule(name="greater")


def test_a_contrast_of_two_takes_the_worst_case_and_one_of_more_the_root_of_squares():
    a, b = interval(0.1, 0.3), interval(0.0, 0.1)
    assert rules.contrast([a, b], (1.0, -1.0)) == a - b
    assert rules.contrast([a, b], (-1.0, 1.0)) == b - a
    four = [interval(x - 0.1, x + 0.1) for x in (0.9, 0.5, 0.4, 0.2)]
    found = rules.contrast(four, (1.0, -1.0, -1.0, 1.0))
    assert (found.value, found.low, found.high) == pytest.approx((0.2, 0.0, 0.4))  # sqrt(4 x 0.1^2) = 0.2
    assert found.high90 - found.value == pytest.approx(0.16)
    lopsided = rules.contrast([Interval(0.0, -0.3, 0.1, 0, 0), interval(0, 0), interval(0, 0)], (-1.0, 0.5, 0.5))
    assert (lopsided.low, lopsided.high) == pytest.approx((-0.1, 0.3)), "a negative weight swaps the sides"


def test_a_trend_is_the_least_squares_slope():
    weights = rules.slope_weights((0.0, 2.0, 4.0))
    assert weights == pytest.approx((-0.25, 0.0, 0.25))
    assert sum(w * y for w, y in zip(weights, (1.0, 9.0, 3.0), strict=True)) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="two different points"):
        rules.slope_weights((1.0, 1.0))


def test_the_sign_flip_test_counts_all_signs():
    assert rules.sign_flip([1.0, 1.0, 1.0]) == 0.25  # +++ and --- of eight
    assert rules.sign_flip([1.0, -1.0, 0.0]) == 1.0
    assert rules.sign_flip([3.0, 1.0]) == 0.5
    assert rules.sign_flip([0.5]) == 1.0
    assert rules.sign_flip([1.0] * 17) < 0.001  # drawn, not enumerated


def test_of_two_predictors_the_better_one_is_found_and_a_lonely_cluster_decides_nothing():
    outcome = [i % 2 == 0 for i in range(40)]
    good = [1.0 if right else 0.0 for right in outcome]
    useless = [0.5] * 40
    clusters = [str(i // 4) for i in range(40)]
    found = rules.auc_difference(good, useless, outcome, clusters)
    assert found == pytest.approx((0.5, 0.5, 0.5, 0.5, 0.5))
    assert rules.auc_difference(good, good, outcome, clusters).value == 0.0
    assert rules.auc_difference(good, useless, outcome, ["a"] * 40) is None
    assert rules.auc_difference(good, useless, [True] * 40, clusters) is None


def test_runs_of_a_cluster_do_not_count_as_many():
    """Ten runs in each of four clusters, alike within: the interval is that of four, not of forty."""
    outcome = [cluster % 2 == 0 for cluster in range(4) for _ in range(10)]
    one = [float(cluster in (0, 1)) for cluster in range(4) for _ in range(10)]  # right in two clusters of four
    clusters = [str(cluster) for cluster in range(4) for _ in range(10)]
    whole = rules.auc_difference(one, [0.5] * 40, outcome, clusters)
    apart = rules.auc_difference(one, [0.5] * 40, outcome, [str(i) for i in range(40)])
    assert whole.high - whole.low > 2 * (apart.high - apart.low)


def test_a_time_is_a_median_between_order_statistics():
    ours, reference = [2.0, 1.0, 3.0, 4.0, 5.0, 6.0, 7.0], [1.0] * 7
    assert rules.median_ratio(ours, reference) == (4.0, 1.0, 7.0, 1.0, 7.0)
    eleven = rules.median_ratio([float(i) for i in range(1, 12)], [1.0] * 11)
    assert eleven == (6.0, 2.0, 10.0, 3.0, 9.0)  # P(at most 1 of 11) = .006, at most 2: .033, at most 3: .113
    with pytest.raises(ValueError, match="7 pairs of repetitions or more. Got 6 and 6"):
        rules.median_ratio(ours[:6], reference[:6])


@pytest.mark.parametrize(
    ("values", "chances", "items", "reason"),
    [
        ((0.52, 0.51), (0.5, 0.5), (100, 100), "floor: 0.52, 0.51, chance 0.5"),
        ((0.53, 0.51), (0.5, 0.5), (100, 100), ""),
        ((0.98, 0.99), (0.5, 0.5), (100, 100), "ceiling: 0.98, 0.99"),
        ((0.98, 0.97), (0.5, 0.5), (100, 100), ""),
        ((0.7, 0.6), (0.5, 0.5), (99, 200), "too few events: 99 items, 100 needed"),
        ((0.99, 0.99), (None, None), (None, None), ""),
    ],
)
def test_accuracies_at_chance_at_the_top_or_of_few_items_are_not_compared(values, chances, items, reason):
    assert rules.guard(values, chances, items) == reason


def test_an_interval_for_one_of_many_cells_is_wider():
    found = rules.at_level(interval(-0.1, 0.1), 1 - 0.05 / 4)
    assert found.high == pytest.approx(0.1 * 2.4977 / 1.95996, rel=1e-4)
    assert found.high90 == pytest.approx(0.08 * 2.2414 / 1.64485, rel=1e-4)
    assert rules.at_level(interval(-0.1, 0.3), 0.95) == pytest.approx(interval(-0.1, 0.3))


@pytest.mark.parametrize(
    ("rule", "low", "high", "turned"),
    [
        (rules.greater(), -0.2, -0.1, True),
        (rules.greater(0.2), -0.3, -0.25, True),
        (rules.greater(0.2), -0.1, 0.1, False),
        (rules.above(0.0), -0.2, -0.1, True),
        (rules.above(0.9), 0.1, 0.2, False),
        (rules.above(-0.02), -0.2, -0.1, False),
        (rules.below(0.0), 0.1, 0.2, True),
        (rules.below(0.3), 0.4, 0.5, False),
        (rules.equivalent(0.1), 0.4, 0.5, False),
    ],
)
def test_a_claim_is_reversed_if_its_mirror_image_holds(rule, low, high, turned):
    assert rules.reversed_claim(rule, interval(low, high)) is turned


@pytest.mark.parametrize(
    ("words", "word"),
    [([NO, YES, OPEN], YES), ([NO, NO], NO), ([NO, OPEN], OPEN), ([NO, rules.UNIDENTIFIED], rules.UNIDENTIFIED)],
)
def test_any_of_several_words(words, word):
    assert rules.any_of(words) == word


@pytest.mark.parametrize("number", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_contrasts_find_a_planted_effect_and_rarely_one_that_is_not_there(number):
    """1,000 synthetic studies of three seeds and some arms on the same items, an effect of 0 or of 5 errors or more."""
    draw = random.Random(number)
    weights = (1.0, -1.0) if number == 2 else (1.0, -1.0, -1.0, 1.0)
    supported = {0.0: 0, 1.0: 0}
    for effect in supported:
        for _ in range(1000):
            per_seed = []
            for _ in range(3):
                arms = [draw.gauss(effect if i == 0 else 0.0, 0.1) for i in range(number)]
                per_seed.append(rules.contrast([interval(a - 0.02, a + 0.02) for a in arms], weights))
            supported[effect] += rules.decide(rules.above(0.0), rules.over_seeds(per_seed)) == YES
    assert supported[0.0] <= 50
    assert supported[1.0] >= 800
