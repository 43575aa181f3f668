import numpy as np
import pytest

from audit.test_verdict import decomposition, estimate, gain, part
from looplab.audit.agreement import share_difference
from looplab.audit.result import Estimate
from looplab.audit.verdict import agreements


def test_ends_add_in_quadrature_each_from_its_own_side():
    one, other = estimate(0.2, 0.6, value=0.3), estimate(0.05, 0.22, value=0.1)
    found = share_difference(one, other)
    assert found.value == pytest.approx(0.2)
    assert found.low == pytest.approx(0.2 - np.hypot(0.1, 0.12))
    assert found.high == pytest.approx(0.2 + np.hypot(0.3, 0.05))


def test_the_interval_is_that_of_independent_draws():
    draws = np.random.default_rng(0).normal([0.4, 0.1], [0.05, 0.02], size=(200_000, 2))

    def of(values):
        low, low90, high90, high = np.quantile(values, [0.025, 0.05, 0.95, 0.975])
        return Estimate(
            value=float(values.mean()), low=low, high=high, low90=low90, high90=high90, plain_low=low, plain_high=high
        )

    found, expected = share_difference(of(draws[:, 0]), of(draws[:, 1])), of(draws[:, 0] - draws[:, 1])
    for end in ("low", "high", "low90", "high90"):
        assert getattr(found, end) == pytest.approx(getattr(expected, end), abs=0.001), end


def test_only_domains_with_a_share_are_compared():
    shared = [decomposition(part("distinct", share=estimate(low, low + 0.1))) for low in (0.1, 0.2)]
    without = decomposition(part("distinct", word="not identifiable (the block has no iteration index)"))
    (found,) = agreements({"a": (shared[0],), "b": (shared[1],), "c": (without,)})
    assert list(found.differences) == ["a - b"]
    assert found.differences["a - b"].value == pytest.approx(-0.1)


def test_refitted_readouts_are_compared_where_gains_are_given():
    parts = {"a": (decomposition(),), "b": (decomposition(),)}
    gains = {"a": (gain("affine", estimate(0.3, 0.4)),), "b": (gain("affine", None),)}
    (found,) = agreements(parts, gains)
    assert (found.part, found.probe, found.differences) == ("readout", "affine", {})
