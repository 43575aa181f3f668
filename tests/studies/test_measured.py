"""Rows of planted audits."""

import dataclasses

import pytest

from looplab.audit.config import AuditConfig
from looplab.studies.base import Arm
from looplab.studies.measured import Rows
from report.sample import dense, single_core, two_blocks

ARM = Arm(name="m", title="", source="m", audit=AuditConfig())


def rows(result):
    return Rows(ARM, result)


def by_name(found):
    return {row.quantity: row for row in found}


def test_shares_and_gap_are_those_of_the_audit():
    result = two_blocks()
    raw = result.domains[0].decomposition()
    found = by_name([rows(result).gap(), *rows(result).shares()])
    assert found["gap"].value == raw.gap.value
    assert found["gap"].low90 == raw.gap.low90
    for name in ("application", "distinct", "composition"):
        assert found[name].value == raw.part(name).share.value
        assert found[name].word == raw.part(name).word


def test_factors_are_ratios_of_gaps():
    result = two_blocks()
    domain = result.domains[0]
    raw, after = domain.decomposition(), domain.decomposition("temperature")
    gain = next(gain for gain in domain.gains if (gain.probe, gain.k) == ("temperature", 1))
    found = by_name(rows(result).factors())
    gap = raw.gap.value
    assert found["O_app"].value == pytest.approx(gap / (gap - raw.part("application").nats.value))
    assert found["O_read"].value == pytest.approx(gap / (gap - gain.net.value))
    left = after.gap.value - after.part("application").nats.value  # Q(repeat(1)) - Q(full), readout refitted
    assert found["O_temperature"].value == pytest.approx(gap / left, rel=1e-6)
    share = raw.part("application").share
    assert (found["O_app"].low, found["O_app"].high) == pytest.approx((1 / (1 - share.low), 1 / (1 - share.high)))
    assert found["O_temperature"].low < found["O_temperature"].value < found["O_temperature"].high


def test_a_single_core_has_reasons_instead_of_numbers():
    result = single_core()
    found = by_name([*rows(result).shares(), *rows(result).factors(), rows(result).distinct()])
    for name in ("application", "distinct", "composition", "O_app", "O_temperature", "distinct, raw"):
        assert found[name].value is None
        assert found[name].reason
    assert found["distinct"].reason == "the block has no iteration index"
    assert found["O_read"].value > 1
    assert rows(result).distinct_identifiable().value == 0.0
    assert rows(two_blocks()).distinct_identifiable().value == 1.0


def test_a_dense_model_has_a_gap_and_a_refit_and_no_parts():
    result = dense()
    first = min(result.domains[0].gains, key=lambda gain: gain.k)
    assert (rows(result).gap().value, rows(result).gap().word) == (first.gap.value, first.schedule)
    assert {row.reason for row in rows(result).shares()} == {"no block is repeated"}
    assert rows(result).best_gain().value is not None
    assert rows(result).above_dense("temperature").reason == "no dense control"


def test_a_probe_that_was_not_asked_for_is_not_measured():
    result = two_blocks()
    bare = dataclasses.replace(result, config=dataclasses.replace(result.config, probes=("temperature",)))
    assert rows(bare).gain("affine", 1).reason == "not measured"
    assert rows(bare).gain("temperature", 1).value is not None


def test_a_share_of_the_whole_gap_leaves_no_factor():
    result = two_blocks()
    raw = result.domains[0].decomposition()
    share = raw.part("application").share
    whole = dataclasses.replace(raw.part("application"), share=dataclasses.replace(share, high=1.0))
    parts = (whole, *raw.parts[1:])
    domain = result.domains[0]
    domain = dataclasses.replace(
        domain, decompositions=(dataclasses.replace(raw, parts=parts), *domain.decompositions[1:])
    )
    found = by_name(rows(dataclasses.replace(result, domains=(domain,))).factors())
    assert (found["O_app"].value, found["O_app"].reason) == (None, "nothing is left of the gap")


def test_the_difference_to_the_control_is_the_audits_own():
    result = two_blocks()
    control = result.domains[0].control
    wanted = next(c for c in control.comparisons if (c.probe, c.at) == ("temperature", "nearest gap"))
    assert rows(result).above_dense("temperature").value == wanted.difference.value
    assert rows(result).recurrence().word == result.domains[0].verdict.recurrence
    best = rows(result).best_gain()
    assert best.word.startswith(f"{result.domains[0].verdict.best_probe}: ")
    assert rows(result).full_loss().value == result.domains[0].schedule("full").loss().loss.value
    assert rows(result).distinct().margin == result.domains[0].decomposition().margin


def test_a_share_under_a_readout_has_its_name():
    result = two_blocks()
    row = rows(result).share("distinct", "temperature")
    assert row.quantity == "distinct share, temperature"
    assert row.value == result.domains[0].decomposition("temperature").part("distinct").share.value
