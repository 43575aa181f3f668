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
