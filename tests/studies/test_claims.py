"""Planted rows, one set per word and reason."""

import math

import pytest

from looplab.records import Claim, Matched, Part, Rule, StudyRow
from looplab.studies import rules
from looplab.studies.claims import decide_claims

QUANTITY = "share"


def row(arm, value, half=0.01, seed=None, **more):
    ends = {} if value is None else {"low": value - half, "high": value + half}
    ends |= {} if value is None else {"low90": value - 0.8 * half, "high90": value + 0.8 * half}
    return StudyRow(**{"arm": arm, "seed": seed, "quantity": QUANTITY, "unit": "share", "value": value, **ends, **more})


def claim(*parts, **more):
    made = tuple(Part(label="/".join(arms), quantity=QUANTITY, arms=arms, rule=rule) for arms, rule in parts)
    fields = {"id": "x.1", "origin": "ours", "quote": "", "statement": "", "unit": "share", "scope": "checkpoint"}
    return Claim(**{**fields, "parts": made, **more})


ABOVE = Rule(name="above", numbers=(0.05,))


def decide(made, rows, *, scale="cpu", matched=()):
    (result,) = decide_claims([made], rows, scale=scale, matched=matched)
    assert result.word in rules.WORDS
    return result


@pytest.mark.parametrize(
    ("value", "word"), [(0.10, rules.SUPPORTED), (0.01, rules.NOT_SUPPORTED), (0.05, rules.UNDECIDED)]
)
def test_one_checkpoint_gets_the_word_of_its_interval(value, word):
    found = decide(claim((("a",), ABOVE)), [row("a", value)])
    assert found.word == word
    assert (found.parts[0].value, found.parts[0].seeds) == (value, ())
    assert bool(found.reason) == (word == rules.UNDECIDED)


def test_what_cannot_be_told_has_no_number_and_its_reason():
    found = decide(claim((("a",), ABOVE)), [row("a", None, reason="no index")])
    assert (found.word, found.reason, found.parts[0].value) == (rules.UNIDENTIFIED, "a: no index", None)


def test_unidentifiable_parts_count_only_where_the_claim_says_so():
    parts = ((("a",), ABOVE), (("b",), ABOVE))
    rows = [row("a", 0.1), row("b", None, reason="no index")]
    assert decide(claim(*parts), rows).word == rules.UNIDENTIFIED
    assert decide(claim(*parts, where_identifiable=True), rows).word == rules.SUPPORTED
    none = [row("a", None, reason="no index"), row("b", None, reason="no index")]
    assert decide(claim(*parts, where_identifiable=True), none).word == rules.UNIDENTIFIED


def test_a_smoke_run_decides_nothing():
    found = decide(claim((("a",), ABOVE)), [row("a", 0.9)], scale="smoke")
    assert (found.word, found.reason, found.parts[0].word) == (rules.UNIDENTIFIED, "smoke", rules.UNIDENTIFIED)


def test_a_claim_about_a_recipe_needs_three_seeds():
    made = claim((("a",), ABOVE), scope="recipe")
    two = decide(made, [row("a", 0.2, seed=0), row("a", 0.21, seed=1)])
    assert (two.word, two.reason) == (rules.UNDECIDED, "a: 2 training seeds, 3 needed")
    three = decide(made, [row("a", 0.2 + 0.01 * seed, seed=seed) for seed in range(3)])
    assert (three.word, three.parts[0].seeds) == (rules.SUPPORTED, pytest.approx((0.2, 0.21, 0.22)))
    wide = decide(made, [row("a", 0.2 * seed, seed=seed) for seed in range(3)])
    assert wide.word == rules.UNDECIDED
    assert wide.reason == "a: the threshold lies inside the interval; seeds that would decide: 10"


def test_two_arms_are_paired_by_seed():
    made = claim((("a", "b"), Rule(name="greater")), scope="recipe")
    rows = [row("a", 0.5 + seed, 0.001, seed=seed) for seed in range(3)]
    rows += [row("b", 0.4 + seed, 0.001, seed=seed) for seed in range(3)]
    found = decide(made, rows)  # either arm alone spreads by 1
    assert (found.word, found.parts[0].value) == (rules.SUPPORTED, pytest.approx(0.1))


def test_an_equivalence_shows_the_interval_it_is_decided_by():
    found = decide(claim((("a",), Rule(name="equivalent"))), [row("a", 0.0, 0.022, margin=0.02)])
    part = found.parts[0]
    assert (found.word, part.level, part.high) == (rules.SUPPORTED, 0.90, pytest.approx(0.0176))


def test_arms_that_do_not_match_decide_nothing():
    made = claim((("a", "b"), Rule(name="greater")), scope="recipe")
    rows = [row(arm, value, seed=seed) for arm, value in (("a", 1.0), ("b", 0.0)) for seed in range(3)]
    fit = [Matched(name="init", equal=True, values={})]
    assert decide(made, rows, matched=fit).word == rules.SUPPORTED
    values = {f"{arm}, seed {seed}": str(arm == "b" and seed == 2) for arm in "abc" for seed in range(3)}
    miss = [*fit, Matched(name="data_order", equal=False, values=values)]
    found = decide(made, rows, matched=miss)
    assert (found.word, found.reason) == (rules.UNIDENTIFIED, "arms not matched: data_order")
    apart = claim((("a", "c"), Rule(name="greater")), (("b",), ABOVE), scope="recipe")
    rows += [row("c", 0.0, seed=seed) for seed in range(3)]
    rows = [row("b", 1.0, seed=r.seed) if r.arm == "b" else r for r in rows]
    assert decide(apart, rows, matched=miss).word == rules.SUPPORTED, "b is compared with nothing"


def test_a_spread_is_taken_on_the_logarithm_of_factors_and_leaves_out_what_is_unknown():
    made = claim((("a", "b", "c"), Rule(name="spread")))
    rows = [row("a", 1.0, unit="factor"), row("b", math.e, unit="factor"), row("c", None, reason="no index")]
    found = decide(made, rows)
    assert (found.word, found.parts[0].value) == (rules.SUPPORTED, pytest.approx(math.sqrt(0.5), abs=0.01))
    alone = decide(made, [*rows[::2], row("b", None, reason="no index")])
    assert (alone.word, alone.reason) == (rules.UNIDENTIFIED, "a/b/c: 1 of 3 arms have the quantity, 2 needed")


def test_a_row_that_a_claim_needs_cannot_be_missing():
    with pytest.raises(AssertionError, match=r"x\.1: no row 'share' of \['b'\]"):
        decide(claim((("a", "b"), Rule(name="greater"))), [row("a", 1.0)])


def test_a_run_that_diverged_leaves_the_claim_undecided():
    rows = [row("a", 0.2, seed=seed) for seed in range(2)] + [row("a", None, seed=2, reason="diverged")]
    found = decide(claim((("a",), ABOVE), scope="recipe"), rows)
    assert (found.word, found.reason) == (rules.UNDECIDED, "a: 1 of 3 runs diverged")


def test_a_smoke_run_may_leave_out_arms():
    found = decide(claim((("a", "b"), Rule(name="greater"))), [row("a", 1.0)], scale="smoke")
    assert (found.word, found.parts[0].value) == (rules.UNIDENTIFIED, None)
