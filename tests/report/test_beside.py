import pytest

from looplab.report import beside
from report.sample import single_core, two_blocks


def test_every_audit_has_a_row_that_knows_its_result():
    table = beside.comparison(two_blocks(), [two_blocks(sampled=True), single_core()])
    assert [row[0].text for row in table.rows] == ["fixed-2x4", "sampled-2x4", "single-core"]
    assert [row[3].home for row in table.rows] == [0, 1, 2]
    assert [row[4].text for row in table.rows][2] == "not identifiable"


def test_waterfalls_side_by_side_have_one_scale():
    found = beside.waterfalls(two_blocks(), [two_blocks(sampled=True)])
    limits = [plate.figure.axes[0].get_xlim() for _, plate in found]
    assert limits[0] == pytest.approx(limits[1])
    assert [name for name, _ in found] == ["fixed-2x4", "sampled-2x4"]
