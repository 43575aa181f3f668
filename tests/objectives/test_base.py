import pytest
import torch

from looplab.objectives.base import LossParts, Part


def parts(*entries):
    return LossParts({name: Part(torch.tensor(total), count, weight) for name, total, count, weight in entries})


def test_the_total_is_the_weighted_sum_of_the_means():
    both = parts(("a", 6.0, 3, 1.0), ("b", 10.0, 5, 0.5))
    assert both.means() == {"a": 2.0, "b": 2.0}
    assert both.total == 3.0
    assert list(both) == ["a", "b"]
    assert len(both) == 2


def test_sums_and_counts_are_added_before_the_division():
    joined = parts(("a", 6.0, 3, 1.0)) + parts(("a", 2.0, 1, 1.0))
    assert joined.total == 2.0
    assert joined["a"].count == 4


def test_shares_of_micro_batches_sum_to_the_total():
    one, two = parts(("a", 6.0, 3, 2.0)), parts(("a", 2.0, 1, 2.0))
    counts = {"a": 4}
    assert float(one.share(counts) + two.share(counts)) == (one + two).total


def test_different_parts_cannot_be_added():
    with pytest.raises(ValueError, match=r"same parts to be added. Got \['a'\] and \['b'\]"):
        parts(("a", 1.0, 1, 1.0)) + parts(("b", 1.0, 1, 1.0))


def test_detached_parts_have_no_graph():
    leaf = torch.ones((), requires_grad=True)
    tied = LossParts({"a": Part(leaf * 2, 1, 1.0)})
    assert tied["a"].sum.requires_grad
    assert not tied.detach()["a"].sum.requires_grad
