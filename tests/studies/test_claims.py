"""Planted rows, one set per word and reason."""

import math
import subprocess
import sys

import pytest

from looplab.records import Claim, Matched, Need, Part, Rule, StudyRow
from looplab.studies import parts as made
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


def decide(made, rows, *, scale="cpu", **more):
    (result,) = decide_claims([made], rows, scale=scale, **more)
    assert result.word in (*rules.WORDS, rules.NOT_RUN)
    return result


def of(*parts, **more):
    """A recipe's claim of parts that were built elsewhere."""
    fields = {"id": "x.1", "origin": "ours", "quote": "", "statement": "", "unit": "share", "scope": "recipe"}
    return Claim(**fields, parts=parts, **more)


def seeded(arm, *values, half=0.001, **more):
    return [row(arm, value, half, seed=seed, **more) for seed, value in enumerate(values)]


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
    alike = decide(made, [row("a", 0.2, 0.5, seed=seed) for seed in range(3)])
    assert alike.reason == "a: the threshold lies inside the interval; more items would decide"


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


def test_a_two_sided_answer_says_its_side():
    part = made.difference("a", "b", QUANTITY, rule=rules.two_sided(0.05))
    found = decide(of(part), seeded("a", 0.1, 0.11, 0.12) + seeded("b", 0.3, 0.31, 0.32))
    assert (found.word, found.parts[0].note) == (rules.SUPPORTED, "below 0")
    same = decide(of(part), seeded("a", 0.3, 0.31, 0.32) + seeded("b", 0.3, 0.31, 0.32))
    assert (same.word, same.parts[0].note) == (rules.NOT_SUPPORTED, "")


def test_an_interaction_is_decided_seed_by_seed_with_its_sign_flip_p():
    part = made.interaction(("f", "g"), "fg", "f", "g", "o", QUANTITY, rule=rules.above(0))
    rows = seeded("fg", 1.0, 2.0, 3.0) + seeded("f", 0.5, 1.5, 2.5) + seeded("g", 0.4, 1.4, 2.4)
    found = decide(of(part), rows + seeded("o", 0.2, 1.2, 2.2))  # every arm spreads by 1, the contrast by nothing
    assert (found.word, found.parts[0].value) == (rules.SUPPORTED, pytest.approx(0.3))
    assert found.parts[0].seeds == pytest.approx((0.3, 0.3, 0.3))
    assert found.parts[0].note == "sign-flip p = 0.25"


def test_a_trend_is_a_slope_per_seed():
    part = made.trend({"a": 0, "b": 2, "c": 4}, "log2 loops", QUANTITY, rule=rules.below(0))
    rows = seeded("a", 1.0, 2.0, 3.0) + seeded("b", 0.8, 1.8, 2.8) + seeded("c", 0.6, 1.6, 2.6)
    found = decide(of(part), rows)
    assert (found.word, found.parts[0].value) == (rules.SUPPORTED, pytest.approx(-0.1))


def test_a_ratio_is_taken_seed_by_seed_on_the_logarithm_and_shown_as_a_factor():
    part = made.ratio("a", "b", QUANTITY, rule=rules.between(1.9, 2.1))
    found = decide(of(part), seeded("a", 2.0, 20.0, 200.0) + seeded("b", 1.0, 10.0, 100.0))
    assert (found.word, found.parts[0].value) == (rules.SUPPORTED, pytest.approx(2.0))
    assert found.parts[0].seeds == pytest.approx((2.0, 2.0, 2.0))
    margin = made.ratio("a", "b", QUANTITY, rule=rules.two_sided(0.05))
    near = decide(of(margin), seeded("a", 1.01, 1.01, 1.01) + seeded("b", 1.0, 1.0, 1.0))
    assert (near.word, near.parts[0].value) == (rules.NOT_SUPPORTED, pytest.approx(1.01)), "log 1.01 is inside .05"
    below = decide(of(part), seeded("a", 2.0, -1.0, 2.0) + seeded("b", 1.0, 1.0, 1.0))
    assert (below.word, below.reason) == (rules.UNIDENTIFIED, "a / b: no contrast: a ratio needs positive values")


