"""Parts of claims, as studies write them."""

import pytest

from looplab.studies import parts, rules


def test_a_level_and_a_difference_look_at_arms():
    level = parts.level("main", "loss", rule=rules.below(1.5))
    assert (level.cells, level.decides, level.label) == ((("main", "loss"),), "below(1.5)", "main, loss")
    difference = parts.difference(("a", "at 16"), ("a", "at 8"), rule=rules.two_sided(0.01))
    assert difference.cells == (("a", "at 16"), ("a", "at 8"))
    assert difference.label == "a, at 16 - a, at 8"


def test_an_effect_weighs_the_cells_of_a_factor():
    part = parts.effect("replay", ["x", "y"], ["u", "v", "w"], "EM", rule=rules.above(0))
    assert part.weights == (0.5, 0.5, -1 / 3, -1 / 3, -1 / 3)
    assert (part.decides, part.label) == ("effect: above(0)", "effect of replay")


def test_an_interaction_is_a_difference_of_differences():
    part = parts.interaction(("f", "g"), "both", "f", ["g1", "g2"], "none", "EM", rule=rules.two_sided(0.05))
    assert dict(zip(part.arms, part.weights, strict=True)) == {"both": 1, "f": -1, "g1": -0.5, "g2": -0.5, "none": 1}
    assert part.label == "f x g"


def test_a_trend_knows_its_axis():
    part = parts.trend({("a", "loss at 1"): 0, ("a", "loss at 4"): 2}, "log2 loops", rule=rules.below(0))
    assert (part.at, part.decides) == ((0.0, 2.0), "trend on log2 loops: below(0)")
    assert part.quantities == ("loss at 1", "loss at 4")
    with pytest.raises(ValueError, match="two different points"):
        parts.trend({"a": 1}, "log2 loops", "loss", rule=rules.below(0))


def test_an_auc_has_three_cells_per_arm():
    part = parts.auc("p", "q", "safe", {"a": "x", "b": "y"}, rule=rules.above(0))
    assert part.cells == (("a", "p"), ("a", "q"), ("a", "safe"), ("b", "p"), ("b", "q"), ("b", "safe"))
    assert part.clusters == ("x", "y")


def test_a_cell_without_a_quantity_is_refused():
    with pytest.raises(ValueError, match="quantity must be given for every cell"):
        parts.difference("a", ("b", "loss"), rule=rules.greater())
