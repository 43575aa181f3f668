import dataclasses

from looplab.report import states
from looplab.report.keyed import Keyed
from report.sample import dense, two_blocks


def domain(result):
    return Keyed(result).domains[0]


def test_geometry_has_a_row_per_schedule_and_site_and_says_it_has_no_intervals():
    result = two_blocks()
    table = states.geometry(domain(result))
    assert len(table.rows) == 2 * len(result.domains[0].schedules)
    assert [cell.text for cell in table.rows[0][:4]] == ["full", "hidden", "1.000", "1.000"]
    assert "without intervals" in table.note


def test_an_update_from_a_zero_state_is_a_dash_and_a_tiny_one_keeps_its_digits():
    result = two_blocks()
    first = result.domains[0]
    full = first.schedules[0]
    small = dataclasses.replace(full.updates[1], relative=0.0002)
    full = dataclasses.replace(full, updates=(full.updates[0], small))
    result = dataclasses.replace(result, domains=(dataclasses.replace(first, schedules=(full,)),))
    table = states.updates(domain(result))
    place = table.columns.index("relative update")
    assert [row[place].text for row in table.rows] == ["\N{EN DASH}", "2.0e\N{MINUS SIGN}04"]


def test_what_was_not_measured_has_no_rows():
    assert not states.geometry(domain(dense())).rows
    assert not states.updates(domain(dense())).rows