def test_an_auc_draws_clusters_and_says_how_many():
    arms = {f"{i}": f"cluster {i // 2}" for i in range(8)}
    part = made.auc("p", "q", "safe", arms, rule=rules.above(0.1))
    rows = [
        row(arm, value, 0.0, seed=0, quantity=quantity)
        for i, arm in enumerate(arms)
        for quantity, value in (("p", float(i % 2)), ("q", 0.5), ("safe", float(i % 2)))
    ]
    found = decide(of(part), rows)
    assert (found.word, found.parts[0].value) == (rules.SUPPORTED, 0.5)
    assert found.parts[0].note == "8 runs, 4 clusters"
    alike = [row(r.arm, 1.0, 0.0, seed=0, quantity="safe") if r.quantity == "safe" else r for r in rows]
    assert decide(of(part), alike).reason.endswith("all runs have one outcome, or are of one cluster")


def test_counts_laws_and_times_need_one_seed():
    parts = [made.level("a", QUANTITY, rule=rule) for rule in (rules.exact(1.0), rules.law(0.95))]
    for part in (*parts, made.timing("a", QUANTITY, rule=rules.above(0.9))):
        assert decide(of(part), [row("a", 1.0, 0.0, seed=0, items=7)]).word == rules.SUPPORTED
    few = decide(of(made.timing("a", QUANTITY, rule=rules.above(0.9))), [row("a", 1.0, 0.0, seed=0, items=6)])
    assert few.reason == "a, share: too few events: 6 repetitions, 7 needed"


def test_an_exact_claim_holds_in_every_seed():
    part = made.level("a", QUANTITY, rule=rules.exact(1.0))
    assert decide(of(part), seeded("a", 0.0, 2.0, half=0.0)).word == rules.NOT_SUPPORTED, "their mean is 1"


@pytest.mark.parametrize(
    ("values", "chance", "items", "reason"),
    [
        ((0.51, 0.50), 0.5, 200, "floor"),
        ((0.99, 1.0), 0.5, 200, "ceiling"),
        ((0.9, 0.6), 0.5, 99, "too few events"),
        ((0.9, 0.6), 0.5, 200, ""),
        ((0.99, 1.0), None, None, ""),
    ],
)
def test_guards_speak_before_a_comparison(values, chance, items, reason):
    part = made.difference("a", "b", QUANTITY, rule=rules.two_sided(0.001))
    rows = [*seeded("a", *[values[0]] * 3), *seeded("b", *[values[1]] * 3)]
    rows = [row(r.arm, r.value, 0.0001, seed=r.seed, chance=chance, items=items) for r in rows]
    found = decide(of(part), rows)
    assert (found.word == rules.UNIDENTIFIED) == bool(reason)
    assert reason in found.reason
    level = decide(of(made.level("a", QUANTITY, rule=rules.above(0.1))), rows)
    assert level.word == rules.SUPPORTED, "a level is not compared"


def test_a_need_that_is_not_met_leaves_the_claim_without_an_answer():
    need = Need(arms=("a",), quantity=QUANTITY, at_least=0.6, reason="task not learned")
    part = made.level("a", QUANTITY, rule=rules.above(0.1))
    found = decide(of(part, needs=(need,)), seeded("a", 0.5, 0.6, 0.61))
    assert (found.word, found.reason) == (rules.UNIDENTIFIED, "task not learned: a, share 0.57, 0.6 needed")
    assert decide(of(part, needs=(need,)), seeded("a", 0.6, 0.6, 0.61)).word == rules.SUPPORTED


def test_one_of_several_cells_is_enough_at_a_wider_interval():
    parts = [made.level(arm, QUANTITY, rule=rules.above(0.0)) for arm in "abcd"]
    rows = [*seeded("a", 0.5, 0.5, 0.5), *(r for arm in "bcd" for r in seeded(arm, -0.5, -0.5, -0.5))]
    found = decide(of(*parts, some=True), rows)
    assert (found.word, found.parts[0].level) == (rules.SUPPORTED, 1 - 0.05 / 4)
    assert decide(of(*parts), rows).word == rules.NOT_SUPPORTED, "every cell is asked for"
    border = [*seeded("a", 0.011, 0.011, 0.011, half=0.01), *rows[3:]]
    assert decide(of(*parts, some=True), border).word == rules.UNDECIDED, "0.011 - 0.01 x 2.50 / 1.96 is below 0"
    none = decide(of(*parts[1:], some=True), rows)
    assert none.word == rules.NOT_SUPPORTED


