import dataclasses

import pytest

from looplab.report import beside
from report.sample import single_core, two_blocks


def test_every_audit_has_a_row_that_knows_its_result():
    table = beside.comparison(two_blocks(), [two_blocks(sampled=True), single_core()])
    assert [row[0].text for row in table.rows] == ["fixed-2x4", "sampled-2x4", "single-core"]
    assert [row[3].home for row in table.rows] == [0, 1, 2]
    assert [(row[4].text, row[4].under) for row in table.rows][1:] == [
        ("35.1\u00a0% [34.2, 36.0]", "substantial"),
        ("not identifiable", "takes the whole gap by construction"),
    ]
    assert [row[1].text for row in table.rows] == ["fixed 8", "uniform 1..8", "fixed 4"]
    assert table.rows[1][7].under == "affine: present"


def test_a_part_of_a_gap_too_small_to_split_stands_in_nats():
    result = two_blocks()
    first = result.domains[0]
    raw = first.decompositions[0]
    parts = tuple(dataclasses.replace(part, share=None, word="inconclusive") for part in raw.parts)
    first = dataclasses.replace(first, decompositions=(dataclasses.replace(raw, parts=parts),))
    table = beside.comparison(dataclasses.replace(result, domains=(first,)), [])
    assert (table.rows[0][4].text, table.rows[0][4].under) == ("0.350 [0.342, 0.358]", "inconclusive")


def test_waterfalls_side_by_side_have_one_scale():
    found = beside.waterfalls(two_blocks(), [two_blocks(sampled=True)])
    limits = [plate.figure.axes[0].get_xlim() for _, plate in found]
    assert limits[0] == pytest.approx(limits[1])
    assert [name for name, _ in found] == ["fixed-2x4", "sampled-2x4"]
