import dataclasses

import pytest

from looplab.records import StudyRow
from looplab.recurrence.depth import FixedDepth, PrefixDepth, UniformDepth
from looplab.studies.base import STUDIES
from looplab.studies.claims import decide_claims
from report.sample import two_blocks

STUDY = STUDIES["depth_schedule"]()


@pytest.mark.parametrize("scale", ["smoke", "cpu"])
def test_the_arms_differ_in_their_law_alone(scale):
    a, b, c = STUDY.arms(scale, 1)
    laws = [arm.source.model.trained_depth for arm in (a, b, c)]
    assert laws == [
        PrefixDepth(law=law)
        for law in (FixedDepth(num_steps=8), UniformDepth(low=1, high=8), UniformDepth(low=5, high=8))
    ]
    for arm in (b, c):
        model = dataclasses.replace(arm.source.model, trained_depth=laws[0])
        assert dataclasses.replace(arm.source, recipe=a.source.recipe, model=model) == a.source
        assert arm.audit == a.audit


def test_seeds_come_round_by_round_and_differ_in_nothing_else():
    arms = STUDY.arms("smoke", 2)
    assert [(arm.name, arm.seed) for arm in arms] == [("A", 0), ("B", 0), ("C", 0), ("A", 1), ("B", 1), ("C", 1)]
    assert dataclasses.replace(arms[3].source, seed=0) == arms[0].source


def rows(shares, *, gap=None, loss=None):
    """Rows of three seeds: `shares` of (arm, k), every interval +-0.5 %."""
    gap, loss = gap or {"A": 1.2, "B": 0.1, "C": 0.9}, loss or {"A": 1.700, "B": 1.705, "C": 1.700}
    made = []
    for seed in range(3):
        for arm in "ABC":
            values = {f"temperature share, k = {k}": shares.get((arm, k), 0.0) for k in (1, 2, 4)}
            values |= {"gap": gap[arm], "loss at full depth": loss[arm]}
            for quantity, value in values.items():
                half = 0.005
                made.append(
                    StudyRow(
                        arm=arm,
                        seed=seed,
                        quantity=quantity,
                        unit="share",
                        value=value,
                        low=value - half,
                        high=value + half,
                        low90=value - half,
                        high90=value + half,
                    )
                )
    return made


def words(made):
    return [result.word for result in decide_claims(STUDY.claims, made, scale="cpu")]


def test_the_rules_say_what_is_compared():
    assert [claim.rule for claim in STUDY.claims] == [
        "above(0.05)",
        "below(0.05)",
        "above(0.05) in every part",
        "greater: A - B",
        "equivalent(0.02): B - A",
    ]


def test_the_predictions_as_they_were_made():
    shares = {("A", 1): 0.11, ("B", 1): 0.0, ("C", 1): 0.3, ("C", 2): 0.2, ("C", 4): 0.06}
    assert words(rows(shares)) == ["supported"] * 5


def test_missed_predictions_are_results():
    shares = {("A", 1): 0.01, ("B", 1): 0.2, ("C", 1): 0.3, ("C", 2): 0.2, ("C", 4): 0.01}
    found = words(rows(shares, gap={"A": 0.1, "B": 0.5, "C": 0.1}, loss={"A": 1.7, "B": 1.9, "C": 1.7}))
    assert found == ["not supported"] * 5


def test_planted_audits_give_every_column_claim_and_plot_its_rows():
    arms = STUDY.arms("smoke", 1)
    made = [row for arm in arms for row in STUDY.measure(arm, two_blocks())]
    quantities = {row.quantity for row in made}
    assert set(STUDY.columns) <= quantities
    assert {q for plot in STUDY.plots for q in plot.quantities} <= quantities
    results = decide_claims(STUDY.claims, made, scale="cpu")
    assert {result.word for result in results} == {"undecided"}, "one seed decides no recipe"