def test_a_claim_that_is_turned_around_is_flagged():
    part = made.difference("a", "b", QUANTITY, rule=rules.greater())
    found = decide(of(part), seeded("a", 0.1, 0.1, 0.1) + seeded("b", 0.3, 0.3, 0.3))
    assert (found.word, found.flags) == (rules.NOT_SUPPORTED, ("reversed",))
    assert decide(of(part), seeded("a", 0.3, 0.3, 0.3) + seeded("b", 0.1, 0.1, 0.1)).flags == ()
    assert decide(claim((("a",), ABOVE)), [row("a", 0.1)]).flags == ("one checkpoint",)


def test_what_was_not_run_has_no_word_and_a_reason():
    part = made.difference("a", "b", QUANTITY, rule=rules.greater())
    rows = seeded("a", 0.3, 0.3, 0.3)
    found = decide(of(part), rows, not_run={"b": "not measured (--arms)"})
    assert (found.word, found.reason, found.parts[0].value) == (rules.NOT_RUN, "not measured (--arms)", None)
    assert decide(of(part, only="--full"), rows).reason == "not measured (--full)"
    assert decide(of(part, only="--model"), rows).reason == "not measured (needs --model)"
    busy = seeded("b", None, None, None, reason="not measured (machine busy)")
    assert decide(of(part), rows + busy).word == rules.NOT_RUN
    both = of(made.level("a", QUANTITY, rule=rules.above(0.1)), part, some=True)
    assert decide(both, rows, not_run={"b": "x"}).word == rules.SUPPORTED, "one cell was enough"


def test_a_claim_that_no_scale_can_test_says_why():
    found = decide(of(withheld="size: 20B parameters"), [])
    assert (found.word, found.reason, found.claim.rule) == (
        rules.UNIDENTIFIED,
        "size: 20B parameters",
        "not tested here",
    )


def test_a_claim_may_ask_for_less_or_more_than_its_study():
    part = made.difference("a", "b", QUANTITY, rule=rules.greater())
    rows = seeded("a", 0.3, 0.3, 0.3) + seeded("b", 0.1, 0.1, 0.1)
    values = {f"{arm}, seed {seed}": {"a": "1,310", "b": "1,000"}[arm] for arm in "ab" for seed in range(3)}
    flops = Matched(name="train_flops", equal=False, values=values, tolerance=0.02)
    assert decide(of(part), rows, matched=[flops], equal=()).word == rules.SUPPORTED
    found = decide(of(part, equal=("train_flops",)), rows, matched=[flops], equal=())
    assert (found.word, found.reason) == (rules.UNIDENTIFIED, "arms not matched: train_flops 1.31")
    assert decide(of(part, equal=()), rows, matched=[flops], equal=("train_flops",)).word == rules.SUPPORTED


def test_numbers_within_their_tolerance_are_equal():
    part = made.difference("a", "b", QUANTITY, rule=rules.greater())
    rows = seeded("a", 0.3, 0.3, 0.3) + seeded("b", 0.1, 0.1, 0.1)
    values = {"a, seed 0": "1,000", "b, seed 0": "1,015", "c, seed 0": "2,000"}
    near = Matched(name="train_flops", equal=False, values=values, tolerance=0.02)
    assert decide(of(part), rows, matched=[near]).word == rules.SUPPORTED, "c is not compared"


def test_the_mean_of_the_runs_that_did_not_diverge_is_printed():
    rows = [*seeded("a", 0.2, 0.4), row("a", None, seed=2, reason="diverged")]
    found = decide(of(made.level("a", QUANTITY, rule=rules.above(0.1))), rows)
    assert (found.word, found.parts[0].value, found.parts[0].note) == (rules.UNDECIDED, None, "mean of the others: 0.3")


def test_no_pytorch_is_needed_to_decide():
    code = "import sys, looplab.studies.claims; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
